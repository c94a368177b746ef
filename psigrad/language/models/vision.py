"""Vision towers of the model families that psigrad trains with images. An image's features replace embeddings in a prompt."""

from __future__ import annotations

import hashlib
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.images import FIRST, Picture, split_id
from psigrad.language.models.fused.caches import Version, versions
from psigrad.language.models.towers import processor_files, tower_parameters

if TYPE_CHECKING:
    from psigrad.language.models.attention import PackedLayout
    from psigrad.language.models.packing import ForwardInputs

KEPT_BYTES = 1 << 29
"""The limit in bytes of each cache: of images' features, or of their pixels if the tower is trained."""


Features = tuple[Tensor, ...]
"""An image's features [n, E]. With DeepStack further tensors [n, E] follow, which are added to the first layers' outputs."""


class _ImageCache:
    """A cache of tensors by the SHA-256 of an image. Beyond `KEPT_BYTES`, the least recently used images are dropped."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()
        self._bytes = 0

    def get(self, digest: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the cached tensors of the image with the SHA-256 `digest`. If there are none, `make` computes them."""
        if digest not in self._kept:
            self._kept[digest] = make()
            self._bytes += sum(x.nbytes for x in self._kept[digest])
            while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= sum(x.nbytes for x in self._kept.popitem(last=False)[1])
        self._kept.move_to_end(digest)
        return self._kept[digest]


@dataclass
class _TowerCache:
    """The cached features of one network's vision tower, and the versions of its weights when they were computed."""

    parameters: list[nn.Parameter]
    versions: list[Version] = field(default_factory=list)
    features: _ImageCache = field(default_factory=_ImageCache)


