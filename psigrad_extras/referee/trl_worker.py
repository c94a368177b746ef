"""TRL's side of the referee: run a script unmodified and record what its GRPOTrainer computes.

    PYTHON trl_worker.py FOLDER STEPS SCRIPT [ARGUMENTS...]

It runs in TRL's own environment and imports nothing of psigrad. The script gets a subclass of the installed GRPOTrainer, which
records, and reads the local variables of the loss when it returns. One random choice is fixed: the shuffle of completions only
reverses them, which keeps groups together.
FOLDER gets model/ (the policy before training), about.json, and record.pt; or error.txt, a sentence for the user.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

Base: Any = Any if TYPE_CHECKING else object

TOKENS = {"logps": "log-probs of the pass", "weights": "loss weights", "slopes": "loss slopes"}


class DoneError(BaseException):
    """An exception that ends the script when everything is recorded."""


class UpdateWatch:
    """A callback that reports optimiser steps to a `RecordedTrainer`, as a mixin for TrainerCallback."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *given: Any, **named: Any) -> None:
        """Note the learning rate."""
        self.trainer.now["learning rate"] = named["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, *given: Any, **named: Any) -> None:
        """Record the optimiser step."""
        self.trainer.referee_update()


class RecordedTrainer(Base):  # type: ignore[misc]
    """A mixin for GRPOTrainer that appends the record of each step to `steps`, and stops after `wanted` steps."""

    torch: Any
    base: Any
    """The installed GRPOTrainer."""
    watch: Any
    draw: Any
    """torch.multinomial."""
    fresh: Any
    """A GRPOConfig with default values, to find the fields that the script sets."""
    folder: Path
    wanted: int
    script: str
    steps: list[dict[str, Any]]
    passes: list[dict[str, Any]]
    """The forward passes with gradient since the last update."""
    draws: list[Any]
    now: dict[str, Any]

    def train(self, *given: Any, **named: Any) -> None:
        """Save the policy and the settings, and train."""
        args, policy = self.args, self.model
        values = {name: getattr(value, "value", value) for name, value in vars(args).items()}
        values = {
            name: value for name, value in values.items() if value is None or isinstance(value, str | int | float | list | dict)
        }
        about = {
            "version": sys.modules["trl"].__version__,
            "changed": {name: x for name, x in values.items() if x != getattr(y := getattr(self.fresh, name, None), "value", y)},
            "settings": values,
            "rewards": [_place(one, self.script) for one in self.reward_funcs],
            "lora_dropout": getattr(getattr(policy, "peft_config", {}).get("default"), "lora_dropout", 0.0),
            "rows": len(self.train_dataset),
            "half": bool(args.bf16 or args.fp16) or policy.dtype.itemsize < 4,
        }
        (self.folder / "about.json").write_text(json.dumps(about, default=str))
        policy.save_pretrained(self.folder / "model")
        self.processing_class.save_pretrained(self.folder / "model")
        self.now["weights"] = _weights(policy)
        self.add_callback(self.watch(self))
        super().train(*given, **named)
        raise DoneError

    def _generate(self, prompts: list[Any]) -> Any:
        self.draws.clear()

        def drawn(weights: Any, *given: Any, **named: Any) -> Any:
            chosen = self.draw(weights, *given, **named)
            self.draws.append(weights.gather(1, chosen).log().cpu())
            return chosen

        self.torch.multinomial = drawn
        try:
            found = super()._generate(prompts)
        finally:
            self.torch.multinomial = self.draw
        asked, ids = ([list(map(int, one)) for one in part] for part in found[:2])
        texts = [self._tokenizer.decode(one) for one in asked]
        self.steps.append({"rendered prompt": texts, "prompt ids": asked, "tokens": ids, "updates": []})
        return found

    def _calculate_rewards(self, *given: Any, **named: Any) -> Any:
        found = super()._calculate_rewards(*given, **named)
        total = (found * self.reward_weights.to(found.device)).nansum(1, keepdim=True)
        self.steps[-1]["rewards"] = self.torch.cat([found, total], 1).tolist()
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        out = super()._generate_and_score_completions(inputs)
        step, args = self.steps[-1], self.args
        ids, count = step["tokens"], args.num_generations
        lengths = [len(one) for one in ids]
        updates = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
        step["batch"] = {"prompts": len(inputs) / count, "completions of each": count, "updates": updates}
        step["rows"] = [{name: _json(value) for name, value in row.items()} for row in inputs[::count]]
        step["completion ids"] = [[*one, "stop" if one and one[-1] in self.eos_token_ids else "length"] for one in ids]
        columns = {"mask": out["completion_mask"] * out.get("tool_mask", 1), "log-probs": out.get("old_per_token_logps")}
        columns["reference log-probs"] = out.get("ref_per_token_logps")
        advantages = out["advantages"]
        columns["advantages"] = (advantages if advantages.dim() == 2 else advantages[:, None]).expand(columns["mask"].shape)
        if len(self.draws) >= max(lengths) and self.draws[0].numel() == len(ids):  # only without continuous batching and tools
            columns["sampling log-probs"] = self.torch.cat([one.reshape(-1, 1) for one in self.draws], 1)
        step |= {name: _ragged(column, lengths) for name, column in columns.items() if column is not None}
        return {**out, "referee_rows": self.torch.arange(len(inputs), device=advantages.device)}

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*given, **named)
        if found[0].requires_grad:
            made = {"logps": found[0].detach(), "slopes": self.torch.zeros_like(found[0])}
            found[0].register_hook(lambda slope: made["slopes"].add_(slope.detach()))
            self.now["pass"] = made
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        found: dict[str, Any] = {}

        def read(frame: Any, event: str, value: Any) -> None:
            if event == "return" and frame.f_code is self.base._compute_loss.__code__:
                found.update(frame.f_locals)

        sys.setprofile(read)
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            sys.setprofile(None)
        (weights,) = self.torch.autograd.grad(loss, found["per_token_loss"], retain_graph=True)
        if weights.shape[1] < found["mask"].shape[1]:  # a loss per completion, not per token
            weights = weights * found["mask"] / found["mask"].sum(1, keepdim=True).clamp(min=1)
        rows = inputs["referee_rows"].tolist()
        self.passes.append({**self.now.pop("pass"), "rows": rows, "loss": float(loss.detach()), "weights": weights.detach()})
        return loss

    def training_step(self, *given: Any, **named: Any) -> Any:
        """Note the gradient before it is clipped."""
        made = super().training_step(*given, **named)
        if self.accelerator.sync_gradients:
            known = {n: self.torch.zeros_like(p) if p.grad is None else p.grad for n, p in _learned(self.model)}
            self.now["gradient"] = {name: gradient.float().cpu().clone() for name, gradient in known.items()}
        return made

    def referee_update(self) -> None:
        """Record an optimiser step."""
        step, after, before = self.steps[-1], _weights(self.model), self.now["weights"]
        rows = [row for one in self.passes for row in one["rows"]]
        made = {
            "rows of the update": sorted(rows),
            "loss": sum(one["loss"] for one in self.passes),
            "gradient": self.now["gradient"],
            "learning rate": self.now["learning rate"],
            "update": {name: after[name] - before[name] for name in after},
        }
        for name, says in TOKENS.items():
            each = [row for one in self.passes for row in one[name].float().cpu().tolist()]
            made[says] = {row: values[: len(step["tokens"][row])] for row, values in zip(rows, each, strict=True)}
        if "log-probs" not in step:  # no update between sampling and this pass
            step["log-probs"] = [made[TOKENS["logps"]].get(row, []) for row in range(len(step["tokens"]))]
        step["updates"].append(made)
        self.now["weights"] = after
        self.passes.clear()
        if len(self.steps) > self.wanted or (len(self.steps) == self.wanted and len(step["updates"]) >= step["batch"]["updates"]):
            raise DoneError


