"""Mixture-of-experts models: the loss that balances their load, and the replay in training of the experts chosen in sampling.

A router sends each token to k of E experts. If two experts score about the same, rounding decides. Sampler and trainer then
compute with different weights, and the log-probs differ by far more than rounding. Following a recorded choice avoids this.
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


class Balance:
    """The auxiliary loss of a mixture-of-experts model, and its coefficient.

    Formula: E · Σ_e f_e · P_e, with f_e the assignments to expert e, P_e the sum of its probabilities, each over all tokens and
    layers and divided by their number; 1·k if all are used equally.

    Source: Fedus et al. 2021, Switch Transformer, arXiv:2101.03961; transformers' `load_balancing_loss_func`.
    """

    def __init__(self, coefficient: float, chosen: int) -> None:
        """Set the coefficient and k, the number of chosen experts."""
        self.coefficient, self.chosen = coefficient, chosen
        self._last: Tensor | None = None

    @property
    def asked(self) -> dict[str, bool]:
        """The arguments of transformers' forward pass: it returns router logits if a gradient is enabled."""
        return {"output_router_logits": True} if torch.is_grad_enabled() else {}

    def see(self, made: Any, mask: Tensor | None = None) -> None:
        """Compute the loss from the logits [S, E] of all routers in a forward pass's output; `mask` [B, S] excludes padding."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        logits = getattr(made, "router_logits", None)
        if logits and torch.is_grad_enabled():
            found: Any = load_balancing_loss_func(tuple(logits), logits[0].shape[-1], self.chosen, mask)
            self._last = found

    def add_to(self, loss: Loss, passes: float) -> Loss:
        """Return the loss of the last of `passes` forward passes with its auxiliary loss, so that a step gets their mean."""
        last, self._last = self._last, None
        if last is None:
            return loss
        share = self.coefficient * last / passes
        whole = {"loss": loss.terms["loss"] + share.detach()} if "loss" in loss.terms else {}
        return Loss(loss.value + share, {**loss.terms, **whole, "aux_loss": last.detach() / passes})


def balance_of(network: Any, coefficient: float | None) -> Balance | None:
    """Return the balance for `coefficient`; None means the model's own. Raises `UserError` for a model without such a loss."""
    config = network.config.get_text_config()
    own, chosen = getattr(config, "router_aux_loss_coef", None), size(config, "chosen")
    if not hasattr(config, "output_router_logits") or not chosen:
        if coefficient:
            raise UserError(
                f"router_aux_loss_coef is {coefficient:g}, and {type(network).__name__} has no routers whose load transformers "
                "reports; remove it."
            )
        return None
    wanted = (own or 0.0) if coefficient is None else coefficient
    return Balance(float(wanted), chosen) if wanted else None


def balanced(model: Any, share: Callable[[], Loss], passes: float) -> Loss:
    """Return the result of `share`, with the auxiliary loss if `model` has one."""
    loss = share()
    return loss if model.balance is None else model.balance.add_to(loss, passes)


