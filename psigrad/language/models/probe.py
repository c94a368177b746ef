"""Comparison of a faster way to compute a model with the model's own, relative to the rounding error of bfloat16.

In bfloat16 two correct ways can differ widely: on ids of no real text, SmolLM2's own forward pass is 7 nats from itself in
float32. So both ways also run in float32, where they must agree to a small share of that distance. There, rounding is a thousand
times smaller, and an error of 1 % in a layer's weights is not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from psigrad.errors import UserError, reason_of
from psigrad.kernels.kernels import kernels
from psigrad.language.models.fused.decoder import Decoder
from psigrad.language.models.fused.layer import Unsupported
from psigrad.language.models.packing import ForwardInputs, Groups, lay_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The number of tokens of a text, and the window that a longer one is temporarily shortened to, so that the texts reach beyond it.
LENGTH, WINDOW = 14, 4
# In float32, the largest allowed difference as a share of that between bfloat16 and float32. Correct ways stay below 0.001.
SHARE = 0.02
# In bfloat16, how many times farther from float32 a faster way may be than the model's own. With so few tokens two equally good
# ways differ by chance, by up to a factor of two.
ROUNDING = 4.0

Numbers = Callable[[], Tensor]


@torch.no_grad()
def choose_attention(hf: PreTrainedModel, texts_of: Callable[[], Groups], probe: Callable[[Groups, bool], Tensor]) -> str:
    """Return why the packed forward pass can't be used for this model; empty if it reproduces the model's own attention.

    `texts_of()` returns the model's own texts, and `probe(texts, packed)` its outputs on them, without the decoder. Afterwards
    the model has psigrad's attention if that works, otherwise its own.
    """
    from psigrad.language.models.hf_attention import IMPLEMENTATION
    from psigrad.language.models.hf_state import attach

    attach(hf)
    own = hf.config._attn_implementation
    with _without_advice(hf):
        texts, failure = _try(hf, own, texts_of)
    if texts is None:  # some models assume SDPA and raise an error when they run (softcapped attention)
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


def attend(model: Any, how: str) -> None:
    """Set how a packed model attends; see `Pretrained.attend`."""
    if how == "auto" and model.device.type == "cuda" and model.decoder is None and not model.why_padded:
        reasons = []
        for one in ("varlen", "flex"):
            try:
                return attend(model, one)
            except UserError as error:
                reasons.append(str(error).removesuffix("; leave it at 'auto'."))
        model.why_sdpa = "; ".join(reasons)
    if how in ("auto", "sdpa"):
        return None
    if model.decoder is not None or model.why_padded:
        why = "the fused decoder has an attention of its own" if model.decoder is not None else model.why_padded
        raise UserError(f"attention is {how!r}, and {why}; leave it at 'auto'.")
    own, before = with_gradient(model), model.attends
    try:
        model.attends = how
        check_gap(model, own)
    except (RuntimeError, ValueError, ImportError) as error:
        model.attends = before
        reason = reason_of(error).rstrip(".")
        raise UserError(f"attention is {how!r}, and it does not run on {model.device} ({reason}); leave it at 'auto'.") from error
    return None


def with_gradient(model: Any) -> list[Tensor]:
    """Return the outputs on the model's own texts, and the direction of the gradient of their sum for each parameter that learns.

    With shards, gradients are computed by hooks that a probe does not run.
    """
    learns = [p for p in model.trainable().values() if p.requires_grad] if model.root is None else []
    with torch.set_grad_enabled(bool(learns)):
        found = model._probe(model._texts(), packed=True)
        slopes = torch.autograd.grad(found.sum(), learns, allow_unused=True) if learns else ()
    return [found.detach(), *(g / g.norm().clamp(min=1e-6) for g in slopes if g is not None)]


def check_gap(model: Any, own: list[Tensor]) -> None:
    """Raise `ValueError` if the numbers of `with_gradient` are no longer the model's `own`."""
    found = with_gradient(model)
    slopes = (float((a - b).abs().max()) for a, b in zip(found[1:], own[1:], strict=True))
    gap = max(distance(found[0], own[0]), *slopes, 0.0)
    if not gap < (1e-3 if model.network.dtype in (torch.float32, torch.float64) else 0.25):
        raise ValueError(f"its numbers differ by {gap:.1g} from the model's own")


