"""The models that the Tinker API trains: adapters on one base model, their losses, their optimiser, and their saved states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from psigrad.language.models import language_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.records.checkpoint import replace_folder
from psigrad_serve.api_errors import ApiError

ALPHA = 32.0
"""The alpha of every adapter, as in Tinker."""
AT_ONCE = 4096
"""The maximum number of tokens of a forward pass."""
_STATE = "training_state.safetensors"
_DATUM = ("target_tokens", "weights", "advantages", "logprobs")
_OTHER_TARGETS = (
    "A datum has a target that is not the next token, where its {0} are not 0; send the next token as target, or set these "
    "{0} to 0."
)


@dataclass(frozen=True)
class TinkerDatum:
    """A training sequence: its first token, the tokens `targets` [T] after it, and the inputs of the loss at each target.

    `numbers` maps a name, such as weights or advantages, to [T]. At `idle` positions, the client gave a target other than the
    sequence's next token, as clients that pad the prompt do. The loss ignores them, and their log-probs are returned as 0.
    """

    first: int
    targets: tuple[int, ...]
    numbers: Mapping[str, Tensor]
    idle: Tensor | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], inputs: Mapping[str, Tensor]) -> TinkerDatum:
        """Return the datum of the client's input tokens and of its inputs to the loss, among them one target per token.

        Raises `ApiError` if they do not fit together.
        """
        if "target_tokens" not in inputs or inputs["target_tokens"].dim() != 1:
            raise ApiError("A datum needs target_tokens with one dimension; this server takes one target per position.")
        if unknown := sorted(set(inputs) - set(_DATUM)):
            raise ApiError(f"A datum has {', '.join(unknown)}; expected only {', '.join(_DATUM)}.")
        targets = tuple(inputs["target_tokens"].tolist())
        if len(targets) != len(tokens) or not tokens:
            raise ApiError(f"A datum has {len(tokens)} tokens and {len(targets)} targets; give one target per token.")
        numbers = {name: values for name, values in inputs.items() if name != "target_tokens"}
        if wrong := next((name for name, values in numbers.items() if values.shape != (len(targets),)), None):
            raise ApiError(f"{wrong} has the shape {tuple(numbers[wrong].shape)}; expected ({len(targets)},), one per target.")
        moved = (*tokens[1:], targets[-1])
        if targets == moved:
            return cls(tokens[0], targets, numbers)
        made = cls(tokens[0], moved, numbers, inputs["target_tokens"] != torch.tensor(moved))
        if not any(made.is_idle_by(name) for name in ("weights", "advantages") if name in numbers):
            raise ApiError(_OTHER_TARGETS.format("weights or advantages"))
        return made

    def is_idle_by(self, name: str) -> bool:
        """Return True if the input `name` of the loss is 0 at all idle positions."""
        return self.idle is None or not self.numbers[name][self.idle].any()

    def on(self, device: torch.device) -> TinkerDatum:
        """Return the datum with its inputs to the loss on a device, and 0 at idle positions."""
        return replace(self, numbers={name: _without(self, values).to(device) for name, values in self.numbers.items()})

    def number(self, name: str, loss: str) -> Tensor:
        """Return the input `name` [T] of the loss. Raises `ApiError` if the client did not send it."""
        if name not in self.numbers:
            raise ApiError(f"{loss} needs {name} in every datum, but one datum lacks it; add it.")
        return self.numbers[name]


Loss = Callable[[Tensor, TinkerDatum, Mapping[str, float]], Tensor]


def _cross_entropy(logp: Tensor, datum: TinkerDatum, how: Mapping[str, float]) -> Tensor:
    return -(logp * datum.number("weights", "cross_entropy")).sum()


def _ratio(logp: Tensor, datum: TinkerDatum, loss: str) -> tuple[Tensor, Tensor]:
    return (logp - datum.number("logprobs", loss)).exp(), datum.number("advantages", loss) * datum.numbers.get("weights", 1.0)


def _importance_sampling(logp: Tensor, datum: TinkerDatum, how: Mapping[str, float]) -> Tensor:
    ratio, advantage = _ratio(logp, datum, "importance_sampling")
    return -(ratio * advantage).sum()


def _ppo(logp: Tensor, datum: TinkerDatum, how: Mapping[str, float]) -> Tensor:
    ratio, advantage = _ratio(logp, datum, "ppo")
    return -torch.minimum(ratio * advantage, _clip(ratio, how) * advantage).sum()


def _cispo(logp: Tensor, datum: TinkerDatum, how: Mapping[str, float]) -> Tensor:
    ratio, advantage = _ratio(logp, datum, "cispo")
    return -(_clip(ratio, how).detach() * logp * advantage).sum()


def _dro(logp: Tensor, datum: TinkerDatum, how: Mapping[str, float]) -> Tensor:
    _, advantage = _ratio(logp, datum, "dro")
    distance = logp - datum.number("logprobs", "dro")
    return -(logp * advantage - how.get("beta", 0.05) / 2 * distance**2).sum()


def _clip(ratio: Tensor, how: Mapping[str, float]) -> Tensor:
    return ratio.clamp(how.get("clip_low_threshold", 0.8), how.get("clip_high_threshold", 1.2))


LOSSES: dict[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}
"""The losses by Tinker's names, each a sum over tokens.

