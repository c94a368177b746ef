"""The weights of a Llama-like model under transformers' names, without transformers' modules.

The fused decoder needs only the weights. Importing transformers' modelling code takes two seconds and a hundred megabytes, so the
weights are read into plain containers. Code that needs the model itself (`generate`, the padded forward pass, LoRA) gets it
around the same parameters.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError, StrictDataclassError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from psigrad.language.models.coded_linear import CodedLinear
from psigrad.language.models.fused import gguf_weights
from psigrad.language.models.native.codes import CodedMatrix, Kind, can_code, code
from psigrad.language.models.native.kernels import kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Family:
    """How an architecture differs from the others: biases of (q, k, v) and of o, each layer's sliding window, head norms."""

    biases: Callable[[Any], tuple[bool, bool]]
    window: Callable[[Any, int], int | None]
    head_norms: bool = False


def _by_setting(config: Any) -> tuple[bool, bool]:
    return config.attention_bias, config.attention_bias


def _by_layer(config: Any, layer: int) -> int | None:
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None


# The architectures that the fused decoder computes. A Llama has no window, whatever its file says.
FAMILIES = {
    "Llama": Family(_by_setting, lambda config, layer: None),
    "Mistral": Family(lambda config: (False, False), lambda config, layer: config.sliding_window),
    "Qwen2": Family(lambda config: (True, False), _by_layer),
    "Qwen3": Family(_by_setting, _by_layer, head_norms=True),
}


def family_of(config: Any) -> Family | None:
    """The family of a configuration of transformers; None where it is none of ours."""
    return FAMILIES.get(type(config).__name__.removesuffix("Config"))


