"""The figures that people look at: one name for each, whoever wrote them, in the order in which they are looked at.

A key that no signal claims is shown under "more", as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Signal:
    """One figure: its name here, a title, a line that says what it is, and the keys under which trainers write it (a key that
    ends in a star is a prefix whose rest is told apart).
    """

    name: str
    group: str
    title: str
    says: str
    keys: tuple[str, ...]
    unit: str = ""
    share: bool = False
    """It lies between 0 and 1."""


# fmt: off
SIGNALS = (
    Signal("reward", "Reward", "Reward", "Mean over all completions of a step.",
        ("reward", "env/all/reward/total", "reward/mean")),
    Signal("return", "Reward", "Return", "Mean over the last training episodes.", ("rollout/ep_rew_mean",)),
    Signal("held_out", "Reward", "Held-out metric", "On prompts or episodes that are not trained on.",
        ("eval/return/mean", "eval/*/mean", "eval/mean_reward")),
    Signal("reward_std", "Reward", "Reward spread", "Mean deviation within a group; at 0 there is nothing to learn from.",
        ("reward_std",)),
    Signal("dead_groups", "Reward", "Dead groups", "Share of prompts whose rewards are all equal.", ("frac_reward_zero_std",),
        share=True),
    Signal("length", "Length", "Completion length", "Mean, in tokens.",
        ("completions/mean_length", "ac_tokens_per_turn", "num_output_tokens/mean"), "tokens"),
    Signal("episode_length", "Length", "Episode length", "Mean over the last training episodes.", ("rollout/ep_len_mean",),
        "steps"),
    Signal("truncated", "Length", "Truncated", "Share of completions that the length limit cut.",
        ("completions/clipped_ratio", "is_truncated/mean"), share=True),
    Signal("turns", "Length", "Turns", "Mean number of turns in an episode.", ("turns/mean", "num_turns/mean")),
    Signal("loss", "Learning", "Loss", "What the optimiser steps on.", ("loss", "train/loss")),
    Signal("held_out_loss", "Learning", "Held-out loss", "On rows that are not trained on.", ("eval/loss",)),
    Signal("accuracy", "Learning", "Accuracy", "Share of pairs in the right order.", ("accuracy", "rewards/accuracies"),
        share=True),
    Signal("token_accuracy", "Learning", "Token accuracy", "Share of tokens that the model would have chosen.",
        ("mean_token_accuracy",), share=True),
    Signal("kl", "Policy", "KL to the reference", "How far the policy has moved, per token.",
        ("kl", "kl_policy_base", "objective/kl"), "nats"),
    Signal("held_out_kl", "Policy", "KL, held out", "Exact KL to the starting model, per completion.", ("eval/kl",), "nats"),
    Signal("update_kl", "Policy", "KL of the update", "Between the policy that collected and the one after the update.",
        ("train/approx_kl", "policy/approxkl_avg", "kl_pre_post"), "nats"),
    Signal("entropy", "Policy", "Entropy", "How undecided the policy is, per token or step.",
        ("entropy", "train/entropy", "optim/entropy", "entropy/all"), "nats"),
    Signal("clipped", "Policy", "Clipped", "Share of tokens or actions whose gradient the clip took away.",
        ("clip_ratio/region_mean", "train/clip_fraction", "cispo_clip_ratio"), share=True),
    Signal("mismatch", "Policy", "Sampler against trainer",
        "Mean difference of their log-probs on the same tokens; should be near 0.",
        ("sampling/sampling_logp_difference/mean", "optim/kl_sample_train_v1", "mismatch_kl/all")),
    Signal("exploration", "Policy", "Exploration", "Share of actions drawn by chance.", ("rollout/exploration_rate",),
        share=True),
    Signal("explained_variance", "Critic", "Explained variance",
        "How much of the returns the critic foresees: 1 all, below 0 worse than a constant.",
        ("explained_variance", "train/explained_variance")),
    Signal("value_loss", "Critic", "Value loss", "The critic's error.", ("value_loss", "train/value_loss")),
    Signal("grad_norm", "Stability", "Gradient norm", "Before clipping.", ("grad_norm", "train/grad_norm", "optim/grad_norm")),
    Signal("learning_rate", "Stability", "Learning rate", "", ("learning_rate", "train/learning_rate")),
    Signal("unscored", "Stability", "Unscored", "Completions that the reward functions could not judge.", ("unscored",)),
    Signal("speed", "Stability", "Speed", "Tokens or environment steps per second, everything included.",
        ("tokens_per_second", "time/fps", "perf/throughput")),
    Signal("step_time", "Stability", "Seconds per step", "", ("step_time", "time/step"), "s"),
)
# fmt: on
BY_NAME = {signal.name: signal for signal in SIGNALS}
_EXACT = {key: signal.name for signal in SIGNALS for key in signal.keys if "*" not in key}
_PATTERNS = [(re.compile(re.escape(key).replace(r"\*", "(.+)")), s.name) for s in SIGNALS for key in s.keys if "*" in key]
# Parts of a signal or counts that say nothing as a curve.
_NO_HELD_OUT = ("completions/", "length", "rewards/")


@cache
def name_of(key: str) -> str:
    """The name of the signal that a key is written under, or the key itself."""
    if (found := _EXACT.get(key)) is not None:
        return found
    for pattern, name in _PATTERNS:
        match = pattern.fullmatch(key)
        if match and not match.group(1).startswith(_NO_HELD_OUT):
            return name
    return key


class SignalNames:
    """The names of a run's figures. Where several keys mean one signal, the first gets its name and the others keep their own."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def of(self, key: str) -> str:
        """The name of a key."""
        if key not in self._of:
            name = name_of(key)
            self._of[key] = key if name in self._of.values() else name
        return self._of[key]