def _reverse(shuffle: Any, columns: dict[str, Any], torch: Any) -> Any:
    """Run TRL's shuffle with a reversal as permutation: it keeps groups together, and exposes a column that stays in place."""
    draw, torch.randperm = torch.randperm, lambda n, **named: torch.arange(n).flip(0)
    try:
        return shuffle(columns)
    finally:
        torch.randperm = draw


def _weights(model: Any) -> dict[str, Any]:
    return {name: p.detach().float().cpu().clone() for name, p in _learned(model)}


def _learned(model: Any) -> list[tuple[str, Any]]:
    """Return (name, parameter) of the trainable parameters, without peft's prefix of the model's own names."""
    return [(name.removeprefix("base_model.model."), p) for name, p in model.named_parameters() if p.requires_grad]


def _ragged(column: Any, lengths: list[int]) -> list[list[float]]:
    return [row[:length] for row, length in zip(column.float().cpu().tolist(), lengths, strict=True)]


def _json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)


def _place(reward: Any, script: str) -> str:
    """Return a reward function as "file:name" or "module:name", or the path of a reward model."""
    if not hasattr(reward, "__qualname__"):
        return str(getattr(getattr(reward, "config", None), "_name_or_path", "") or type(reward).__qualname__)
    return f"{script if reward.__module__ == '__main__' else reward.__module__}:{reward.__qualname__}"


def main(folder: Path, wanted: int, arguments: list[str]) -> None:
    """Run the script and write its record."""
    os.environ |= {"WANDB_MODE": "disabled", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    script, steps, error = arguments[0], list[dict[str, Any]](), ""
    sys.argv[:], sys.path[0] = arguments, str(Path(script).resolve().parent)
    try:
        import torch
        import trl
        from transformers import TrainerCallback
        from trl.trainer import grpo_trainer

        fresh = trl.GRPOConfig("referee", use_cpu=True, bf16=False)  # made now, since making it resets accelerate's state
        watch = type("Watch", (UpdateWatch, TrainerCallback), {})
        known = {"torch": torch, "base": trl.GRPOTrainer, "watch": watch, "draw": staticmethod(torch.multinomial), "fresh": fresh}
        known |= {"folder": folder, "wanted": wanted, "script": str(Path(script).resolve()), "steps": steps}
        bases = (RecordedTrainer, trl.GRPOTrainer)
        made = type("GRPOTrainer", bases, {**known, "passes": [], "draws": [], "now": {}})
        for module in (trl, trl.trainer, grpo_trainer):
            setattr(module, "GRPOTrainer", made)  # noqa: B010
        shuffle = grpo_trainer.shuffle_sequence_dict
        setattr(grpo_trainer, "shuffle_sequence_dict", lambda columns: _reverse(shuffle, columns, torch))  # noqa: B010
    except (ImportError, AttributeError) as failed:
        error = (
            f"{sys.executable} has no supported TRL ({failed}); name the Python interpreter of TRL's environment with --python."
        )
    try:
        if not error:
            runpy.run_path(script, run_name="__main__")
    except DoneError:
        pass
    except (Exception, SystemExit) as failed:
        first = (str(failed).strip().splitlines() or [""])[0]
        error = f"{script} failed in TRL's process: {type(failed).__name__}: {first}"
    if not error and not any(step["updates"] for step in steps):
        error = f"{script} trained nothing with GRPOTrainer; give a script that calls GRPOTrainer(...).train()."
    if error:
        (folder / "error.txt").write_text(error)
    else:
        torch.save(steps, folder / "record.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