In order: -Σ w log p, -Σ r A, -Σ min(r A, clip(r) A), -Σ sg(clip(r)) A log p, and -Σ (A log p - β/2 (log p - log q)²). Here r =
p/q, log q is the log-prob that the client sent, and sg stops the gradient.
"""


@dataclass
class TinkerModel:
    """An adapter in training, with its optimiser and accumulated gradient."""

    base: str
    rank: int
    model: LanguageModel
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.trainable().values())

    @classmethod
    def fresh(cls, base: str, rank: int, seed: int, **how: Any) -> TinkerModel:
        """Return a new adapter of this rank, initialised from the seed. `how` are settings for loading the base model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(base, rank, language_model.load(base, lora=Lora(rank, ALPHA), **how))

    def forward_backward(
        self, data: Sequence[TinkerDatum], loss: str, how: Mapping[str, float], backward: bool = True
    ) -> tuple[list[Tensor], float]:
        """Return the log-probs of each datum's targets [T], and the sum of the losses.

        With `backward`, add the gradient of that sum to the accumulated gradient.
        """
        if loss not in LOSSES:
            raise ApiError(f"There is no loss {loss!r}; this server has {', '.join(LOSSES)}.")
        for datum in data if loss == "cross_entropy" else ():
            datum.number("weights", loss)
            if not datum.is_idle_by("weights"):
                raise ApiError(_OTHER_TARGETS.format("weights"))
        found: list[Tensor] = []
        total = 0.0
        for part in _parts(data):
            with torch.set_grad_enabled(backward):
                groups = Groups([(datum.first,) for datum in part], [[datum.targets] for datum in part])
                logp = self.model.evaluate(groups).logp
                own = [_without(datum, row[: len(datum.targets)]) for row, datum in zip(logp, part, strict=True)]
                lost = [LOSSES[loss](row, datum.on(row.device), how) for row, datum in zip(own, part, strict=True)]
                summed = torch.stack(lost).sum()
            if backward:
                summed.backward()
            found += [row.detach().float().cpu() for row in own]
            total += float(summed.detach())
        return found, total

    def step(self, lr: float, betas: tuple[float, float], eps: float, decay: float, clip: float) -> float:
        """Take one AdamW step with the accumulated gradient, clear it, and return its norm.

        Raises `ApiError` if the gradient is not finite, and clears it as well.
        """
        for group in self.optimizer.param_groups:
            group.update(lr=lr, betas=betas, eps=eps, weight_decay=decay)
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.model.trainable().values()), clip if clip > 0 else float("inf")))
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        if not math.isfinite(norm):
            raise ApiError(
                f"The gradient's norm is {norm}, so the step was skipped and the gradient dropped; check the data for numbers "
                "that are too large or not finite."
            )
        return norm

    def save(self, folder: Path, optimizer: bool) -> None:
        """Save the adapter in peft's format, and with `optimizer` the optimiser's state, so that training can resume.

        The save is atomic.
        """
        named = self.model.trainable()
        state = {f"weight.{name}": p.detach().contiguous() for name, p in named.items()}
        if optimizer:
            for name, p in named.items():
                held = self.optimizer.state.get(p, {})
                state |= {f"optimizer.{key}.{name}": value.contiguous() for key, value in held.items()}

        def write(made: Path) -> None:
            self.model.save(made)
            save_file(state, made / _STATE)

        replace_folder(folder, write)

    def load(self, folder: Path, optimizer: bool) -> None:
        """Load a saved state, and with `optimizer` its optimiser's state; otherwise reset the optimiser. Clear the gradient."""
        state, named = load_file(folder / _STATE), self.model.trainable()
        if {f"weight.{name}" for name in named} != {name for name in state if name.startswith("weight.")}:
            raise ApiError("The saved state is of an adapter with other layers; load it into a model of the same base and rank.")
        self.optimizer = torch.optim.AdamW(named.values())
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(state[f"weight.{name}"])
                p.grad = None
                if optimizer and f"optimizer.step.{name}" in state:
                    moments = {key: state[f"optimizer.{key}.{name}"].to(p.device) for key in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[p] = {"step": state[f"optimizer.step.{name}"], **moments}


def _without(datum: TinkerDatum, values: Tensor) -> Tensor:
    """Return these values [T] of a datum with 0 at its idle positions."""
    return values if datum.idle is None else values.masked_fill(datum.idle.to(values.device), 0)


def _parts(data: Sequence[TinkerDatum]) -> list[list[TinkerDatum]]:
    """Split the data, in order, into lists of at most `AT_ONCE` tokens each, or of one longer datum."""
    parts: list[list[TinkerDatum]] = []
    size = 0
    for datum in data:
        size += len(datum.targets) + 1
        if not parts or size > AT_ONCE:
            parts.append([])
            size = len(datum.targets) + 1
        parts[-1].append(datum)
    return parts
