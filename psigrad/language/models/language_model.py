"""A Hugging Face causal language model with its tokenizer, for training and sampling."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from psigrad.errors import UserError, reason_of
from psigrad.kernels.codes import Kind
from psigrad.language.models.backbone import (
    DTYPES,
    LOADING_ERRORS,
    Pretrained,
    check_complete,
    local_share,
    with_gathered_weights,
)
from psigrad.language.models.coded_linear import code_linears
from psigrad.language.models.fused.caches import ActivationCache, PackedWeights
from psigrad.language.models.logprobs import token_stats
from psigrad.language.models.lora import Lora, base_of
from psigrad.language.models.packing import ForwardInputs, Groups, Rows, Targets, lay_out
from psigrad.language.models.probe import difference, draw_texts
from psigrad.language.models.sizes import size
from psigrad.language.models.stats import TokenStats, TokenStatsRequest, Top, upcast
from psigrad.language.models.towers import open_towers
from psigrad.objective import PolicyOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The value head's file in a checkpoint (without its suffix), and the prefix of its parameters' names.
VALUE_HEAD = "value_head"


@dataclass(frozen=True)
class Divergence:
    """A request to `LanguageModel.evaluate` for a divergence between the policy and a reference."""

    model: LanguageModel | Top
    """The reference (or teacher), or its most probable tokens [N, T, k]. If `model` is the evaluated LoRA model itself, its
    adapter is disabled.
    """
    kind: str = "exact"
    """KL(π‖ref) ("exact"), KL(ref‖π) ("exact_forward") or the Jensen–Shannon divergence ("exact_js")."""
    mixture: float = 0.5
    """The weight of the reference in the mixture of "exact_js"."""
    inputs: Groups | None = None
    """The inputs of the reference, if its prompts differ from the policy's; the completions are the same."""