@torch.no_grad()
def fuse(model: Any, texts: Groups, recompute: bool) -> tuple[Decoder | None, str]:
    """Return the fused decoder if it reproduces the model's own modules, otherwise None and the reason."""
    hf = model.network
    try:
        decoder = Decoder(hf, recompute, vision=model.vision)
    except Unsupported as error:
        return None, str(error)
    inputs = lay_out(texts, model.device, packed=True)

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
    return (None, f"the fused forward is not the model's own: {reason}") if reason else (decoder, "")


@torch.no_grad()
def compose(model: Any, texts: Groups) -> tuple[Any, str]:
    """Return the kernels inside the modules of a packed model if they reproduce these modules, otherwise None.

    Also switch on the kernels of its layers with state, or return why they are off. On a GPU the modules launch fewer kernels.
    """
    from psigrad.language.models.fused.parts import Parts

    hf, native = model.network, kernels()
    if hf.device.type == "cuda":
        _compose_on_gpu(model, lay_out(texts, model.device, packed=True))
        return None, ""
    if isinstance(native, str) or hf.device.type != "cpu" or hf.dtype not in native.dtypes:
        return None, ""
    parts, inputs = Parts(hf, native), lay_out(texts, model.device, packed=True)
    hf.eval()  # a new adapter drops numbers until its model is in evaluation mode

    def numbers(on: bool) -> Tensor:
        parts.on = on
        hidden: Tensor = model.target_hidden(inputs)
        return hidden

    parts.on = not _why_not(hf, numbers)
    switches = [module.has_state for module in hf.modules() if getattr(module, "has_state", None)]
    repeats = max(1, min(8, model.max_length // LENGTH))  # so that there are several chunks
    longer = [tuple(ids) * repeats for ids in texts.prompts], [[tuple(ids) * repeats for ids in g] for g in texts.completions]
    inputs_of_chunks = lay_out(Groups(*longer), model.device, packed=True)

    def scanned(on: bool) -> Tensor:
        for switch in switches:
            switch.native = native if on else None
        hidden: Tensor = model.target_hidden(inputs_of_chunks)
        return hidden

    reason = _why_not(hf, scanned) if switches else ""
    for switch in switches:
        switch.native = None if reason else native
    return parts if parts.on else None, reason


@torch.no_grad()
def _compose_on_gpu(model: Any, inputs: ForwardInputs) -> None:
    """Let modules launch fewer kernels if their numbers stay the same."""
    from psigrad.language.models.fused.gpu_parts import GpuParts

    parts = GpuParts(model.network)

    def numbers(on: bool) -> Tensor:
        parts.on = on
        hidden: Tensor = model.target_hidden(inputs)
        return hidden

    parts.on = not _why_not(model.network, numbers)


def _why_not(hf: PreTrainedModel, numbers: Callable[[bool], Tensor]) -> str:
    """Return the fault in `numbers(True)`, assuming that `numbers(False)` are right; empty if there is none."""
    try:
        return difference(hf, lambda: numbers(False), lambda: numbers(True))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        return reason_of(error)


def difference(hf: PreTrainedModel, own: Numbers, fast: Numbers) -> str:
    """Return the fault in the numbers of `fast`, assuming that those of `own` are right; empty if there is none.

    Windows longer than the texts are shortened for one more comparison in float32.
    """
    half = hf.dtype not in (torch.float32, torch.float64)
    exact = torch.float32 if half else hf.dtype
    with in_precision(hf, exact):
        right, found = own(), fast()
        with short_windows(hf) as shorter:
            beyond = (own(), fast()) if shorter else None
    with in_precision(hf, torch.bfloat16):
        rounded = own()
    # If bfloat16 represents the model exactly, sums in another order still differ in their last bit.
    unit = max(distance(rounded, right), torch.finfo(exact).eps * distance(right, torch.zeros_like(right)) / SHARE)
    if not (gap := distance(found, right)) <= SHARE * unit:
        return f"in float32 its numbers differ by {gap:.1g}, and bfloat16 makes {unit:.1g} of difference"
    if beyond is not None and not (gap := distance(*beyond)) <= SHARE * unit:
        return f"beyond the window of its attention its numbers differ by {gap:.1g}"
    if half and not (gap := distance(fast(), right)) <= ROUNDING * unit:
        return f"in bfloat16 its numbers are {gap:.1g} from those of float32, and the model's own {unit:.1g}"
    return ""


def distance(a: Tensor, b: Tensor) -> float:
    """Return the root mean square of the differences."""
    return float((a.double() - b.double()).pow(2).mean().sqrt())


def shared_prompts(one: Sequence[int], other: Sequence[int]) -> Groups:
    """Return two texts as prompts of different lengths with completions that share them.

    This is enough to detect a model that leaks between packed sequences.
    """
    third, half = len(one) // 3, len(one) // 2
    completions = ((one[third:], one[third : third + 1]), (other[half : half + 2], other[half:]))
    return Groups((one[:third], other[:half]), completions)


def draw_texts(hf: PreTrainedModel, first: int, vocabulary: int, length: int) -> list[list[int]]:
    """Return two texts of `length` tokens that the model generates after the token `first`, by its own forward pass."""
    draw = torch.Generator().manual_seed(0)
    # full length from the start: a product of a new shape would be compiled again
    ids = torch.full((2, length), first, device=hf.device)
    with torch.no_grad():
        for end in range(1, length):
            chances = hf(input_ids=ids, use_cache=False).logits[:, end - 1, :vocabulary].float().softmax(-1)
            ids[:, end] = torch.multinomial(chances.cpu(), 1, generator=draw)[:, 0]
    rows: list[list[int]] = ids.tolist()
    return rows


@contextlib.contextmanager
def in_precision(hf: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Run the model in another precision inside this context.

    A layer's weights are cast while the layer runs, so that little more memory is needed; all others are cast at once. float32
    products use full precision.
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

    # Some forward passes leave their buffers in the precision that they run in (CTRL).
    buffers = [(module._buffers, name, held) for module in hf.modules() for name, held in module._buffers.items()]
    layers = _layers(hf)
    compiled = [(layer, layer._compiled_call_impl) for layer in layers]  # hooks that change weights are not compiled
    for layer in layers:
        layer._compiled_call_impl = None
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
        for layer, own in compiled:
            layer._compiled_call_impl = own
        for owner, name, held in buffers:
            owner[name] = held
        matmul.allow_tf32 = fast


def _layers(hf: nn.Module) -> list[nn.Module]:
    """Return the items of the model's outermost lists of modules."""
    found: list[nn.Module] = []
    held: set[nn.Module] = set()
    for module in hf.modules():
        if isinstance(module, nn.ModuleList) and module not in held:
            found += module
            held.update(module.modules())
    return found


@contextlib.contextmanager
def short_windows(hf: PreTrainedModel) -> Iterator[bool]:
    """Shorten windows and chunks of attention that are longer than the texts to `WINDOW` tokens. Yield True if there are any.

    The number is stored in the model's modules, and in its configuration, from which masks are built.
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
def _without_advice(hf: PreTrainedModel) -> Iterator[None]:
    """Hide transformers' advice to install CUDA kernels, which it logs once, while a model on a CPU runs for the first time."""
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
    """Give new adapters, whose B is 0, random weights inside this context, so that a probe sees them."""
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
    """Return the result of `run` under an attention implementation, or None and the error."""
    try:
        hf.set_attn_implementation(implementation)
        return run(), ""
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        return None, reason_of(error)


def dropouts_of(hf: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """List the dropout probabilities of a model: (module, attribute, value)."""
    return [
        (module, name, value)
        for module in hf.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout)))
    ]


def switch_dropout_off(hf: PreTrainedModel) -> None:
    """Set all dropout to 0, and evaluation mode. The model's outputs in that mode stay the same."""
    for module, name, _ in dropouts_of(hf):
        setattr(module, name, 0.0)
    hf.eval()


def set_mode(network: nn.Module, training: bool) -> None:
    """Set training or evaluation mode. Routers stay in evaluation mode, where they draw no noise.

    Setting their jitter to 0 would be wrong: in evaluation mode PhiMoE's jitter is a threshold for choosing experts.
    """
    network.train(training)
    for module in network.modules() if training else ():
        if any("jitter" in name for name in vars(module)):
            module.training = False


def recompute_activations(hf: PreTrainedModel) -> None:
    """Enable gradient checkpointing. transformers recomputes only in training mode, which changes no result."""
    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
