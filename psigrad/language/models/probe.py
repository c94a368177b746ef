"""Whether a faster way to compute a model gives the model's own numbers, judged by what bfloat16 alone does to them.

In bfloat16 two right ways can lie far apart: on ids that no text has, SmolLM2's own forward pass is 7 nats from itself in
float32. So both ways run in float32 too, where they must agree to a small share of that distance: rounding then is a thousand
times smaller, and a layer whose weights are off by 1 % is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from psigrad.errors import UserError, reason_of
from psigrad.language.models.fused.decoder import Decoder
from psigrad.language.models.fused.layer import Unsupported
from psigrad.language.models.packing import Groups, lay_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of a text, and the window that a longer one is shortened to meanwhile, so that the texts reach beyond it.
LENGTH, WINDOW = 14, 4
# In float32: the largest difference, as a share of that between bfloat16 and float32. Right ways stay below 0.001.
SHARE = 0.02
# In bfloat16: how many times as far from float32 as the model's own way a faster one may be. With so few tokens two equally good
# ways differ by chance, by up to twice.
ROUNDING = 4.0

Numbers = Callable[[], Tensor]


@torch.no_grad()
def choose_attention(hf: PreTrainedModel, texts_of: Callable[[], Groups], probe: Callable[[Groups, bool], Tensor]) -> str:
    """Why the packed forward can't be used for this model: an empty string where it reproduces the model's own attention.

    `texts_of()` gives texts of the model's own, `probe(texts, packed)` what it says of them, without the decoder. Leaves the
    model with our attention where that works, else with its own.
    """
    from psigrad.language.models.hf_attention import IMPLEMENTATION

    own = hf.config._attn_implementation
    texts, failure = _try(hf, own, texts_of)
    if texts is None:  # some models take SDPA for granted and refuse it when they run (softcapped attention)
        own = "eager"
        texts, failure = _try(hf, own, texts_of)
    if texts is None:
        raise UserError(f"{type(hf).__name__} does not run: {failure}; give a causal model of transformers.")

    def numbers(packed: bool) -> Tensor:
        hf.set_attn_implementation(IMPLEMENTATION if packed else own)
        return probe(texts, packed)

    reason, failure = _try(hf, IMPLEMENTATION, lambda: difference(hf, lambda: numbers(False), lambda: numbers(True)))
    if reason == "":
        hf.set_attn_implementation(IMPLEMENTATION)
        return ""
    hf.set_attn_implementation(own)
    return f"{type(hf).__name__} does not run packed: {failure or reason}"


@torch.no_grad()
def fuse(model: Any, texts: Groups, recompute: bool) -> tuple[Decoder | None, str]:
    """The fused decoder where it reproduces the model's own modules, else None and why."""
    hf = model.network
    try:
        decoder = Decoder(hf, recompute)
    except Unsupported as error:
        return None, str(error)
    inputs = lay_out(texts, model.device, packed=True)

    def own() -> Tensor:
        hidden: Tensor = model.target_hidden(inputs)
        return hidden

    def fused() -> Tensor:
        model.decoder = decoder if hf.dtype == decoder.stored == torch.bfloat16 else Decoder(hf, exact=True)
        try:
            return own()
        finally:
            model.decoder = None

    with _perturb_fresh_adapters(decoder):
        reason = difference(hf, own, fused)
    return (None, f"the fused forward is not the model's own: {reason}") if reason else (decoder, "")


def difference(hf: PreTrainedModel, own: Numbers, fast: Numbers) -> str:
    """What is wrong with the numbers of `fast`, if those of `own` are right; empty where nothing is.

    Windows that begin beyond the texts begin inside them for one more comparison in float32.
    """
    half = hf.dtype not in (torch.float32, torch.float64)
    exact = torch.float32 if half else hf.dtype
    with in_precision(hf, exact):
        right, found = own(), fast()
        with short_windows(hf) as shorter:
            beyond = (own(), fast()) if shorter else None
    with in_precision(hf, torch.bfloat16):
        rounded = own()
    # where bfloat16 holds the model exactly, sums of another order still differ in their last bit
    unit = max(distance(rounded, right), torch.finfo(exact).eps * distance(right, torch.zeros_like(right)) / SHARE)
    if not (gap := distance(found, right)) <= SHARE * unit:
        return f"in float32 its numbers differ by {gap:.1g}, and bfloat16 makes {unit:.1g} of difference"
    if beyond is not None and not (gap := distance(*beyond)) <= SHARE * unit:
        return f"beyond the window of its attention its numbers differ by {gap:.1g}"
    if half and not (gap := distance(fast(), right)) <= ROUNDING * unit:
        return f"in bfloat16 its numbers are {gap:.1g} from those of float32, and the model's own {unit:.1g}"
    return ""


