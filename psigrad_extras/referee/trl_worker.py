"""TRL's half of the referee: run a script unmodified and record what its GRPOTrainer computes.

    PYTHON trl_worker.py FOLDER STEPS SCRIPT [ARGUMENTS...]

It runs in TRL's own environment and imports nothing of psigrad. Methods of the installed GRPOTrainer are wrapped from outside, and
the local variables of its loss are read when it returns. Only one random choice is fixed: completions keep their order.
FOLDER gets model/ (the policy before training), about.json, and record.pt; or error.txt, a sentence for the user.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Step = dict[str, Any]


class DoneError(BaseException):
    """Raised when everything is recorded, so that the remainder of the script does not run."""


class Recorder:
    """The record of a training: a dictionary of tensors for each collection, and for each of its updates."""

    def __init__(self, folder: Path, wanted: int, script: str) -> None:
        self.folder, self.wanted, self.script = folder, wanted, script
        self.steps: list[Step] = []
        self.passes: list[dict[str, Any]] = []
        """The forward passes with gradient since the last update."""
        self.now: dict[str, Any] | None = None
        self.gradient: dict[str, Any] = {}
        self.weights: dict[str, Any] = {}
        self.draws: list[Any] = []
        self.rate = 0.0
        self.fresh: Any = None
        """A configuration of defaults."""

    def begin(self, trainer: Any) -> None:
        """Save the policy before training and the settings."""
        args = trainer.args
        values = {name: value for name in vars(args) if _is_plain(value := _plain(getattr(args, name)))}
        about = {
            "version": sys.modules["trl"].__version__,
            "changed": {name: value for name, value in values.items() if value != _plain(getattr(self.fresh, name, None))},
            "settings": values,
            "rewards": [_place(one, self.script) for one in trainer.reward_funcs],
            "lora": trainer.model.peft_config["default"].to_dict() if hasattr(trainer.model, "peft_config") else None,
            "rows": len(trainer.train_dataset),
            "half": bool(args.bf16 or args.fp16) or trainer.model.dtype.itemsize < 4,
        }
        (self.folder / "about.json").write_text(json.dumps(about, default=str))
        trainer.model.save_pretrained(self.folder / "model")
        trainer.processing_class.save_pretrained(self.folder / "model")
        self.weights = _weights(trainer.model)

    def collect(self, trainer: Any, inputs: list[dict[str, Any]], out: dict[str, Any]) -> None:
        """Complete the record of a collection with the output of `_generate_and_score_completions`."""
        step, args = self.steps[-1], trainer.args
        lengths, count = [len(ids) for ids in step["tokens"]], args.num_generations
        updates = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
        step["batch"] = {"prompts": len(inputs) / count, "completions of each": count, "updates": updates}
        step["rows"] = [{name: _json(value) for name, value in row.items()} for row in inputs[::count]]
        ended = [bool(ids) and ids[-1] in trainer.eos_token_ids for ids in step["tokens"]]
        step["completion ids"] = [[*ids, "stop" if end else "length"] for ids, end in zip(step["tokens"], ended, strict=True)]
        mask = out["completion_mask"] * out.get("tool_mask", 1)
        ragged = functools.partial(_ragged, lengths=lengths)
        step["mask"] = ragged(mask.float())
        if len(self.draws) >= max(lengths) and self.draws[0].numel() == len(lengths):
            step["sampling log-probs"] = ragged(self._drawn())
        if out.get("old_per_token_logps") is not None:
            step["log-probs"] = ragged(out["old_per_token_logps"])
        if out.get("ref_per_token_logps") is not None:
            step["reference log-probs"] = ragged(out["ref_per_token_logps"])
        advantages = out["advantages"] if out["advantages"].dim() == 2 else out["advantages"][:, None].expand(mask.shape)
        step["advantages"] = ragged(advantages)

    def _drawn(self) -> Any:
        import torch

        return torch.cat([draw.reshape(-1, 1) for draw in self.draws], 1)

    def reward(self, trainer: Any, rewards: Any) -> None:
        """Record the rewards of each function, and their weighted sum."""
        total = (rewards * trainer.reward_weights.to(rewards.device)).nansum(1, keepdim=True)
        self.steps[-1]["rewards"] = [[*each, one] for each, (one,) in zip(rewards.tolist(), total.tolist(), strict=True)]

    def loss(self, loss: Any, inputs: dict[str, Any], found: dict[str, Any]) -> None:
        """Record a forward pass: its rows, its loss, and the weight of each token's loss in it."""
        import torch

        assert self.now is not None
        made, mask = self.now, found["mask"]
        (weights,) = torch.autograd.grad(loss, found["per_token_loss"], retain_graph=True)
        if weights.shape[1] < mask.shape[1]:  # one loss for the whole completion
            weights = weights * mask / mask.sum(1, keepdim=True).clamp(min=1)
        self.passes.append(
            {**made, "rows": inputs["referee_rows"].tolist(), "loss": float(loss.detach()), "weights": weights.detach()}
        )

    def update(self, trainer: Any) -> None:
        """Record an optimiser step: what its forward passes computed, its gradient, its rate, and by how much weights moved."""
        import torch

        step, after = self.steps[-1], _weights(trainer.model)
        rows = [row for one in self.passes for row in one["rows"]]
        lengths = [len(step["tokens"][row]) for row in rows]

        def column(name: str) -> dict[int, list[float]]:
            width = max(one[name].shape[1] for one in self.passes)
            pad = torch.nn.functional.pad
            tensor = torch.cat([pad(one[name].float(), (0, width - one[name].shape[1])) for one in self.passes])
            return dict(zip(rows, _ragged(tensor, lengths), strict=True))

        logps = column("logps")
        if "log-probs" not in step:  # no update came between sampling and this pass
            step["log-probs"] = [logps.get(row, []) for row in range(len(step["tokens"]))]
        made = {"rows of the update": sorted(rows), "log-probs of the pass": logps, "loss weights": column("weights")}
        made |= {"loss slopes": column("slopes"), "loss": sum(one["loss"] for one in self.passes), "gradient": self.gradient}
        made["learning rate"] = self.rate
        made["update"] = {name: after[name] - before for name, before in self.weights.items()}
        step["updates"].append(made)
        self.weights, self.passes = after, []
        over = len(step["updates"]) >= step["batch"]["updates"]
        if len(self.steps) > self.wanted or (len(self.steps) == self.wanted and over):
            raise DoneError

    def save(self) -> None:
        """Write the record."""
        import torch

        torch.save(self.steps, self.folder / "record.pt")


