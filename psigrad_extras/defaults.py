"""The defaults that differ from those of TRL and Stable-Baselines3, for `psigrad explain defaults` and docs/settings.md."""

from __future__ import annotations

from typing import Any

from psigrad.config import OnlineConfig, PreferenceConfig, SFTConfig
from psigrad.config.fields import settings_of
from psigrad.control.settings import ControlConfig

# Setting -> (the other library's class, its argument, its default, and an explanation if the default is not clear).
THEIRS: dict[str, tuple[str, str, Any, str]] = {
    "sampling.max_completion_length": ("trl.GRPOConfig", "max_completion_length", 512, ""),
    "run.num_train_epochs": ("trl.SFTConfig", "num_train_epochs", 3.0, ""),
    "model.dtype": ("trl.SFTConfig", "bf16", None, "`bfloat16` on a GPU"),
    "model.gradient_checkpointing": ("trl.SFTConfig", "gradient_checkpointing", True, ""),
    "run.seed": ("trl.SFTConfig", "seed", 42, ""),
    "run.save_steps": ("trl.SFTConfig", "save_steps", 500, "every 500 steps; all are kept"),
    "prompts_per_step": ("trl.GRPOConfig", "per_device_train_batch_size", 8, "8 completions per process, all of one prompt"),
    "batch_size": ("trl.SFTConfig", "per_device_train_batch_size", 8, "8 rows per process"),
    "cache_reference": ("trl.DPOConfig", "precompute_ref_log_probs", False, "`False`: computed in every step"),
    "evaluation.num_generations_eval": ("trl.GRPOConfig", "num_generations_eval", None, "as many as `num_generations`"),
    "evaluation.eval_prompts": ("trl.SFTConfig", "eval_strategy", "no", "none are held out"),
    "algorithm.kl": ("trl.GRPOConfig", "beta", 0.0, "no KL to a reference"),
    "algorithm.aggregate": ("trl.GRPOConfig", "loss_type", "dapo", "every token counts the same"),
    "algorithm.use_bias_correction_kl": ("trl.GRPOConfig", "use_bias_correction_kl", True, ""),
    "critic_learning_rate": ("stable_baselines3.PPO", "vf_coef", 0.5, "policy and critic share an optimiser and its rate"),
    "normalize_advantage": ("stable_baselines3.PPO", "normalize_advantage", True, "over each minibatch"),
    "tuned": ("stable_baselines3.PPO", "policy_kwargs", None, "the same settings in every environment"),
    "n_envs": ("stable_baselines3.A2C", "n_steps", 5, "one copy, or those of the given vector environment"),
    "adam_epsilon": ("stable_baselines3.DQN", "policy_kwargs", None, "`1e-08`"),
    "dqn.buffer_size": ("stable_baselines3.DQN", "buffer_size", 1_000_000, ""),
    "dqn.learning_starts": ("stable_baselines3.DQN", "learning_starts", 100, ""),
}
# Setting -> psigrad's default in words, where its value is not clear.
SAID = {
    "n_envs": "8 copies for `a2c`, one for `ppo`, `trpo` and `dqn`",
    "tuned": "rl-zoo3's settings, for an environment that it has",
    "model.dtype": "`float32`, on a GPU `bfloat16`",
    "model.gradient_checkpointing": "`False`, on a GPU `True`",
    "run.save_steps": "every 10 minutes (`save_minutes`); the newest 2 are kept",
    "algorithm.kl": "for `grpo` the k3 estimate, with weight 0.04",
    "algorithm.aggregate": "for `grpo` every completion counts the same, as in its paper",
    "normalize_advantage": "over the rollout",
    "evaluation.eval_prompts": "a tenth of the rows, at most 64, drawn at random",
    "algorithm.use_bias_correction_kl": "`False`",
    "critic_learning_rate": "the policy's, or 0.05 / width of the model if that is larger",
}


def beside() -> list[tuple[str, str, str, str]]:
    """Return (setting, psigrad's default, the other library's default, its class) for each difference, as Markdown."""
    found: dict[str, Any] = {}
    for cls in (ControlConfig, PreferenceConfig, OnlineConfig, SFTConfig):  # of equal names, the last class counts
        found |= {name: setting.default for name, setting in settings_of(cls).items()}
    return [
        (name, SAID.get(name) or f"`{found[name]}`", said or f"`{value}`", where.rpartition(".")[2])
        for name, (where, _, value, said) in THEIRS.items()
    ]


def table() -> str:
    """Return the differences of `beside` as a table for a terminal."""
    rows = [(name, ours.replace("`", ""), f"{theirs} ({whose})".replace("`", "")) for name, ours, theirs, whose in beside()]
    rows = [("setting", "psigrad", "the other library"), *rows]
    wide = [max(len(row[k]) for row in rows) for k in (0, 1)]
    return "\n".join(f"{name:<{wide[0]}}  {ours:<{wide[1]}}  {theirs}" for name, ours, theirs in rows)
