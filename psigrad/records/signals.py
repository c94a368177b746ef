"""Signals: the figures of a run that warnings, reports and the studio use.

Two trainers can write the same figure under different keys; these keys then belong to one signal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

_ALL = ("sft", "reward", "preference", "online", "control")


@dataclass(frozen=True)
class Signal:
    """A figure of a run: its name, title, explanation and unit, and the keys that it can have in metrics.jsonl."""

    name: str
    group: str
    title: str
    says: str
    keys: tuple[str, ...]
    """The keys of metrics.jsonl. A star matches any text."""
    unit: str = ""
    share: bool = False
    """True if the figure is between 0 and 1."""
    extra_keys: tuple[str, ...] = ()
    """Further keys, which a report draws in the same picture."""
    labels: tuple[str, ...] = ("",)
    """The report's labels for the figure and for the keys in `extra_keys`."""
    smooth: bool = True
    """True if a report draws the figure's moving average."""
    kinds: tuple[str, ...] = _ALL
    """The kinds of runs whose reports draw the figure."""


# fmt: off
_HELD_OUT = ("train", "held-out")
# in the order in which reports draw them
SIGNALS = (
    Signal("reward", "Reward", "Reward", "Mean over all completions of a step.",
        ("reward", "env/all/reward/total", "reward/mean")),
    Signal("return", "Reward", "Return", "Mean over the last 100 training episodes.", ("rollout/ep_rew_mean",), smooth=False),
    Signal("held_out", "Reward", "Held-out metric", "On prompts or episodes that are not trained on, with its 95 % interval.",
        ("eval/return/mean", "eval/*/mean", "eval/mean_reward")),
    Signal("reward_std", "Reward", "Reward spread", "Mean standard deviation within a group; at 0 there is nothing to learn.",
        ("reward_std",), kinds=()),
    Signal("dead_groups", "Reward", "Dead groups", "Share of prompts whose rewards are all equal.", ("frac_reward_zero_std",),
        share=True),
    Signal("length", "Length", "Completion length", "Mean over all completions of a step.",
        ("completions/mean_length", "ac_tokens_per_turn", "num_output_tokens/mean"), "tokens",
        extra_keys=("completions/max_length",), labels=("mean", "longest")),
    Signal("episode_length", "Length", "Episode length", "Mean over the last 100 training episodes.", ("rollout/ep_len_mean",),
        "steps", smooth=False),
    Signal("truncated", "Length", "Cut completions", "Share of completions that the length limit cut.",
        ("completions/clipped_ratio", "is_truncated/mean"), share=True),
    Signal("turns", "Length", "Turns", "Mean number of turns in an episode.", ("turns/mean", "num_turns/mean")),
    Signal("loss", "Learning", "Loss", "The quantity that the optimiser minimises.", ("loss", "train/loss"),
        extra_keys=("eval/loss",), labels=_HELD_OUT, kinds=("sft", "reward", "preference", "control")),
    Signal("held_out_loss", "Learning", "Held-out loss", "Loss on rows that are not trained on.", ("eval/loss",), kinds=()),
    Signal("accuracy", "Learning", "Accuracy", "Share of pairs in the right order.", ("accuracy", "rewards/accuracies"),
        share=True, extra_keys=("eval/accuracy", "eval/rewards/accuracies"), labels=("train", "held-out", "held-out")),
    Signal("token_accuracy", "Learning", "Token accuracy", "Share of tokens that are the model's most likely choice.",
        ("mean_token_accuracy",), share=True, extra_keys=("eval/mean_token_accuracy",), labels=_HELD_OUT),
    Signal("margin", "Learning", "Margin", "Reward of the chosen completion minus that of the rejected one.",
        ("margin", "rewards/margins"), extra_keys=("eval/margin", "eval/rewards/margins"),
        labels=("train", "held-out", "held-out")),
    Signal("mean_reward", "Learning", "Mean reward", "Mean over both completions of a pair, on no fixed scale.", ("mean_reward",),
        extra_keys=("eval/mean_reward",), labels=_HELD_OUT),
    Signal("calibration", "Learning", "Calibration error", "Gap between confidence and accuracy on held-out pairs.",
        ("eval/calibration_error",)),
    Signal("implicit_reward", "Learning", "Implicit rewards", "Mean of chosen and of rejected completions.", ("rewards/chosen",),
        extra_keys=("rewards/rejected",), labels=("chosen", "rejected")),
    Signal("logps", "Learning", "Log-probs", "Mean log-prob of whole completions, chosen and rejected.", ("logps/chosen",),
        "nats", extra_keys=("logps/rejected",), labels=("chosen", "rejected")),
    Signal("held_out_kl", "Policy", "KL to the starting model", "Exact KL on held-out prompts, per completion.",
        ("eval/kl",), "nats"),
    Signal("kl", "Policy", "KL to the reference", "How far the policy has moved, per token.",
        ("kl", "kl_policy_base", "objective/kl"), "nats"),
    Signal("update_kl", "Policy", "KL of the update", "From the policy that sampled the batch to the updated policy.",
        ("train/approx_kl", "policy/approxkl_avg", "kl_pre_post"), "nats"),
    Signal("clipped", "Policy", "Clipped", "Share of tokens or actions that the clip leaves without a gradient.",
        ("clip_ratio/region_mean", "train/clip_fraction", "cispo_clip_ratio"), share=True,
        extra_keys=("clip_ratio/low_mean", "clip_ratio/high_mean"), labels=("all", "low", "high")),
    Signal("mismatch", "Policy", "Sampler against trainer",
        "Difference of the log-probs of sampler and trainer on the same tokens; should be near 0.",
        ("sampling/sampling_logp_difference/mean", "optim/kl_sample_train_v1", "mismatch_kl/all"),
        extra_keys=("sampling/sampling_logp_difference/max",), labels=("mean", "largest")),
    Signal("entropy", "Policy", "Entropy", "Uncertainty of the policy, per token or action.",
        ("entropy", "train/entropy", "optim/entropy", "entropy/all", "surprise"), "nats"),
    Signal("exploration", "Policy", "Exploration", "Share of actions drawn at random.", ("rollout/exploration_rate",),
        share=True, smooth=False),
    Signal("explained_variance", "Critic", "Explained variance",
        "Share of the returns' variance that the critic predicts: 1 is all of it, below 0 is worse than a constant.",
        ("explained_variance", "train/explained_variance")),
    Signal("value_loss", "Critic", "Value loss", "The critic's error.", ("value_loss", "train/value_loss")),
    Signal("values", "Critic", "Values and returns", "Means over tokens.", ("value/mean",),
        extra_keys=("returns/mean",), labels=("value", "return")),
    Signal("grad_norm", "Stability", "Gradient norm", "Before clipping.", ("grad_norm", "train/grad_norm", "optim/grad_norm")),
    Signal("learning_rate", "Stability", "Learning rate", "", ("learning_rate", "train/learning_rate"), smooth=False),
    Signal("unscored", "Stability", "Unscored", "Completions that the reward functions could not judge.",
        ("unscored",), kinds=()),
    Signal("speed", "Stability", "Speed", "Tokens or environment steps per second, everything included.",
        ("tokens_per_second", "time/fps", "perf/throughput"), kinds=("control",)),
    Signal("step_time", "Stability", "Seconds per step", "", ("step_time", "time/step"), "s", kinds=()),
)
# fmt: on
SIGNAL_BY_NAME = {signal.name: signal for signal in SIGNALS}
_EXACT = {key: signal.name for signal in SIGNALS for key in signal.keys if "*" not in key}
_PATTERNS = [(re.compile(re.escape(key).replace(r"\*", "(.+)")), s.name) for s in SIGNALS for key in s.keys if "*" in key]
# Held-out figures that match the pattern of the held-out metric, but are lengths or single reward functions.
_NO_HELD_OUT = ("completions/", "length", "rewards/")


@cache
def name_of(key: str) -> str:
    """Return the name of the signal that a key of metrics.jsonl belongs to, or the key itself if there is none."""
    if (found := _EXACT.get(key)) is not None:
        return found
    for pattern, name in _PATTERNS:
        match = pattern.fullmatch(key)
        if match and not match.group(1).startswith(_NO_HELD_OUT):
            return name
    return key
