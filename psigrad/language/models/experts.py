"""Mixture-of-experts models: the load-balancing loss, and training with the experts that the router chose during sampling.

A router sends each token to k of E experts. Because of rounding, sampler and trainer may choose different ones. Their log-probs
then differ by far more than rounding.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from psigrad.errors import UserError
from psigrad.language.models.packing import Groups, lay_out
from psigrad.language.models.sizes import size
from psigrad.objective import Loss


class LoadBalancing:
    """The auxiliary loss of a mixture-of-experts model, and its coefficient.

    Formula: E · Σ_e f_e · P_e, with f_e the share of tokens sent to expert e and P_e the mean of its router probabilities

    If all experts are used equally, the loss is k, the number of experts per token.

    Source: Fedus et al. 2021, Switch Transformer, arXiv:2101.03961; transformers' `load_balancing_loss_func`.
    """

    def __init__(self, coefficient: float, chosen: int) -> None:
        """Set the coefficient and k, the number of chosen experts."""
        self.coefficient, self.top_k = coefficient, chosen
        self._last: Tensor | None = None

    @property
    def forward_arguments(self) -> dict[str, bool]:
        """The extra arguments of transformers' forward pass. If gradients are enabled, they request the router logits."""
        return {"output_router_logits": True} if torch.is_grad_enabled() else {}

    def compute(self, output: Any, mask: Tensor | None = None) -> None:
        """If gradients are enabled, store the auxiliary loss of one forward pass for `add_to`. `mask` [B, S]: 0 is padding."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        logits = getattr(output, "router_logits", None)
        if logits and torch.is_grad_enabled():
            found: Any = load_balancing_loss_func(tuple(logits), logits[0].shape[-1], self.top_k, mask)
            self._last = found

    def add_to(self, loss: Loss, passes: float) -> Loss:
        """Return `loss` + coefficient · (auxiliary loss of the last pass) / `passes`, the number of passes per optimiser step."""
        last, self._last = self._last, None
        if last is None:
            return loss
        share = self.coefficient * last / passes
        whole = {"loss": loss.terms["loss"] + share.detach()} if "loss" in loss.terms else {}
        return Loss(loss.value + share, {**loss.terms, **whole, "aux_loss": last.detach() / passes})


def balance_of(network: Any, coefficient: float | None) -> LoadBalancing | None:
    """Return the auxiliary loss of a model; None if the coefficient is 0 or the model returns no router logits.

    If `coefficient` is None, the model's configuration sets it.
    """
    config = network.config.get_text_config()
    own, chosen = getattr(config, "router_aux_loss_coef", None), size(config, "chosen")
    if not hasattr(config, "output_router_logits") or not chosen:
        if coefficient:
            raise UserError(
                f"router_aux_loss_coef is {coefficient:g}, but {type(network).__name__} returns no router logits, which the "
                "auxiliary loss needs; remove router_aux_loss_coef."
            )
        return None
    wanted = (own or 0.0) if coefficient is None else coefficient
    return LoadBalancing(float(wanted), chosen) if wanted else None


def add_balance_loss(model: Any, share: Callable[[], Loss], passes: float) -> Loss:
    """Return `share()`, the loss of one forward pass, plus the auxiliary loss of `model` if it has one.

    `passes` is the number of forward passes in an optimiser step; see `LoadBalancing.add_to`.
    """
    loss = share()
    return loss if model.load_balancing is None else model.load_balancing.add_to(loss, passes)


class RouterRecorder:
    """The recorder of the experts that a network's routers choose. It can also force routers to choose given experts."""

    def __init__(self, network: Any) -> None:
        self.routers = routers_of(network)
        self.num_experts = 0
        """E, the number of experts."""
        self.top_k = size(network.config, "chosen")
        """k, the number of experts per token."""
        self._followed: Tensor | None = None
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        for place, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._route, place), with_kwargs=True)

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The NumPy dtype in which the index of an expert is stored."""
        return np.uint8 if self.num_experts <= 256 else np.uint16

    def _route(self, place: int, router: Any, given: Any, named: Any, made: Any) -> Any:
        """Return (logits, weights [S, k], experts [S, k]) of router number `place`. This is a forward hook of the router."""
        if self._followed is not None:
            with FixedChoice(self._followed[place], made[0].shape[-1]):
                made = router.forward(*given, **named)
        self.num_experts = made[0].shape[-1]
        if self._seen is not None:
            self._seen.append(made[-2:])
        return made

    @contextlib.contextmanager
    def record(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield a list to which each router appends (weights [S, k], experts [S, k]), with k experts per token."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None

    @contextlib.contextmanager
    def follow(self, choices: Tensor | None) -> Iterator[None]:
        """Force the routers to choose the experts `choices` [layers, S, k]; None lets them choose freely.

        If gradients are enabled, `choices` apply until the next `follow`, also in the backward pass.
        """
        before, self._followed = self._followed, choices
        try:
            yield
        finally:
            if not torch.is_grad_enabled():  # the backward pass may recompute layers
                self._followed = before

    def read(self, inputs: Groups, device: torch.device) -> Tensor | None:
        """Return the experts [layers, S, k] stored in `inputs`, k for each of S packed tokens; None if no experts are stored."""
        if inputs.experts is None:
            return None
        texts = [prompt for prompt, _ in inputs.experts] + [own for _, group in inputs.experts for own in group]
        held = np.frombuffer(b"".join(map(base64.b64decode, texts)), dtype=self.dtype)
        found = torch.from_numpy(held.astype(np.int64)).view(-1, len(self.routers), self.top_k)
        return found.transpose(0, 1).contiguous().to(device)


class FixedChoice(TorchFunctionMode):
    """A context in which a router with `count` experts chooses the experts `choices` [S, k]: `torch.topk` returns them."""

    def __init__(self, choices: Tensor, count: int) -> None:
        super().__init__()
        self.choices, self.num_experts = choices, count

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") != "topk":
            return made
        of = args[0] if args else (kwargs or {})["input"]
        if of.shape != (len(self.choices), self.num_experts) or made[1].shape != self.choices.shape:
            return made  # another topk of the router, which chooses groups of experts
        return torch.return_types.topk((of.gather(-1, self.choices), self.choices))


class Routes:
    """The experts that routers choose in one call of a sampler, for each token that the model reads.

    `seen` is the list that `RouterRecorder.record` filled in a pass.
    """

    def __init__(self, routing: RouterRecorder, sequences: int, longest: int) -> None:
        self.router_recorder = routing
        self.prompts: dict[int, str] = {}
        shape = (sequences, longest, len(routing.routers), routing.top_k)
        self.written = np.zeros(shape, dtype=routing.dtype)

    def _choices_of(self, seen: list[tuple[Tensor, Tensor]]) -> np.ndarray:
        """Return the experts in `seen` as an array [S, layers, k]. `seen` has (weights, experts), each [S, k], for each layer."""
        found: np.ndarray = torch.stack([choice for _, choice in seen], 1).cpu().numpy().astype(self.router_recorder.dtype)
        return found

    def read(self, requests: Sequence[int], lengths: Sequence[int], seen: list[tuple[Tensor, Tensor]]) -> None:
        """Record the experts of a pass over concatenated prompts. The prompt of request `requests[i]` has `lengths[i]` tokens."""
        parts = np.split(self._choices_of(seen), np.cumsum(lengths)[:-1])
        self.prompts |= {r: _text(part) for r, part in zip(requests, parts, strict=True)}

    def write(self, sequences: np.ndarray, places: np.ndarray, seen: list[tuple[Tensor, Tensor]]) -> None:
        """Record the experts of a decoding step. Its i-th token has the position `places[i]` in completion `sequences[i]`."""
        self.written[sequences, places] = self._choices_of(seen)

    def of(self, request: int, sequence: int, count: int) -> dict[str, str]:
        """Return the experts of a prompt and its completion (`count` tokens) in base64: {"prompt_experts": …, "experts": …}."""
        return {"prompt_experts": self.prompts[request], "experts": _text(self.written[sequence, : max(count - 1, 0)])}


def _text(choices: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(choices).tobytes()).decode()


def routers_of(network: Any) -> list[nn.Module]:
    """Return the modules that transformers lists as routers and that return (logits, weights, experts), in the model's order."""
    known = (getattr(type(network.base_model), "_can_record_outputs", None) or {}).get("router_logits")
    recorders: list[Any] = known if isinstance(known, list) else [known]
    kinds = tuple(one.target_class for one in recorders if getattr(one, "index", None) == 0)
    return [module for module in network.base_model.modules() if isinstance(module, kinds)]