class SoftcappedHead:
    """An LM head with softcapping: logits z become c·tanh(z/c) (Gemma 2)."""

    def __init__(self, head: Any, cap: float) -> None:
        self.head, self.cap = head, cap

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the capped logits of hidden states."""
        logits: Tensor = self.cap * torch.tanh(self.head(hidden) / self.cap)
        return logits

    @property
    def base_layer(self) -> SoftcappedHead:
        """The capped head without its LoRA adapter."""
        return SoftcappedHead(base_of(self.head), self.cap)


@dataclass
class LanguageModel(Pretrained):
    """A causal language model with its tokenizer.

    `value_head` makes the model its own critic: V(s_t) = w · h_t + b, with h_t the hidden state that predicts token t.
    """

    value_head: nn.Linear | None = None
    full_logits: bool = False
    """True if the LM head's output differs from transformers' logits in a padded pass. transformers then computes the logits of
    all tokens at once.
    """
    new_cache: ClassVar[type[ActivationCache]] = ActivationCache
    """The class of the cache of activations that training reuses from sampling. Its argument is the limit in bytes."""

    @cached_property
    def vocabulary(self) -> int:
        """V, the number of token ids that the LM head scores."""
        return size(self.network.config, "vocabulary")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All token ids that end a completion: the EOS ids of the generation config and of the tokenizer."""
        ids = self.network.generation_config.eos_token_id if self.network.generation_config else None
        known = {*(ids if isinstance(ids, list) else [ids]), self.tokenizer.eos_token_id} - {None}
        return tuple(sorted(known))

    @torch.no_grad()
    def _why_full_logits(self) -> str:
        """Return "" if the LM head's output equals transformers' logits in a padded pass, else how they differ."""

        def logits(full: bool) -> Tensor:
            self.full_logits = full
            hidden, head = self._target_hidden(lay_out(self._texts(), self.device, packed=False))
            made: Tensor = head(hidden)
            return made

        try:
            return difference(self.network, lambda: logits(True), lambda: logits(False))
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:  # some models do not run in bfloat16
            return reason_of(error)

    def usable(self, cache: ActivationCache | None) -> ActivationCache | None:
        """Return `cache`, or None if the model cannot use it: without a fused decoder, or while the adapter is disabled."""
        return cache if self.decoder is not None and (self.adapter is None or self.decoder.adapted) else None

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name, in the model's order; the value head's come last."""
        head = {} if self.value_head is None else dict(self.value_head.named_parameters(VALUE_HEAD))
        return super().trainable() | head

    def _probe(self, texts: Groups, packed: bool) -> Tensor:
        """Return the logit [N, T] of each completion token in `texts`, to compare two implementations of the model."""
        self.switch(self.train_mode and torch.is_grad_enabled())
        forward = lay_out(texts, self.device, packed)

        def logits() -> Tensor:
            hidden, head = self._target_hidden(forward)
            # if all logits are small, log-probs hide errors
            return head(hidden).gather(1, forward.targets.ids[:, None])[:, 0]

        return forward.targets.unpack(with_gathered_weights(self, logits))

    def _sample_texts(self, length: int) -> list[list[int]]:
        """Return two texts of `length` tokens that the model generates after its BOS token (EOS if it has no BOS)."""
        begin = self.tokenizer.bos_token_id
        known = [token for token in (begin, *self.eos_token_ids) if token is not None and token < self.vocabulary]
        return draw_texts(self.network, int(known[0]) if known else 0, self.vocabulary, length)

    def add_value_head(self, folder: Path | None = None) -> None:
        """Add a value head to the model: the one saved in `folder`, or a new one whose outputs are 0."""
        head = nn.Linear(self.network.get_output_embeddings().in_features, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        if folder is not None:
            head.load_state_dict(load_file(folder / f"{VALUE_HEAD}.safetensors"))
        self.value_head = head.to(self.device)

    def output_head(self) -> Any:
        """Return the module that maps hidden states to logits: the LM head, with softcapping if the model has it."""
        head = self.network.get_output_embeddings()
        cap = getattr(self.network.config.get_text_config(), "final_logit_softcapping", None)
        return head if cap is None else SoftcappedHead(head, float(cap))

    def head(self, hidden: Tensor, exact: bool, packed_weights: PackedWeights | None = None) -> Tensor:
        """Return the logits [B, V] of hidden states [B, E].

        `exact` disables a faster kernel that rounds differently from training. `packed_weights` is a cache for the head's matrix.
        """
        output = self.output_head()
        plain = type(output) is nn.Linear and output.bias is None and not torch.is_grad_enabled()
        fast = self.decoder or self.module_kernels
        if fast is not None and plain:
            out, products = hidden.new_empty(len(hidden), len(output.weight)), fast.native.products
            if packed_weights is None or hidden.dtype != output.weight.dtype:
                matrix = None
            else:
                matrix = packed_weights.head(output.weight, products)
            if matrix is not None:
                return products.multiply_packed(hidden, matrix, out)
            return products.linear(hidden, output.weight, out, exact=exact)
        logits: Tensor = output(hidden)
        return logits

    def evaluate(
        self,
        inputs: Groups | Rows,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        kl_to: LanguageModel | Divergence | None = None,
        value: bool = False,
        packed: bool | None = None,
        cache: ActivationCache | None = None,
    ) -> PolicyOutputs:
        """Return `PolicyOutputs` with log π [N, T] of every target token, and 0 at all other positions.

        On request the result also has the entropy, the divergence from `kl_to` (for a model, the exact KL), and the value head's
        V. `packed=False` selects padded passes, which are slower. Activations in `cache` are reused.
        """
        stats, targets = self.stats(
            inputs, temperature=temperature, entropy=entropy, kl_to=kl_to, value=value, packed=packed, cache=cache
        )
        return PolicyOutputs(
            logp=targets.unpack(stats.logp),
            entropy=None if stats.entropy is None else targets.unpack(stats.entropy),
            value=None if stats.value is None else targets.unpack(stats.value),
            kl=None if stats.kl is None else targets.unpack(stats.kl),
        )

    def stats(
        self,
        inputs: Groups | Rows,
        *,
        temperature: float = 1.0,
        entropy: bool | Literal["figure"] = False,
        accuracy: bool = False,
        kl_to: LanguageModel | Divergence | None = None,
        value: bool = False,
        mean_logp: bool = False,
        packed: bool | None = None,
        cache: ActivationCache | None = None,
    ) -> tuple[TokenStats, Targets]:
        """Return (statistics [M] of the M target tokens, their `Targets`); see `evaluate` for the arguments.

        `entropy="figure"` requests an entropy for logging, which may have no gradient. `accuracy` requests `TokenStats.hit`.
        """
        self.switch(self.train_mode and torch.is_grad_enabled())
        whole = lay_out(inputs, self.device, packed if packed is not None else not self.why_padded)
        forward, cache = local_share(self, whole), self.usable(cache)
        if cache is not None and self.decoder is not None and forward.layout is not None and isinstance(inputs, Groups):
            forward = replace(forward, cached=cache.find(inputs.prompts, inputs.completions, self.decoder.parameters))
        if self.router_recorder is not None and isinstance(inputs, Groups):
            forward = replace(forward, experts=self.router_recorder.read(inputs, self.device))

        def compute() -> TokenStats:
            values = None
            if value:
                hidden, head, values = self._with_values(forward)
            else:
                hidden, head = self._target_hidden(forward)
            reference = Divergence(kl_to) if isinstance(kl_to, LanguageModel) else kl_to
            reference_hidden: Tensor | Top | None = None
            reference_head: Callable[[Tensor], Tensor] | None = None
            other = None if reference is None else reference.model
            if isinstance(other, Top):
                top = other[(forward.targets.n.cpu(), forward.targets.t.cpu())]
                reference_hidden, reference_head = Top(top.ids.to(self.device), top.logp.to(self.device)), nn.Identity()
            elif reference is not None and other is not None:
                reference_hidden, reference_head = self._reference_hidden(reference, other, inputs, forward)
            kind, mixture = ("exact", 0.5) if reference is None else (reference.kind, reference.mixture)
            wanted = TokenStatsRequest(temperature, entropy, accuracy, reference_head, kind, mixture, mean_logp)
            cached = None if forward.cached is None else forward.cached.logps
            stats = token_stats(hidden, forward.targets.ids, head, self.vocabulary, wanted, reference_hidden, cached)
            return replace(stats, value=values)

        stats = with_gathered_weights(self, compute)
        if self.sequence_group is not None and forward.local_targets is not None:
            stats = TokenStats(
                *(self.sequence_group.gather(x, forward.local_targets, len(whole.targets.ids)) for x in stats.columns)
            )
        return stats, whole.targets

    def _reference_hidden(
        self, request: Divergence, other: LanguageModel, inputs: Groups | Rows, forward: ForwardInputs
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return (hidden states, head) of the reference model `other`, without gradient; see `_target_hidden`.

        `forward` is the layout of `inputs`. The reference reads `request.inputs` instead if they are set.
        """
        theirs = replace(forward, cached=None, experts=None)
        if request.inputs is not None or other.why_padded != self.why_padded:
            whole = lay_out(request.inputs or inputs, other.device, not other.why_padded)
            theirs = local_share(other, whole)
        with torch.no_grad():
            if other is not self:
                hidden, head = with_gathered_weights(other, lambda: other._target_hidden(theirs))
            else:
                with self.without_adapter():
                    hidden, head = self._target_hidden(theirs)
                head = base_of(head)  # the head is called later, when the adapter is on again
            # With other prompts, the row is divided differently, so other processes compute the states of this process's targets.
            if self.sequence_group is not None and theirs.local_targets is not forward.local_targets:
                every: Any = self.sequence_group.gather(hidden, theirs.local_targets, len(whole.targets.ids))
                hidden = (
                    every[forward.local_targets]
                    if forward.local_targets is not None and len(forward.local_targets)
                    else every[:1]
                )
            return hidden, head

    @torch.no_grad()
    def most_probable(self, inputs: Groups, k: int) -> tuple[Tensor, Top]:
        """Return (log π [N, T] of the completions' tokens, the k most probable tokens [N, T, k] at each position)."""
        self.switch(False)
        forward = lay_out(inputs, self.device, not self.why_padded)
        hidden, head = with_gathered_weights(self, lambda: self._target_hidden(forward))
        found = [torch.log_softmax(upcast(head(some)), -1).topk(min(k, self.vocabulary)) for some in hidden.split(256)]
        at, shape = (forward.targets.n, forward.targets.t), forward.targets.shape
        columns = torch.cat([top.indices for top in found]), torch.cat([top.values for top in found])
        return self.evaluate(inputs).logp, Top(*(x.new_zeros(*shape, x.shape[-1]).index_put(at, x) for x in columns))

    def _with_values(self, inputs: ForwardInputs) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
        """Return (hidden states, head, V): the results of `_target_hidden`, and the value [M] of the state before each target."""
        if self.value_head is None:
            raise ValueError("This model has no value head; call add_value_head() first.")
        hidden = self.target_hidden(inputs)
        values = self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0]
        if inputs.layout is None and not self._applies_head:
            return (*self._target_hidden(inputs), values)
        return hidden, self.output_head(), values

    def _target_hidden(self, inputs: ForwardInputs) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return (the hidden states [M, E] that predict the targets, the head that maps them to logits).

        If transformers must compute the logits of a padded pass, return (these logits [M, V], `nn.Identity()`).
        """
        if inputs.layout is not None or self._applies_head:
            return self.target_hidden(inputs), self.output_head()
        out = self._padded(self.network, inputs)
        return out.logits.flatten(0, 1).index_select(0, inputs.targets.rows), nn.Identity()

    @property
    def _applies_head(self) -> bool:
        """True if psigrad, not transformers, applies the LM head in a padded pass."""
        return bool(self.why_padded) and not self.full_logits  # padded passes of other models are only checks

    def without_adapter(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the LoRA adapter is disabled, so that the model is its own reference and needs no copy."""
        if self.adapter is None:
            raise ValueError("Only a LoRA model can be its own reference; use frozen_copy() for full fine-tuning.")
        adapter: Any = self.adapter
        off: contextlib.AbstractContextManager[Any] = adapter.disable_adapter()
        return off

    def save(self, folder: Path) -> None:
        """Save weights (only the adapter, if any) and tokenizer in Hugging Face format, and the value head in its own file."""
        if self.value_head is not None:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self.value_head.state_dict(), folder / f"{VALUE_HEAD}.safetensors")
        super().save(folder)