class Vision:
    """An `images.ImageFormat` for one model family: the text that stands for an image in a prompt, and the image's features.

    With `two_way`, the tokens of an image attend to each other in both directions. With `axes`, they have positions in
    time, height and width (M-RoPE).
    """

    two_way = axes = False
    inputs: tuple[str, ...] = ("pixel_values",)
    """The names of the vision tower's arguments, as the image processor returns them."""
    along = 0
    """The axis along which the arguments of several images are concatenated."""

    def __init__(self, processor: Any, config: Any, tokenizer: Any, files: dict[str, bytes] | None = None) -> None:
        self.processor, self.config, self.tokenizer, self.files = processor, config, tokenizer, files or {}
        self.token_id = int(config.image_token_id)
        self.placeholder = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self._held: WeakKeyDictionary[Any, _TowerCache] = WeakKeyDictionary()
        self._inputs = _ImageCache()

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The ids of the placeholder tokens of images and videos, which no completion may contain."""
        found = (self.token_id, getattr(self.config, "video_token_id", None))
        return tuple(int(token) for token in found if token is not None)

    @property
    def version(self) -> str:
        """A hash of the image processor's settings and transformers' version, on which the pixel values of an image depend."""
        settings = self.processor.to_json_string()
        return hashlib.sha256(f"{transformers.__version__}\n{settings}".encode()).hexdigest()

    def expand(self, picture: Picture) -> str:
        """Return the text of an image in a prompt, with one placeholder per feature; see `ImageFormat`."""
        return self.placeholder * self.count(picture)

    def count(self, picture: Picture) -> int:
        """Return the number of an image's features; see `ImageFormat`."""
        raise NotImplementedError

    def pixels(self, pictures: Sequence[Picture]) -> tuple[Tensor, ...]:
        """Return the image processor's results for these images: the vision tower's arguments, in the order of `self.inputs`."""
        made = self.processor(images=[one.open() for one in pictures], return_tensors="pt")
        return tuple(made[name] for name in self.inputs)

    def features(self, network: Any, pictures: Sequence[Picture]) -> list[Features]:
        """Return the features of each image, from a cache if the tower is frozen or gradients are disabled."""
        if network not in self._held:
            self._held[network] = _TowerCache(tower_parameters(network))
        held = self._held[network]
        learns = any(p.requires_grad for p in held.parameters)
        if learns and torch.is_grad_enabled():
            return self._compute(network, pictures, learns)
        if (now := versions(held.parameters)) != held.versions:
            held.versions, held.features = now, _ImageCache()
        with torch.no_grad():  # one image at a time, so that the features do not depend on the batch
            return [held.features.get(one.digest, partial(self._one, network, one, learns)) for one in pictures]

    def _one(self, network: Any, picture: Picture, learns: bool) -> Features:
        return self._compute(network, [picture], learns)[0]

    def _compute(self, network: Any, pictures: Sequence[Picture], learns: bool) -> list[Features]:
        """Compute the features of each image. `learns` is True if the tower is trained."""
        # A trained tower needs the pixels again in later passes.
        given = [self._inputs.get(one.digest, partial(self.pixels, [one])) if learns else self.pixels([one]) for one in pictures]
        together: dict[Any, list[int]] = {}
        for i, tensors in enumerate(given):
            together.setdefault(tensors[0].shape[self.along + 1 :], []).append(i)
        found: dict[int, Features] = {}
        for members in together.values():
            parts = [torch.cat([given[i][k] for i in members], self.along) for k in range(len(self.inputs))]
            asked = {name: x.to(network.device) for name, x in zip(self.inputs, parts, strict=True)}
            made = network.get_image_features(**asked, return_dict=True)
            columns = [_rows(x) for x in (made.pooler_output, *(getattr(made, "deepstack_features", None) or ()))]
            counts = [self.count(pictures[i]) for i in members]
            if len(columns[0]) != sum(counts):
                raise UserError(
                    f"The vision tower gives {len(columns[0])} features for {len(members)} images, but the prompts have "
                    f"{sum(counts)} image tokens; use the image processor of this model."
                )
            found |= dict(zip(members, zip(*(x.split(counts) for x in columns), strict=True), strict=True))
        return [found[i] for i in range(len(pictures))]

    def fill(self, network: Any, embedded: Tensor, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Replace the embeddings of image tokens in `embedded` [N, E] by the images' features. `ids` [N] has all tokens' ids.

        Return (the new embeddings, tensors [image tokens, E] for DeepStack). The caller adds tensor i to the output of layer i.
        """
        seen = (ids >= FIRST).nonzero()[:, 0]
        if not len(seen):
            return embedded, ()
        tokens = [split_id(token) for token in ids[seen].tolist()]
        pictures = list({picture.digest: picture for picture, _ in tokens}.values())
        held = self.features(network, pictures)
        ends = np.cumsum([len(one[0]) for one in held])
        firsts = {one.digest: int(end) - len(of[0]) for one, of, end in zip(pictures, held, ends, strict=True)}
        index = torch.tensor([firsts[picture.digest] + place for picture, place in tokens], device=ids.device)
        columns = [torch.cat(parts).index_select(0, index) for parts in zip(*held, strict=True)]
        filled = embedded.index_put((seen,), columns[0].to(embedded.dtype))
        return filled, tuple(columns[1:])

    def shift(self, ids: Sequence[int]) -> int:
        """Return p − len(ids), with p the position of the next token after `ids`; 0 except in families with M-RoPE."""
        return 0

    def apply_layout(self, inputs: ForwardInputs) -> ForwardInputs:
        """Return packed inputs with the positions and the attention that image tokens have in this family."""
        return inputs

    def forward_arguments(self, inputs: ForwardInputs) -> dict[str, Tensor]:
        """Return the arguments of transformers' forward pass for padded inputs with images: ids, pixels, and token types."""
        ids, seen = inputs.input_ids, inputs.input_ids >= FIRST
        found: dict[str, Tensor] = {"input_ids": ids.masked_fill(seen, self.token_id)}
        pictures = [picture for token in ids[seen].tolist() for picture, place in [split_id(token)] if place == 0]
        if pictures:
            found |= {name: x.to(ids.device) for name, x in zip(self.inputs, self.pixels(pictures), strict=True)}
        return found | self._kinds(seen)

    def _kinds(self, seen: Tensor) -> dict[str, Tensor]:
        return {}

    def save(self, folder: Path) -> None:
        """Write the configuration files of the image processor to a model's folder."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


class Tiles(Vision):
    """The images of Idefics 3 and SmolVLM: their tiles, and then the whole image, scaled down to one tile."""

    inputs, along = ("pixel_values", "pixel_attention_mask"), 1

    @property
    def each(self) -> int:
        """The number of features of one tile."""
        vision = self.config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2 / self.config.scale_factor**2)

    def _tiles(self, picture: Picture) -> tuple[int, int]:
        _, rows, columns = self.processor.get_number_of_image_patches(picture.height, picture.width, {})
        return int(rows), int(columns)

    def expand(self, picture: Picture) -> str:
        """Return the text of an image in a prompt, tile by tile, and then the whole image; see `ImageFormat`."""
        rows, columns = self._tiles(picture)
        edge, tile = "<fake_token_around_image>", self.placeholder * self.each
        whole = f"{edge}<global-img>{tile}{edge}"
        lines = ["".join(f"{edge}<row_{i + 1}_col_{j + 1}>{tile}" for j in range(columns)) + "\n" for i in range(rows)]
        return "".join(lines) + ("\n" if rows else "") + whole

    def count(self, picture: Picture) -> int:
        """Return the number of features of an image with all its tiles; see `ImageFormat`."""
        rows, columns = self._tiles(picture)
        return self.each * (rows * columns + 1)

    def pixels(self, pictures: Sequence[Picture]) -> tuple[Tensor, ...]:
        """Return the vision tower's arguments [1, tiles, ...]: the pixels of all images' tiles, and their mask."""
        made = self.processor(images=[[one.open() for one in pictures]], return_tensors="pt")
        return tuple(made[name] for name in self.inputs)


class Blocks(Vision):
    """The images of Gemma 3. Each has a fixed number of features, which attend to each other in both directions."""

    two_way = True

    def __init__(self, processor: Any, config: Any, tokenizer: Any, files: dict[str, bytes] | None = None) -> None:
        super().__init__(processor, config, tokenizer, files)
        begin, end = (str(tokenizer.convert_ids_to_tokens(int(i))) for i in (config.boi_token_id, config.eoi_token_id))
        self._whole = f"\n\n{begin}{self.placeholder * self.config.mm_tokens_per_image}{end}\n\n"
        self.placeholder = begin

    def expand(self, picture: Picture) -> str:
        """Return the text of an image in a prompt, which is the same for all images; see `ImageFormat`."""
        return self._whole

    def count(self, picture: Picture) -> int:
        """Return the number of an image's features, which is the same for all images; see `ImageFormat`."""
        return int(self.config.mm_tokens_per_image)

    def apply_layout(self, inputs: ForwardInputs) -> ForwardInputs:
        """Return the inputs with a layout in which the tokens of an image attend to each other."""
        ids = inputs.input_ids.flatten()
        seen = ids >= FIRST
        # Consecutive image tokens are one image, as for transformers, because there is always text between two images.
        begins = seen & ~torch.nn.functional.pad(seen, (1, -1))
        blocks = torch.where(seen, begins.cumsum(0), 0)
        return replace(inputs, layout=replace(inputs.layout, blocks=blocks))

    def _kinds(self, seen: Tensor) -> dict[str, Tensor]:
        return {"token_type_ids": seen.long()}


class Grid(Vision):
    """The images of Qwen 3 VL and Qwen 3.5: a grid of features with positions in time, height and width."""

    axes = True
    inputs = ("pixel_values", "image_grid_thw")

    def _grid(self, picture: Picture) -> tuple[int, int]:
        """Return (number of rows, number of columns) of an image's grid of features."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        own = self.processor
        factor = own.patch_size * own.merge_size
        limits = {"min_pixels": own.size["shortest_edge"], "max_pixels": own.size["longest_edge"]}
        height, width = smart_resize(picture.height, picture.width, factor, **limits)
        return height // factor, width // factor

    def count(self, picture: Picture) -> int:
        """Return the number of an image's features; see `ImageFormat`."""
        rows, columns = self._grid(picture)
        return rows * columns

    def shift(self, ids: Sequence[int]) -> int:
        """Return p − len(ids), with p the position after `ids`. An image of h × w features advances p by max(h, w), not h·w."""
        found = 0
        for token in ids:
            if token >= FIRST:
                picture, place = split_id(token)
                if place == 0:
                    found += max(self._grid(picture)) - self.count(picture)
        return found

    def positions(self, ids: Sequence[int]) -> np.ndarray:
        """Return the positions [3, L] of a prompt's tokens in time, height and width (Qwen2-VL, arXiv:2409.12191, 2.1)."""
        made, at, i = np.zeros((3, len(ids)), dtype=np.int64), 0, 0
        while i < len(ids):
            if ids[i] < FIRST:
                made[:, i] = at
                at, i = at + 1, i + 1
                continue
            picture, _ = split_id(ids[i])
            rows, columns = self._grid(picture)
            count = min(rows * columns, len(ids) - i)  # a packed sequence lacks its last token
            grid = np.stack([np.zeros(rows * columns, int), *np.divmod(np.arange(rows * columns), columns)])
            made[:, i : i + count] = at + grid[:, :count]
            at, i = at + max(rows, columns), i + count
        return made

    def apply_layout(self, inputs: ForwardInputs) -> ForwardInputs:
        """Return the inputs with positions [3, 1, S] in time, height and width. A sequence continues its prefix's positions."""
        ids = inputs.input_ids.flatten()
        layout: PackedLayout = inputs.layout
        every, pieces = ids.tolist(), layout.pieces
        starts, lengths, begin = pieces.starts.tolist(), pieces.lengths.tolist(), pieces.base.tolist()
        made = np.zeros((3, len(every)), dtype=np.int64)
        for start, length, base, before in zip(starts, lengths, begin, pieces.before.tolist(), strict=True):
            prefix = every[base : base + before]
            made[:, start : start + length] = len(prefix) + self.shift(prefix) + self.positions(every[start : start + length])
        return replace(inputs, position_ids=torch.from_numpy(made)[:, None].to(ids.device))

    def _kinds(self, seen: Tensor) -> dict[str, Tensor]:
        return {"mm_token_type_ids": seen.int()}


FAMILIES: dict[str, type[Vision]] = {
    "idefics3": Tiles,
    "smolvlm": Tiles,
    "gemma3": Blocks,
    "qwen3_vl": Grid,
    "qwen3_vl_moe": Grid,
    "qwen3_5": Grid,
    "qwen3_5_moe": Grid,
}
"""The families that psigrad trains with images, by `model_type`."""


def needs_vision(path: str, requested: bool = False) -> bool:
    """Return True if the model at `path` needs its vision tower, or if the tower is `requested` and psigrad can use it."""
    from transformers import PreTrainedConfig

    kind = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    return requires_vision(kind) or (requested and kind in FAMILIES)


def requires_vision(kind: Any) -> bool:
    """Return True if the `model_type` `kind` is in `FAMILIES` and transformers has no class for its language model alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return kind in FAMILIES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def why_not_text(config: Any) -> str:
    """Return advice for an image or audio model that psigrad cannot load; "" if it can load the model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parts = [part for part in ("vision_config", "audio_config") if getattr(config, part, None) is not None]
    if not parts or config.model_type in (*FAMILIES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return ""
    return (
        f"{config.model_type} is an image or audio model, which psigrad cannot train; choose a text model of the family, or "
        f"one of {', '.join(FAMILIES)}"
    )


def configure_vision(tokenizer: Any, network: Any, path: str) -> None:
    """Make the tokenizer accept images in prompts if `network`, loaded from `path`, has a vision tower, else make it refuse them.

    Raises `ValueError` if the tower's image processor is at `path` but cannot be loaded.
    """
    if not hasattr(network, "get_image_features"):
        images.attach_image_format(tokenizer, None)
    elif images.image_format_of(tokenizer) is None and (why := attach(tokenizer, path)) and processor_files(path):
        raise ValueError(f"its image processor cannot be loaded: {why}; to use only text, delete the image processor's files")


def attach(tokenizer: Any, path: str, config: Any = None) -> str:
    """Make the tokenizer accept prompts with images if `config` (default: the one at `path`) is of a type in `FAMILIES`.

    Return the text of an error, or "" if there was none.
    """
    from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig

    try:
        kind = PreTrainedConfig.get_config_dict(path)[0].get("model_type") if config is None else config.model_type
        if kind not in FAMILIES:
            return ""
        processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        config = config or AutoConfig.from_pretrained(path)
        images.attach_image_format(tokenizer, FAMILIES[kind](processor, config, tokenizer, processor_files(path)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def tokenizer_of(processor: Any, config: Any) -> Any:
    """Return a multimodal processor's tokenizer with its chat template. Allow images if `config` is of a type in `FAMILIES`."""
    tokenizer = processor.tokenizer
    if getattr(processor, "chat_template", None) and not tokenizer.chat_template:
        tokenizer.chat_template = processor.chat_template
    if getattr(processor, "image_processor", None) is not None:
        with tempfile.TemporaryDirectory() as folder:
            processor.image_processor.save_pretrained(folder)
            if why := attach(tokenizer, folder, config):
                raise UserError(f"The image processor cannot be loaded ({why}); give another processor, or only a tokenizer.")
    return tokenizer


def _rows(features: Any) -> Tensor:
    """Return the features [n, E] as one tensor, whether transformers returned a tensor or a list with one per image."""
    whole = torch.cat([x.flatten(0, -2) for x in features]) if isinstance(features, list | tuple) else features
    return whole.flatten(0, -2)