def install(recorder: Recorder) -> None:
    """Wrap the methods of GRPOTrainer."""
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig
    from trl.trainer import grpo_trainer

    recorder.fresh = GRPOConfig("referee", use_cpu=True, bf16=False)  # not later: it resets accelerate's state
    trainer_class: Any = grpo_trainer.GRPOTrainer
    loss_code = trainer_class._compute_loss.__code__

    def wrap(name: str) -> Callable[[Any], None]:
        inner = getattr(trainer_class, name)

        def put(around: Any) -> None:
            setattr(trainer_class, name, functools.wraps(inner)(lambda self, *a, **k: around(inner, self, *a, **k)))

        return put

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            recorder.rate = given["optimizer"].param_groups[0]["lr"]

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            recorder.update(trainers[0])

    trainers: list[Any] = []

    @wrap("train")
    def train(inner: Any, self: Any, *given: Any, **named: Any) -> None:
        trainers[:] = [self]
        recorder.begin(self)
        self.add_callback(Watch())
        inner(self, *given, **named)
        raise DoneError

    @wrap("_generate")
    def generate(inner: Any, self: Any, prompts: list[Any]) -> Any:
        found, decode = inner(self, prompts), self._tokenizer.decode
        asked, ids = [list(map(int, one)) for one in found[0]], [list(map(int, one)) for one in found[1]]
        texts = [decode(one) for one in asked]
        recorder.steps.append({"rendered prompt": texts, "prompt ids": asked, "tokens": ids, "updates": []})
        return found

    @wrap("_generate_single_turn")
    def sample(inner: Any, self: Any, *given: Any, **named: Any) -> Any:
        draw, recorder.draws = torch.multinomial, []

        def drawn(weights: Any, *a: Any, **k: Any) -> Any:
            chosen = draw(weights, *a, **k)
            recorder.draws.append(weights.gather(1, chosen).log().cpu())
            return chosen

        torch.multinomial = drawn
        try:
            return inner(self, *given, **named)
        finally:
            torch.multinomial = draw

    @wrap("_calculate_rewards")
    def rewards(inner: Any, self: Any, *given: Any, **named: Any) -> Any:
        found = inner(self, *given, **named)
        recorder.reward(self, found)
        return found

    @wrap("_generate_and_score_completions")
    def collect(inner: Any, self: Any, inputs: list[dict[str, Any]]) -> Any:
        out = inner(self, inputs)
        recorder.collect(self, inputs, out)
        return {**out, "referee_rows": torch.arange(len(inputs), device=out["advantages"].device)}

    @wrap("_get_per_token_logps_and_entropies")
    def logps(inner: Any, self: Any, *given: Any, **named: Any) -> Any:
        found = inner(self, *given, **named)
        if (made := recorder.now) is not None:
            made["logps"], made["slopes"] = found[0].detach(), torch.zeros_like(found[0])
            found[0].register_hook(lambda slope: made["slopes"].add_(slope.detach()))
        return found

    @wrap("_compute_loss")
    def loss(inner: Any, self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        found: dict[str, Any] = {}

        def read(frame: Any, event: str, value: Any) -> None:
            if event == "return" and frame.f_code is loss_code:
                found.update(frame.f_locals)

        recorder.now = {}
        sys.setprofile(read)
        try:
            made = inner(self, model, inputs)
        finally:
            sys.setprofile(None)
        recorder.loss(made, inputs, found)
        recorder.now = None
        return made

    @wrap("training_step")
    def train_step(inner: Any, self: Any, *given: Any, **named: Any) -> Any:
        made = inner(self, *given, **named)
        if self.accelerator.sync_gradients:
            pairs = _parameters(self.model).items()
            recorder.gradient = {
                n: torch.zeros_like(p) if p.grad is None else p.grad.detach().float().cpu().clone() for n, p in pairs
            }
        return made

    grpo_trainer.shuffle_sequence_dict = lambda columns: columns


def _parameters(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _weights(model: Any) -> dict[str, Any]:
    return {name: p.detach().float().cpu().clone() for name, p in _parameters(model).items()}


def _ragged(tensor: Any, lengths: list[int]) -> list[list[float]]:
    return [row[:length] for row, length in zip(tensor.detach().float().cpu().tolist(), lengths, strict=True)]


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | dict)


def _json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)