class Routing:
    """The experts that the routers of a network choose for tokens: recorded, or followed."""

    def __init__(self, network: Any) -> None:
        self.routers = routers_of(network)
        self.count = 0
        """E, the number of experts."""
        self.chosen = size(network.config, "chosen")
        """k, the number of experts per token."""
        self._followed: Tensor | None = None
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        for place, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._route, place), with_kwargs=True)

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The dtype in which a choice is stored."""
        return np.uint8 if self.count <= 256 else np.uint16

    def _route(self, place: int, router: Any, given: Any, named: Any, made: Any) -> Any:
        """Return a router's logits, weights [S, k] and experts [S, k]."""
        if self._followed is not None:
            with _Choosing(self._followed[place], made[0].shape[-1]):
                made = router.forward(*given, **named)
        self.count = made[0].shape[-1]
        if self._seen is not None:
            self._seen.append(made[-2:])
        return made

    @contextlib.contextmanager
    def record(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Append each router's weights and choice [S, k] to the yielded list inside this context."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None

    @contextlib.contextmanager
    def follow(self, choices: Tensor | None) -> Iterator[None]:
        """Make the routers choose `choices` [layers, S, k] inside this context.

        After a pass with gradient the choices stay set, since the backward pass may recompute layers.
        """
        before, self._followed = self._followed, choices
        try:
            yield
        finally:
            if not torch.is_grad_enabled():
                self._followed = before

    def read(self, inputs: Groups, device: torch.device) -> Tensor | None:
        """Return the recorded choices [layers, S, k] in the order of the packed tokens; None if `inputs` have none."""
        if inputs.experts is None:
            return None
        texts = [prompt for prompt, _ in inputs.experts] + [own for _, group in inputs.experts for own in group]
        held = np.frombuffer(b"".join(map(base64.b64decode, texts)), dtype=self.dtype)
        found = torch.from_numpy(held.astype(np.int64)).view(-1, len(self.routers), self.chosen)
        return found.transpose(0, 1).contiguous().to(device)


class _Choosing(TorchFunctionMode):
    """A mode in which the best k of `count` are `choices` [S, k]. The router's other computations are unchanged."""

    def __init__(self, choices: Tensor, count: int) -> None:
        super().__init__()
        self.choices, self.count = choices, count

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") != "topk":
            return made
        of = args[0] if args else (kwargs or {})["input"]
        if of.shape != (len(self.choices), self.count) or made[1].shape != self.choices.shape:
            return made  # this call chooses the best groups of experts
        return torch.return_types.topk((of.gather(-1, self.choices), self.choices))


class Routes:
    """The choices that a sampler records in one call: the experts of each prompt, and of each written token but the last."""

    def __init__(self, routing: Routing, sequences: int, longest: int) -> None:
        self.routing = routing
        self.prompts: dict[int, str] = {}
        shape = (sequences, longest, len(routing.routers), routing.chosen)
        self.written = np.zeros(shape, dtype=routing.dtype)

    def _found(self, seen: list[tuple[Tensor, Tensor]]) -> np.ndarray:
        """Return the choices as [S, layers, k]."""
        found: np.ndarray = torch.stack([choice for _, choice in seen], 1).cpu().numpy().astype(self.routing.dtype)
        return found

    def read(self, requests: Sequence[int], lengths: Sequence[int], seen: list[tuple[Tensor, Tensor]]) -> None:
        """Record the prompts of these requests, which were read one after the other."""
        parts = np.split(self._found(seen), np.cumsum(lengths)[:-1])
        self.prompts |= {r: _text(part) for r, part in zip(requests, parts, strict=True)}

    def write(self, sequences: np.ndarray, places: np.ndarray, seen: list[tuple[Tensor, Tensor]]) -> None:
        """Record the tokens of these sequences at `places`, which were read."""
        self.written[sequences, places] = self._found(seen)

    def of(self, request: int, sequence: int, count: int) -> dict[str, str]:
        """Return the recorded experts of a completion of `count` tokens."""
        return {"prompt_experts": self.prompts[request], "experts": _text(self.written[sequence, : max(count - 1, 0)])}


def _text(choices: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(choices).tobytes()).decode()


def routers_of(network: Any) -> list[nn.Module]:
    """Return the modules that transformers knows as routers and that return (logits, weights, experts), in layer order."""
    known = (getattr(type(network.base_model), "_can_record_outputs", None) or {}).get("router_logits")
    recorders: list[Any] = known if isinstance(known, list) else [known]
    kinds = tuple(one.target_class for one in recorders if getattr(one, "index", None) == 0)
    return [module for module in network.base_model.modules() if isinstance(module, kinds)]


@torch.no_grad()
def replay_routers(model: Any) -> Routing:
    """Record and follow the routers of `model` from now on. Raises `UserError` if the choice of a router cannot be set."""
    hf = model.network
    name = type(hf).__name__
    if model.why_padded:
        raise UserError(f"router_replay needs a model that runs packed ({model.why_padded}); remove router_replay.")
    routing = Routing(hf)
    if not routing.routers or not routing.chosen:
        raise UserError(f"router_replay is for models of experts, but transformers finds none in {name}; remove router_replay.")
    inputs = lay_out(model.texts, model.device, packed=True)
    model.routing = routing
    try:
        with routing.record() as seen:
            own = model.target_hidden(inputs)
        choices = torch.stack([choice for _, choice in seen])
        others = (choices + 1) % routing.count
        same = model.target_hidden(replace(inputs, experts=choices))
        with routing.record() as seen:
            other = model.target_hidden(replace(inputs, experts=others))
        followed = torch.equal(torch.stack([choice for _, choice in seen]), others)
        weighed = all(bool((weights != 0).all()) for weights, _ in seen)
        if not (followed and weighed and float((same - own).abs().max()) < 1e-3 * float((other - own).abs().max())):
            raise ValueError("the model does not use the experts that are set")
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        model.routing = None
        raise UserError(f"router_replay cannot set the choices of {name}'s routers ({error}); remove router_replay.") from error
    return routing