def load(
    path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    lora: Lora | None = None,
    adapter: Path | None = None,
    tokenizer: str | PreTrainedTokenizerBase = "",
    eos_token: str = "",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    for_shards: bool = False,
    base: Kind | Literal[""] = "",
    vision: bool = False,
    towers: Sequence[str] = (),
) -> LanguageModel:
    """Load the model at `path` (a folder or a hub name), ready for training and sampling.

    - `adapter` is a folder with LoRA weights to resume from.
    - `tokenizer` (an object or a folder) replaces the one at `path`. `eos_token` becomes its EOS token if the vocabulary has it.
    - `trust_remote_code` runs the Python code that comes with the model.
    - `for_shards` leaves the weights in the host's memory, for `sharded.shard`.
    - `base` is the quantisation of the layers under a LoRA adapter: "nf4", "int8" or "gguf".
    - `vision` loads the vision tower even if the language model can be loaded without it.
    - `towers` names modules outside the language model that are also trained.

    Raises `UserError` if no model can be loaded from `path`.
    """
    from psigrad.language.models.fused.loader import load as load_known
    from psigrad.language.models.tokenizer_files import read_tokenizer
    from psigrad.language.models.vision import configure_vision, needs_vision

    kind = base or None if lora is not None else None
    plain = (lora is None or kind is not None) and device == "cpu"
    try:
        found = load_known(path, DTYPES[dtype], mapped=for_shards, kind=kind) if plain else None
        network: Any = found[0] if found is not None else None
        if network is None and kind == "gguf":
            raise ValueError("quantize_base=gguf needs a CPU and a Llama, Mistral, Qwen2 or Qwen3; set quantize_base=nf4")
        if network is None:
            asked: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
            loader = AutoModelForImageTextToText if vision or needs_vision(path) else AutoModelForCausalLM
            read: Any = loader.from_pretrained(path, **asked, output_loading_info=True)
            network, report = read
            check_complete(report["missing_keys"])
            open_towers(network, path)
            if kind is not None:
                code_linears(network, kind)
        if isinstance(tokenizer, str):
            tokenizer = read_tokenizer(tokenizer or path, trust_remote_code=trust_remote_code)
        configure_vision(tokenizer, network, path)
        if eos_token in tokenizer.get_vocab():
            tokenizer.eos_token = eos_token
    except LOADING_ERRORS as error:
        what = "" if isinstance(error, OSError) else _why_no_text(path)  # do not ask a hub again that does not answer
        reason = "" if what else f" ({reason_of(error)})"
        advice = what or "give a folder or a hub name"
        raise UserError(f"No causal language model could be loaded from {path!r}{reason}; {advice}.") from error
    network, again, known = network.to("cpu" if for_shards else device), gradient_checkpointing, found is not None
    return prepare(network, tokenizer, lora, adapter, gradient_checkpointing=again, is_known=known, towers=towers)


def prepare(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lora: Lora | None = None,
    adapter: Path | None = None,
    *,
    gradient_checkpointing: bool = False,
    is_known: bool = False,
    towers: Sequence[str] = (),
) -> LanguageModel:
    """Return `network` as a `LanguageModel`; see `load` for the arguments. `is_known` is True if `fused.loader` loaded it."""
    if tokenizer.eos_token_id is None:
        raise UserError("The tokenizer has no EOS token, so completions would never end; set eos_token.")
    model = LanguageModel(network, tokenizer).prepare("CAUSAL_LM", lora, adapter, gradient_checkpointing, is_known, towers)
    model.full_logits = bool(model.why_padded and model._why_full_logits())
    return model


def _why_no_text(path: str) -> str:
    """Return advice if the config at `path` is that of an image or audio model that psigrad cannot load, else ""."""
    from psigrad.language.models.vision import why_not_text

    try:
        return why_not_text(AutoConfig.from_pretrained(path))
    except LOADING_ERRORS:
        return ""