def suits(config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    """Whether to read only the weights of such a model: the fused decoder runs it on a CPU."""
    return describes(config) and dtype in (torch.float32, torch.bfloat16) and not isinstance(kernels(), str)


def describes(config: PreTrainedConfig) -> bool:
    """Whether `WeightsOnly` describes the architecture, down to its rotary embedding and activation."""
    rope = getattr(config, "rope_parameters", None) or {}
    layer_types = set(getattr(config, "layer_types", None) or ())
    return (
        family_of(config) is not None
        and type(config).__module__.startswith("transformers.")
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and rope.get("rope_type") == "default"
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and config.num_attention_heads % config.num_key_value_heads == 0
        and layer_types <= {"full_attention", "sliding_attention"}
        and not any(getattr(config, name, None) for name in ("quantization_config", "auto_map", "transformers_weights"))
    )


class Norm(nn.Module):
    """The scale of an RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps


class Attention(nn.Module):
    """The projections of one layer's attention."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        family = FAMILIES[type(config).__name__.removesuffix("Config")]
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.scaling = self.head_dim**-0.5
        wide, narrow = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        first, last = family.biases(config)
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=first)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=first)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=first)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=last)
        if family.head_norms:
            self.q_norm = Norm(self.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(self.head_dim, config.rms_norm_eps)


class FeedForward(nn.Module):
    """The three matrices of one layer's SwiGLU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DecoderLayer(nn.Module):
    """The weights of one layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What `run` makes of x. Hooks on this module make its weights whole meanwhile, where they are kept in shards."""
        return run(x)


# The least number of positions whose angles are computed at once.
_POSITIONS = 256


class Rotary(nn.Module):
    """Angles p · θ^(−2i/d) of position p, for i = 0 … d/2 − 1, twice over (Su et al. 2021, arXiv:2104.09864)."""

    inv_freq: Tensor

    def __init__(self, config: Any, size: int) -> None:
        super().__init__()
        steps = torch.arange(0, size, 2, dtype=torch.float, device="cpu") / size
        self.register_buffer("inv_freq", 1.0 / (config.rope_parameters["rope_theta"] ** steps), persistent=False)

        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, S, d] in x's type, from a table: decoding asks for the same positions at every step."""
        needed = int(position_ids.max()) + 1 if position_ids.numel() else 0
        table = self._table
        if table is None or len(table[0]) < needed or table[0].dtype != x.dtype:
            with torch.inference_mode(False):  # the sampler's tensors can't be trained with
                positions = torch.arange(max(2 * needed, _POSITIONS), device=self.inv_freq.device)
                table = self._table = self._angles(positions, x.dtype)
        flat = position_ids.flatten()
        cosines, sines = (part.index_select(0, flat).view(*position_ids.shape, -1) for part in table)
        return cosines, sines

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Embedding(nn.Embedding):
    """An embedding without random initial weights."""

    def reset_parameters(self) -> None:
        """Draw nothing: on the meta device that would import torch's compiler, which takes over a second."""


class Backbone(nn.Module):
    """The embedding, the layers and the last norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = [DecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config, layers[0].self_attn.head_dim)


class WeightsOnly(nn.Module):
    """A model's weights, with a head for logits (`lm_head`) or for one number (`score`). It has no forward pass.

    Names, order and sharing of the parameters are those of transformers' model.
    """

    def __init__(self, config: PreTrainedConfig, generation_config: GenerationConfig | None, *, scalar: bool = False) -> None:
        super().__init__()
        self.config, self.generation_config = config, generation_config
        self.model = Backbone(config)
        if scalar:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        else:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> Backbone:
        """All but the head."""
        return self.model

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.norm.weight.device

    @property
    def scalar(self) -> bool:
        """Whether the head gives one number."""
        return "score" in self._modules

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """The head that gives logits."""
        return self.lm_head

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint: a head that is tied to the embedding is left out."""
        tied = not self.scalar and self.lm_head.weight is self.model.embed_tokens.weight
        return {name: x for name, x in self.state_dict().items() if not (tied and name == "lm_head.weight")}

    def save_pretrained(self, folder: Path, safe_serialization: bool = True) -> None:
        """config.json, generation_config.json and model.safetensors, as transformers' model writes them."""
        assert safe_serialization
        kind = type(self.config).__name__.removesuffix("Config")
        self.config.architectures = [f"{kind}For{'SequenceClassification' if self.scalar else 'CausalLM'}"]
        self.config.dtype = str(self.dtype).removeprefix("torch.")
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
        save_file(self.checkpoint_tensors(), folder / "model.safetensors", metadata={"format": "pt"})

    def as_transformers(self) -> PreTrainedModel:
        """transformers' model around the same parameters."""
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        auto: Any = AutoModelForSequenceClassification if self.scalar else AutoModelForCausalLM
        learns = {name: p.requires_grad for name, p in self.named_parameters()}
        config = copy.deepcopy(self.config)
        config.pad_token_id = (
            self.model.embed_tokens.padding_idx
        )  # the configuration's may have been set later, beyond the vocabulary
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            hf = auto.from_config(config, dtype=self.dtype)
        for name, module in list(self.named_modules()):
            if isinstance(module, CodedLinear):
                hf.set_submodule(name, module)
        hf.config.pad_token_id = self.config.pad_token_id
        hf.load_state_dict(self.state_dict(keep_vars=True), assign=True)
        hf.tie_weights()
        hf.base_model.rotary_emb = type(hf.base_model.rotary_emb)(config=self.config)
        if self.generation_config is not None:
            hf.generation_config = self.generation_config
        for name, p in hf.named_parameters():
            p.requires_grad_(learns[name])
        whole: PreTrainedModel = hf.train(self.training)
        return whole


def load(
    path: str, dtype: torch.dtype, *, scalar: bool = False, mapped: bool = False, kind: Kind | None = None
) -> tuple[WeightsOnly, list[str]] | None:
    """The weights at `path` (a folder or a hub name), and the names of those that are missing there. `mapped` leaves those of
    the wanted type on the file's pages, for a process that soon lets go of most of them. With a `kind` of codes the layers'
    matrices are coded, each as it is read.

    At most a scalar head may be missing; it is drawn from N(0, initializer_range²). None if only transformers can read the model,
    or say what is wrong with it. Raises `OSError` if `path` is a hub name that can't be reached and is not in the cache,
    `ValueError` if a tensor's shape is not the configuration's.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **({"num_labels": 1} if scalar else {}))
        files = _files(path) if suits(config, dtype) and not _file(path, "adapter_config.json") else []
        generation = None if scalar else _generation_config(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, StrictDataclassError) as error:
        # a hub that doesn't answer costs half a minute: transformers must not ask it again
        unanswered = isinstance(error.__cause__, LocalEntryNotFoundError)
        cached = (try_to_load_from_cache(path, name) for name in ("config.json", "adapter_config.json"))
        if unanswered and not any(isinstance(file, str) for file in cached):
            raise
        return None
    if not files and kind != "gguf":
        return None
    with torch.device("meta"):
        weights = WeightsOnly(config, generation, scalar=scalar)
    config.dtype = dtype
    wanted = {name: x.shape for name, x in weights.checkpoint_tensors().items()}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in files}
        found = {name: file for file in opened.values() for name in file.offset_keys()}
        places = {name: path for path, file in opened.items() for name in file.offset_keys()}
        if scalar:
            found.pop("lm_head.weight", None)
        missing = [name for name in wanted if name not in found]
        if kind != "gguf" and (found.keys() - wanted or missing not in ([], ["score.weight"])):
            return None
        for name, file in found.items():
            if (shape := tuple(file.get_slice(name).get_shape())) != wanted[name]:
                if name == "score.weight":
                    raise ValueError(f"its head gives {shape[0]} numbers; a reward model's or critic's gives one")
                raise ValueError(f"{name} has shape {shape}; by the configuration it is {tuple(wanted[name])}")
        tensors: dict[str, Tensor] = {}  # with codes read below, one by one
        if mapped and kind is None:
            tensors = {name: file.get_tensor(name).to(dtype) for name, file in found.items()}
        elif kind is None:
            tensors = {name: torch.empty(wanted[name], dtype=dtype).copy_(file.get_tensor(name)) for name, file in found.items()}
    if kind is not None:
        of_file = wanted.keys() - {"score.weight"}
        each = gguf_weights.read(path, config, of_file) if kind == "gguf" else _code_layers(places, found, dtype, kind)
        tensors = _put_codes(weights, each, dtype, kind)
        missing = [name for name in missing if name == "score.weight"]
    for name in missing:
        tensors[name] = torch.empty(wanted[name], dtype=dtype).normal_(std=config.initializer_range or 0.02)
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        setattr(weights.get_submodule(owner), last, nn.Parameter(tensor))
    if not scalar and config.tie_word_embeddings:
        weights.lm_head.weight = weights.model.embed_tokens.weight
    return weights.eval(), missing


def _put_codes(
    weights: WeightsOnly, each: Iterator[tuple[str, Tensor | CodedMatrix]], dtype: torch.dtype, kind: Kind
) -> dict[str, Tensor]:
    """Put matrices in codes into their layers; the other tensors."""
    rest = {}
    for name, read in each:
        if isinstance(read, CodedMatrix):
            weights.set_submodule(name.removesuffix(".weight"), CodedLinear(read, None, kind))
        else:
            rest[name] = torch.empty(read.shape, dtype=dtype).copy_(read)
    return rest


def _code_layers(
    places: Mapping[str, str], wanted: Iterable[str], dtype: torch.dtype, kind: Kind
) -> Iterator[tuple[str, Tensor | CodedMatrix]]:
    """Tensors of safetensors files one by one, layers' matrices in codes of the numbers that other loaders code."""
    for name in wanted:
        with safe_open(places[name], "pt") as alone:  # whose pages go with it
            read = alone.get_tensor(name).to(dtype)
        yield name, code(read, kind) if ".layers." in name and can_code(read, kind) else read


def _files(path: str) -> list[str]:
    """The safetensors files at `path`; empty if there are none."""
    if whole := _file(path, "model.safetensors"):
        return [whole]
    index = _file(path, "model.safetensors.index.json")
    names = set(json.loads(Path(index).read_text())["weight_map"].values()) if index else set()
    return [str(cached_file(path, name)) for name in sorted(names)]


def _file(path: str, name: str) -> str | None:
    """The path of one of the model's files; None if there is no such file."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return found


def _generation_config(path: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # older models keep the settings in config.json, whose reader drops them
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)