def _place(reward: Any, script: str) -> str:
    """Return the place of a reward function as file:name or module:name, or the path of a reward model."""
    if not callable(reward) or not hasattr(reward, "__qualname__"):
        return str(getattr(getattr(reward, "config", None), "_name_or_path", "") or type(reward).__qualname__)
    return f"{script if reward.__module__ == '__main__' else reward.__module__}:{reward.__qualname__}"


def main(folder: Path, steps: int, arguments: list[str]) -> None:
    """Run the script and write its record."""
    os.environ |= {"WANDB_MODE": "disabled", "TRACKIO_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    script, recorder = arguments[0], Recorder(folder, steps, str(Path(arguments[0]).resolve()))
    error = ""
    try:
        install(recorder)
    except (ImportError, AttributeError) as failed:
        error = f"{sys.executable} has no TRL whose GRPOTrainer can be recorded: {type(failed).__name__}: {failed}."
    if not error:
        sys.argv, before = list(arguments), sys.path[0]
        sys.path[0] = str(Path(script).resolve().parent)
        try:
            runpy.run_path(script, run_name="__main__")
        except DoneError:
            pass
        except (Exception, SystemExit) as failed:
            with suppress(OSError):
                (folder / "traceback.txt").write_text(traceback.format_exc())
            error = f"{script} failed in TRL's process: {type(failed).__name__}: {str(failed).strip().splitlines()[-1:] or ''}"
        finally:
            sys.path[0] = before
        if not error and not any(step["updates"] for step in recorder.steps):
            error = f"{script} ended and trained nothing with GRPOTrainer; give the script that calls GRPOTrainer(...).train()."
    if error:
        (folder / "error.txt").write_text(error)
    else:
        recorder.save()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
