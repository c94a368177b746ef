"""Values of TRL that are names of something else here: its loss_type, and the rewards of its command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psigrad.config.nested import Given
from psigrad.errors import UserError

# Rewards that TRL's command line takes by name; they are functions of trl.rewards.
REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
# TRL's loss_type: of GRPO an aggregation, of DPO a method of ours.
AGGREGATES = {"grpo": "sequence_mean", "dapo": "token_mean", "bnpo": "token_mean", "dr_grpo": "fixed_length"}
LOSSES = {
    "sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust_dpo", "apo_zero": "apo_zero", "apo_down": "apo_down",
    "sigmoid_norm": "ln_dpo", "bco_pair": "dpo", "nca_pair": "dpo", "sppo_hard": "dpo", "simpo": "simpo",
}  # fmt: skip
LINKS = ("bco_pair", "nca_pair", "sppo_hard")  # DPO with another link
METHOD = "the method is the command: psigrad grpo, psigrad ppo, psigrad dapo, psigrad ipo; in Python, the first argument"


def loss_type(given: Given, known: set[str], values: Mapping[str, Any]) -> list[Given]:
    """TRL's loss_type, where the method that trains has it; `UserError` naming the command of another method."""
    several = given.value if isinstance(given.value, list | tuple) else [given.value]
    name = str(several[0]) if len(several) == 1 else ""
    if "prompts_per_step" in known:
        if name in AGGREGATES:
            return [Given("aggregate", AGGREGATES[name], given.source)]
        what = f"psigrad {name}" if name in ("cispo", "sapo") else f"expected one of {', '.join(AGGREGATES)}, cispo or sapo"
    elif "loss" in known:
        loss = values.get("loss", "dpo")
        trained = loss.get("preset", "dpo") if isinstance(loss, Mapping) else loss
        if name in LINKS and trained == "dpo":
            return [Given("loss.link", name, given.source)]
        if LOSSES.get(name) == trained:
            return []
        what = f"psigrad {LOSSES[name]}" if name in LOSSES else f"expected one of {', '.join(LOSSES)}"
    else:
        what = METHOD
    if what.startswith("psigrad "):
        what = f"the method is the command: {what}; in Python, the first argument"
    raise UserError(f"loss_type is {given.value!r}: {what}.")