def distance(a: Tensor, b: Tensor) -> float:
    """Root mean square of the differences."""
    return float((a.double() - b.double()).pow(2).mean().sqrt())


def shared_prompts(one: Sequence[int], other: Sequence[int]) -> Groups:
    """Two texts as prompts of unlike length, with completions that share them: enough to tell a model that leaks between packed
    sequences.
    """
    third, half = len(one) // 3, len(one) // 2
    completions = ((one[third:], one[third : third + 1]), (other[half : half + 2], other[half:]))
    return Groups((one[:third], other[:half]), completions)


def draw_texts(hf: PreTrainedModel, first: int, vocabulary: int, length: int) -> list[list[int]]:
    """Two texts of `length` tokens that the model writes behind the token `first`, by its own forward pass."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.full((2, length), first, device=hf.device)  # whole from the start: a product of new shape is compiled anew
    with torch.no_grad():
        for end in range(1, length):
            chances = hf(input_ids=ids, use_cache=False).logits[:, end - 1, :vocabulary].float().softmax(-1)
            ids[:, end] = torch.multinomial(chances.cpu(), 1, generator=draw)[:, 0]
    rows: list[list[int]] = ids.tolist()
    return rows


@contextlib.contextmanager
def in_precision(hf: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """The model in another precision meanwhile. A layer's weights are cast while the layer runs, so that little more memory is
    needed; all others are cast at once. Products of float32 have all of its digits.
    """
    kept: dict[nn.Parameter, Tensor] = {}
    matmul = torch.backends.cuda.matmul
    fast, matmul.allow_tf32 = matmul.allow_tf32, False

    def cast(parameters: Iterator[nn.Parameter]) -> None:
        for p in parameters:
            if p.is_floating_point() and p.dtype != dtype and p not in kept:
                kept[p] = p.data
                p.data = p.data.to(dtype)

    def put_back(parameters: Sequence[nn.Parameter]) -> None:
        for p in parameters:
            if p in kept:
                p.data = kept.pop(p)

    # some forward passes leave their buffers in the precision that they run in (CTRL)
    buffers = [(module._buffers, name, held) for module in hf.modules() for name, held in module._buffers.items()]
    layers = _layers(hf)
    inside = {p for layer in layers for p in layer.parameters()}
    hooks = [layer.register_forward_pre_hook(lambda layer, given: cast(layer.parameters())) for layer in layers]
    hooks += [layer.register_forward_hook(lambda layer, given, made: put_back(list(layer.parameters()))) for layer in layers]
    try:
        cast(p for p in hf.parameters() if p not in inside)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        put_back(list(kept))
        for owner, name, held in buffers:
            owner[name] = held
        matmul.allow_tf32 = fast


def _layers(hf: nn.Module) -> list[nn.Module]:
    """The items of the model's outermost lists of modules."""
    found: list[nn.Module] = []
    held: set[nn.Module] = set()
    for module in hf.modules():
        if isinstance(module, nn.ModuleList) and module not in held:
            found += module
            held.update(module.modules())
    return found


@contextlib.contextmanager
def short_windows(hf: PreTrainedModel) -> Iterator[bool]:
    """Windows and chunks of attention that are longer than the texts are `WINDOW` tokens meanwhile; gives whether there are any.
    The model's modules have the number, and its configuration, of which masks are made.
    """
    names = ("sliding_window", "attention_chunk_size")
    owners = [vars(owner) for owner in (hf.config.get_text_config(), *hf.modules())]
    held: list[tuple[dict[str, Any], str, int]] = [
        (owner, name, value) for owner in owners for name in names if isinstance(value := owner.get(name), int) and value > LENGTH
    ]
    try:
        for owner, name, _ in held:
            owner[name] = WINDOW
        yield bool(held)
    finally:
        for owner, name, value in held:
            owner[name] = value


@contextlib.contextmanager
def _perturb_fresh_adapters(decoder: Decoder) -> Iterator[None]:
    """Fresh adapters add nothing, their B being 0: here they do, so that a probe sees them."""
    fresh = [b for layer in decoder.layers for _, b in (a.weights for a in layer.adapters.values()) if not b.any()]
    generator = torch.Generator().manual_seed(0)
    for b in fresh:
        b.normal_(std=0.02, generator=generator)
    try:
        yield
    finally:
        for b in fresh:
            b.zero_()


def _try(hf: PreTrainedModel, implementation: str, run: Callable[[], Any]) -> tuple[Any, str]:
    """What `run` gives under an attention implementation, or None and what went wrong."""
    try:
        hf.set_attn_implementation(implementation)
        return run(), ""
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        return None, reason_of(error)
