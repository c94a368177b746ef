"""Tests that psigrad's faster computation of a model gives the same outputs as transformers' modules.

Models in half precision are also tested in float32, because rounding can hide a wrong layer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from psigrad.errors import UserError, reason_of
from psigrad.kernels.kernels import kernels
from psigrad.language.models.fused.decoder import Decoder
from psigrad.language.models.fused.families import Unsupported
from psigrad.language.models.packing import ForwardInputs, Groups, lay_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The number of tokens of a text. A longer attention window is shortened to `WINDOW` for the test, so that the texts exceed it.
LENGTH, WINDOW, CHUNK = 14, 4, 8
# The largest allowed difference in float32, as a share of bfloat16's difference from float32. Correct code stays below 0.001.
SHARE = 0.02
# The largest allowed error of the faster computation in bfloat16, as a multiple of the error of transformers' modules.
# With so few tokens, two equally good computations differ by chance, by up to a factor of two.
ROUNDING = 4.0
# The change of logits above which a model reads later tokens. In float32, causal models stay below 1e-6, and encoders above 2e-4.
AHEAD = 5e-5

Numbers = Callable[[], Tensor]


@torch.no_grad()
def choose_attention(hf: PreTrainedModel, texts_of: Callable[[], Groups], probe: Callable[[Groups, bool], Tensor]) -> str:
    """Switch to psigrad's attention if its packed passes give the same outputs as transformers' padded passes.

    Return "", or the reason why the model keeps transformers' attention. `texts_of()` returns the texts for the test, and
    `probe(texts, packed)` returns the model's outputs on these texts.
    """
    from psigrad.language.models.hf_attention import IMPLEMENTATION
    from psigrad.language.models.hf_state import attach

    attach(hf)
    own = hf.config._attn_implementation
    if own == "sdpa" and getattr(hf.config.get_text_config(), "attn_logit_softcapping", None):
        own = "eager"  # transformers 5.17 computes SDPA without the cap of the scores, and raises no error
    with _suppress_advice(hf):
        texts, failure = _try(hf, own, texts_of)
    if texts is None:  # some models assume SDPA and raise an error when they run (softcapped attention)
        own = "eager"
        texts, failure = _try(hf, own, texts_of)
    if texts is None:
        raise UserError(f"{type(hf).__name__} does not run: {failure}; give a causal language model from transformers.")

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
def check_causal(hf: PreTrainedModel, text: Sequence[int]) -> None:
    """Raise `UserError` if a change of the last token in `text` (token ids) changes the logits at earlier tokens."""
    other = [*text[:-1], text[-1] - 1 if text[-1] else 1]

    def change() -> float:
        """Return the change of the logits at earlier tokens, in standard deviations (the lower quartile over tokens)."""
        passes = (hf(input_ids=torch.tensor([ids], device=hf.device), use_cache=False).logits for ids in (text, other))
        one, two = (logits[0, :-1].float() for logits in passes)
        return float(((one - two).pow(2).mean(-1).sqrt() / one.std(-1)).quantile(0.25))

    # A model may mask its first token, rounding may change one token's expert, and bfloat16 alone is no proof.
    if change() > AHEAD:
        with in_precision(hf, torch.float32):
            ahead = change() > AHEAD
        if ahead:
            raise UserError(
                f"{type(hf).__name__} reads later tokens, so it cannot learn to generate text; set is_decoder to true in its "
                "config.json if it has this setting, or give a causal language model."
            )


def attend(model: Any, choice: str) -> None:
    """Set the attention of packed passes; see `Pretrained.attend`."""
    if choice == "auto" and model.device.type == "cuda" and model.decoder is None and not model.why_padded:
        reasons = []
        for one in ("varlen", "flex"):
            try:
                return attend(model, one)
            except UserError as error:
                reasons.append(str(error).removesuffix("; set it to 'auto'."))
        model.why_sdpa = "; ".join(reasons)
    if choice in ("auto", "sdpa"):
        return None
    if model.decoder is not None or model.why_padded:
        why = "the fused decoder has its own attention" if model.decoder is not None else model.why_padded
        raise UserError(f"attention is {choice!r}, but {why}; set it to 'auto'.")
    own, before = with_gradient(model), model.attention_kernel
    try:
        model.attention_kernel = choice
        check_gap(model, own)
    except (RuntimeError, ValueError, ImportError) as error:
        model.attention_kernel = before
        reason = reason_of(error).rstrip(".")
        raise UserError(
            f"attention is {choice!r}, but it does not work on {model.device} ({reason}); set it to 'auto'."
        ) from error
    return None


def with_gradient(model: Any) -> list[Tensor]:
    """Return [the model's outputs on its probe texts, the gradient of their sum for each trained parameter, scaled to norm 1]."""
    # `torch.autograd.grad` skips FSDP's hooks
    learns = [p for p in model.trainable().values() if p.requires_grad] if model.shard_root is None else []
    with torch.set_grad_enabled(bool(learns)):
        found = model._probe(model._texts(), packed=True)
        slopes = torch.autograd.grad(found.sum(), learns, allow_unused=True) if learns else ()
    return [found.detach(), *(g / g.norm().clamp(min=1e-6) for g in slopes if g is not None)]


def check_gap(model: Any, own: list[Tensor]) -> None:
    """Raise `ValueError` if `with_gradient(model)` now differs from its earlier result `own` by more than rounding."""
    found = with_gradient(model)
    slopes = (float((a - b).abs().max()) for a, b in zip(found[1:], own[1:], strict=True))
    gap = max(distance(found[0], own[0]), *slopes, 0.0)
    if not gap < (1e-3 if model.network.dtype in (torch.float32, torch.float64) else 0.25):
        raise ValueError(f"the outputs or gradients differ by {gap:.1g} from those of sdpa")


@torch.no_grad()
def fuse(model: Any, texts: Groups, recompute: bool) -> tuple[Decoder | None, str]:
    """Return (fused decoder of `model`, ""), or (None, the reason) if it cannot have one with the same outputs on `texts`.

    `recompute` enables gradient checkpointing.
    """
    hf = model.network
    try:
        decoder = Decoder(hf, recompute, vision=model.vision)
    except Unsupported as error:
        return None, str(error)
    has_states = any(layer.order < 0 for layer in decoder.layers)
    inputs = _lay_out_chunks(model, texts) if has_states else lay_out(texts, model.device, packed=True)

    def own() -> Tensor:
        hidden: Tensor = model.target_hidden(inputs)
        return hidden

    def fused() -> Tensor:
        model.decoder = decoder if hf.dtype == decoder.stored == torch.bfloat16 else Decoder(hf, exact=True, vision=model.vision)
        try:
            return own()
        finally:
            model.decoder = None

    with _perturb_fresh_adapters(decoder):
        reason = difference(hf, own, fused)
    return (None, f"the fused forward pass differs from the model's own: {reason}") if reason else (decoder, "")


@torch.no_grad()
def attach_kernels(model: Any, texts: Groups) -> tuple[Any, str]:
    """Enable those of psigrad's kernels that do not change a packed model's outputs on `texts`.

    Return (the `ModuleKernels` or None, the error of the kernels for recurrent layers or "").
    """
    from psigrad.language.models.fused.gpu_parts import GpuParts
    from psigrad.language.models.fused.module_kernels import ModuleKernels

    hf, inputs = model.network, lay_out(texts, model.device, packed=True)
    if hf.device.type == "cuda":
        _enable(GpuParts(hf), model, inputs)
        return None, ""
    native = kernels()
    if isinstance(native, str) or hf.device.type != "cpu" or hf.dtype not in native.dtypes:
        return None, ""
    module_kernels = ModuleKernels(hf, native)
    _enable(module_kernels, model, inputs)
    switches = [module.has_state for module in hf.modules() if getattr(module, "has_state", None)]
    inputs_of_chunks = _lay_out_chunks(model, texts)

    def scanned(on: bool) -> Tensor:
        for switch in switches:
            switch.native = native if on else None
        hidden: Tensor = model.target_hidden(inputs_of_chunks)
        return hidden

    reason = _why_not(hf, scanned) if switches else ""
    for switch in switches:
        switch.native = None if reason else native
    return module_kernels if module_kernels.on else None, reason


def _lay_out_chunks(model: Any, texts: Groups) -> ForwardInputs:
    """Return `texts` as one packed row. Each text is repeated, so that it is longer than a chunk of the recurrence kernels."""
    repeats = max(1, min(8, model.max_length // LENGTH))
    longer = [tuple(ids) * repeats for ids in texts.prompts], [[tuple(ids) * repeats for ids in g] for g in texts.completions]
    return lay_out(Groups(*longer), model.device, packed=True)


@torch.no_grad()
def _enable(parts: Any, model: Any, inputs: ForwardInputs) -> None:
    """Set `parts.on`: True if the replacement methods in `parts` keep the model's outputs on `inputs`, otherwise False."""
    model.network.eval()  # the dropout of a new adapter is active until then

    def numbers(on: bool) -> Tensor:
        parts.on = on
        hidden: Tensor = model.target_hidden(inputs)
        return hidden

    parts.on = not _why_not(model.network, numbers)


def _why_not(hf: PreTrainedModel, numbers: Callable[[bool], Tensor]) -> str:
    """Return "" if the kernels keep the model's outputs up to rounding, else a message with the difference or error.

    `numbers(True)` returns the outputs with the kernels, and `numbers(False)` those without.
    """
    try:
        return difference(hf, lambda: numbers(False), lambda: numbers(True))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        return reason_of(error)


def difference(hf: PreTrainedModel, own: Numbers, fast: Numbers) -> str:
    """Return "" if the outputs `fast()` equal the correct outputs `own()` up to rounding, else describe the difference."""
    half = hf.dtype not in (torch.float32, torch.float64)
    exact = torch.float32 if half else hf.dtype
    with _shorten_chunks(hf):
        with in_precision(hf, exact):
            right, found = own(), fast()
            with shorten_windows(hf) as shorter:  # longer windows have no effect
                beyond = (own(), fast()) if shorter else None
        with in_precision(hf, torch.bfloat16):
            rounded = own()
    # If bfloat16 represents the model exactly, sums in another order still differ in their last bit.
    unit = max(distance(rounded, right), torch.finfo(exact).eps * distance(right, torch.zeros_like(right)) / SHARE)
    if not (gap := distance(found, right)) <= SHARE * unit:
        return f"in float32 its outputs differ by {gap:.1g}, and rounding to bfloat16 changes them by {unit:.1g}"
    if beyond is not None and not (gap := distance(*beyond)) <= SHARE * unit:
        return f"on texts longer than its attention window its outputs differ by {gap:.1g}"
    if half and not (gap := distance(fast(), right)) <= ROUNDING * unit:
        return f"in bfloat16 its outputs differ from float32 by {gap:.1g}, and the model's own outputs by {unit:.1g}"
    return ""


def distance(a: Tensor, b: Tensor) -> float:
    """Return the root mean square of a - b."""
    return float((a.double() - b.double()).pow(2).mean().sqrt())


def shared_prompts(one: Sequence[int], other: Sequence[int]) -> Groups:
    """Return two prompts of different lengths, with two completions each, cut from the texts `one` and `other` (token ids).

    These texts suffice to detect a model in which packed sequences affect each other.
    """
    third, half = len(one) // 3, len(one) // 2
    completions = ((one[third:], one[third : third + 1]), (other[half : half + 2], other[half:]))
    return Groups((one[:third], other[:half]), completions)


def draw_texts(hf: PreTrainedModel, first: int, vocabulary: int, length: int) -> list[list[int]]:
    """Return two texts of `length` ids: `first`, then ids below `vocabulary`, sampled with transformers' forward pass."""
    draw = torch.Generator().manual_seed(0)
    # full length from the start, since PyTorch would compile a product of each new shape again
    ids = torch.full((2, length), first, device=hf.device)
    with torch.no_grad(), _shorten_chunks(hf):
        for end in range(1, length):
            chances = hf(input_ids=ids, use_cache=False).logits[:, end - 1, :vocabulary].float().softmax(-1)
            ids[:, end] = torch.multinomial(chances.cpu(), 1, generator=draw)[:, 0]
    rows: list[list[int]] = ids.tolist()
    return rows


@contextlib.contextmanager
def in_precision(hf: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Run the model in the precision `dtype` inside this context, without TF32."""
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

    # Some models (CTRL) replace their buffers in a forward pass by buffers of the pass's precision.
    buffers = [(module._buffers, name, held) for module in hf.modules() for name, held in module._buffers.items()]
    layers = _layers(hf)
    compiled = [(layer, layer._compiled_call_impl) for layer in layers]  # compiled layers would ignore these hooks
    for layer in layers:
        layer._compiled_call_impl = None
    inside = {p for layer in layers for p in layer.parameters()}
    # cast a layer only while it runs, to save memory
    hooks = [layer.register_forward_pre_hook(lambda layer, given: cast(layer.parameters())) for layer in layers]
    hooks += [layer.register_forward_hook(lambda layer, given, made: put_back(list(layer.parameters()))) for layer in layers]
    try:
        cast(p for p in hf.parameters() if p not in inside)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        put_back(list(kept))
        for layer, own in compiled:
            layer._compiled_call_impl = own
        for owner, name, held in buffers:
            owner[name] = held
        matmul.allow_tf32 = fast


def _layers(hf: nn.Module) -> list[nn.Module]:
    """Return the modules in the model's outermost `ModuleList`s, such as its transformer blocks."""
    found: list[nn.Module] = []
    held: set[nn.Module] = set()
    for module in hf.modules():
        if isinstance(module, nn.ModuleList) and module not in held:
            found += module
            held.update(module.modules())
    return found


def shorten_windows(hf: PreTrainedModel) -> AbstractContextManager[bool]:
    """In this context, shorten attention windows (or chunks) longer than `LENGTH` to `WINDOW`. Yield True if any was longer."""
    return _shorten(hf, ("sliding_window", "attention_chunk_size"), LENGTH, WINDOW)


def _shorten_chunks(hf: PreTrainedModel) -> AbstractContextManager[bool]:
    """In this context, limit recurrent layers' chunks to `CHUNK` tokens. Texts are padded to full chunks, so this saves time."""
    return _shorten(hf, ("chunk_size",), CHUNK, CHUNK)


@contextlib.contextmanager
def _shorten(hf: PreTrainedModel, names: Sequence[str], most: int, size: int) -> Iterator[bool]:
    """Inside this context, set the attributes `names` to `size` where they exceed `most`. Yield True if any exceeded it."""
    owners = [vars(owner) for owner in (hf.config.get_text_config(), *hf.modules())]  # masks need the config's
    held: list[tuple[dict[str, Any], str, int]] = [
        (owner, name, value) for owner in owners for name in names if isinstance(value := owner.get(name), int) and value > most
    ]
    try:
        for owner, name, _ in held:
            owner[name] = size
        yield bool(held)
    finally:
        for owner, name, value in held:
            owner[name] = value


@contextlib.contextmanager
def _suppress_advice(hf: PreTrainedModel) -> Iterator[None]:
    """Inside this context, suppress transformers' advice to install CUDA kernels, if the model is on a CPU."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    before = logger.level
    if hf.device.type == "cpu":
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _perturb_fresh_adapters(decoder: Decoder) -> Iterator[None]:
    """Inside this context, set new adapters' matrices B, which are 0, to random weights, so that adapters affect the outputs."""
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
    """Set transformers' attention to `implementation` and call `run`. Return (its result, ""), or (None, the error)."""
    try:
        hf.set_attn_implementation(implementation)
        return run(), ""
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        return None, reason_of(error)


def dropouts_of(hf: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Return (module, attribute, value) of each dropout probability in a model."""
    return [
        (module, name, value)
        for module in hf.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout)))
    ]


def switch_dropout_off(hf: PreTrainedModel) -> None:
    """Set all dropout probabilities of a model to 0, and set evaluation mode."""
    for module, name, _ in dropouts_of(hf):
        setattr(module, name, 0.0)
    hf.eval()


def set_mode(network: nn.Module, training: bool) -> None:
    """Set training or evaluation mode. Routers with jitter stay in evaluation mode, so that they add no random noise."""
    network.train(training)
    for module in network.modules() if training else ():
        if any("jitter" in name for name in vars(module)):
            module.training = False  # a jitter of 0 would change PhiMoE's choice of experts


def recompute_activations(hf: PreTrainedModel) -> None:
    """Enable gradient checkpointing. It has an effect only in training mode, and changes no result."""
    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