@torch.no_grad()
def replay_routers(model: Any) -> RouterRecorder:
    """Set and return `model.router_recorder`: sampling then records each token's experts, and training uses the same ones."""
    hf = model.network
    name = type(hf).__name__
    if model.why_padded:
        raise UserError(f"router_replay needs packing, but this model pads sequences ({model.why_padded}); remove router_replay.")
    routing = RouterRecorder(hf)
    if not routing.routers or not routing.top_k:
        raise UserError(
            f"router_replay needs a mixture of experts, but transformers finds no router in {name}; remove router_replay."
        )
    inputs = lay_out(model.probe_texts, model.device, packed=True)
    model.router_recorder = routing
    try:
        with routing.record() as seen:
            own = model.target_hidden(inputs)
        choices = torch.stack([choice for _, choice in seen])
        others = (choices + 1) % routing.num_experts
        same = model.target_hidden(replace(inputs, experts=choices))
        with routing.record() as seen:
            other = model.target_hidden(replace(inputs, experts=others))
        followed = torch.equal(torch.stack([choice for _, choice in seen]), others)
        weighed = all(bool((weights != 0).all()) for weights, _ in seen)
        if not (followed and weighed and float((same - own).abs().max()) < 1e-3 * float((other - own).abs().max())):
            raise ValueError("the model did not use the experts that were set")
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        model.router_recorder = None
        raise UserError(f"router_replay cannot set the experts that {name} chooses ({error}); remove router_replay.") from error
    return routing
