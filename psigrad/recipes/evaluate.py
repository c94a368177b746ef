"""Evaluation of a model on held-out prompts, without training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psigrad.config import EvalConfig
from psigrad.data.rows import Row
from psigrad.errors import UserError
from psigrad.recipes import setup
from psigrad.recipes.conversation import episodes_for, offered, own_rows
from psigrad.recipes.judges import evaluator_for, judge_for
from psigrad.rollout.episodes import Episodes
from psigrad.rollout.types import Trajectory


@dataclass(frozen=True)
class Report:
    """Figures of one evaluation (`eval/…`) and the completions behind them."""

    figures: dict[str, Any]
    trajectories: list[Trajectory]
    prompts: list[str]


def run(config: EvalConfig) -> Report:
    """Sample `num_generations_eval` completions of each prompt and score them. Raises `UserError` on mistakes of the user."""
    functions = (config.evaluation.metric,) if config.evaluation.metric else None
    if not (functions or config.reward or config.reward_model or config.environment):
        raise UserError(
            "Nothing scores the completions; name a built-in or module:function with --reward (reward), or a reward model with "
            "--reward-model."
        )
    setup.prepare_torch(config.run)
    model = setup.load_model(config.model, config.run, None)
    episodes = episodes_for(config)
    rows = _rows(config, episodes)
    with judge_for(config, model.tokenizer, functions) as judge:
        evaluator = evaluator_for(config.evaluation, config, model, judge, rows, None, episodes)
        figures, trajectories = evaluator(model, setup.sampler_for(config.sampling, model), 0)
    return Report(figures, trajectories, [str(rows[t.row].prompt) for t in trajectories])


def _rows(config: EvalConfig, episodes: Episodes | None) -> list[Row]:
    """The rows of the dataset, or those that the environment brings along."""
    own = own_rows(config, episodes)
    rows = setup.read_dataset(config, "prompt-only", config.data.dataset, config.data.split).rows if own is None else own
    return offered(config, rows[: config.evaluation.eval_prompts or len(rows)])
