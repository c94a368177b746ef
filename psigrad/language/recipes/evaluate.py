"""Evaluation of a model on held-out prompts, without training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psigrad import __version__, extras, redaction, seeds
from psigrad.config import EvalConfig, OnlineConfig, SampleConfig
from psigrad.config.fields import idle
from psigrad.config.sections import parse_columns
from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data.dataset_layouts import to_model_rows
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import score
from psigrad.language.data.sources import read_dataset
from psigrad.language.episodes.players import Player
from psigrad.language.loading import samplers
from psigrad.language.loading.load_model import load_model
from psigrad.language.loading.model_source import resolve_path
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes.conversation import environment_rows, episodes_for, offer_tools
from psigrad.language.recipes.evaluator import Evaluator, figures_of
from psigrad.language.recipes.row_limits import check_images
from psigrad.language.recipes.scorers import RewardSetup, evaluator_for
from psigrad.language.rewards import Scorer
from psigrad.language.rewards.benchmarks import BENCHMARKS, BenchmarkReward, Choice, as_prompts
from psigrad.language.rewards.math_answers import Math
from psigrad.language.rewards.resolve import name_of
from psigrad.language.rollout.scoring import explain_unscored
from psigrad.language.rollout.types import Trajectory
from psigrad.paths import check_output
from psigrad.records.pins import identify_data, identify_model
from psigrad.records.read import prompt_text
from psigrad.records.run_folder import to_line
from psigrad.runs import machine


@dataclass(frozen=True)
class Report:
    """The figures of one evaluation (`eval/…`) and the completions behind them, with their dataset rows."""

    figures: dict[str, Any]
    trajectories: list[Trajectory]
    rows: Sequence[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    """The conditions of the figures: template, examples, extraction, decoding, model and data."""

    def save(self, output: str) -> None:
        """Write the report as JSON."""
        completions = [
            {"source": self.rows[t.row].source, "prompt": prompt, "completion": t.text, "score": t.reward, "reason": t.reason}
            for t, prompt in zip(self.trajectories, self.prompts, strict=True)
        ]
        whole = {"figures": self.figures, "settings": redaction.clear(self.settings), "completions": completions}
        try:
            Path(output).write_bytes(to_line(whole))
        except OSError as error:
            raise UserError(f"{output} cannot be written: {error.strerror}; name another file with --output.") from error

    @property
    def unscored(self) -> str:
        """A message with the number of completions without a reward, and the most common reason; empty if all have a reward."""
        reasons = [t.reason or "no reason was given" if t.reward is None else None for t in self.trajectories]
        return explain_unscored(reasons, [self.rows[t.row].source for t in self.trajectories]) if any(reasons) else ""

    @property
    def prompts(self) -> list[str]:
        """The prompt of each completion, as text."""
        return [str(prompt_text(images.record_prompt(self.rows[t.row].dataset_prompt))) for t in self.trajectories]


def run(config: EvalConfig) -> Report:
    """Sample completions of each prompt and score them. With `best_of`, keep each prompt's completion with the highest reward."""
    if config.benchmark and not (config.reward or config.reward_model or config.evaluation.metric):
        shape = BENCHMARKS[config.benchmark]
        compare = Choice() if config.benchmark == "mmlu" else Math()
        config = replace(config, reward=(BenchmarkReward(config.benchmark, compare, shape.stop),))
    rewards = bool(config.reward or config.reward_model or config.environment or config.asks)
    if not (config.evaluation.metric or rewards):
        raise UserError(
            "There is nothing to score the completions with; name a built-in reward or a module:function with --reward, or a "
            "reward model with --reward-model."
        )
    if config.likelihood and (config.server or config.best_of > 1 or config.evaluation.num_generations_eval > 1):
        raise UserError(
            "likelihood needs a local model and one answer per question; remove --server, best_of and num_generations_eval."
        )
    if config.best_of > 1 and not rewards:
        raise UserError(
            "best_of chooses by a reward, but only a metric was given; name a reward with --reward or --reward-model."
        )
    found = sample_and_score(config, True)
    if found.trajectories and all(t.reward is None for t in found.trajectories):
        raise UserError(f"{found.unscored} Fix the reward function or the dataset.")
    found = replace(found, settings=score_settings(config, found))
    if config.output:
        found.save(config.output)
    return found


def score_settings(config: EvalConfig, report: Report) -> dict[str, Any]:
    """Return the settings that a score depends on, to be stored beside the score."""
    dataset, model = config.data.dataset, config.model.path if config.server else resolve_path(config.model.path)
    shape, sampling, evaluation = BENCHMARKS.get(config.benchmark), config.sampling, config.evaluation
    chat = report.rows and isinstance(report.rows[0].prompt, list)
    examples = config.fewshot_dataset or "the first rows of the dataset, which are not asked"
    scored = [name_of(one) if callable(one) else json.dumps(one) if isinstance(one, Mapping) else one for one in config.reward]
    comparison = {"gsm8k": "math", "math": "math", "mmlu": "choice"}
    made = {
        "model": " ".join(filter(None, (config.server, model, identify_model(model) or ""))),
        "dataset": f"{dataset} {identify_data(dataset) or ''}".strip() if isinstance(dataset, str) else "rows given from Python",
        "rows": len(report.rows),
        "template": shape.head + shape.template if shape else "the rows' own prompts",
        "sent": "as one user turn of the chat template" if chat else "as plain text",
        "few-shot": f"{config.num_fewshot} from {examples}" if config.num_fewshot else "none",
        "extraction": f"{comparison[config.benchmark]}{f', of the text before {shape.stop!r}' if shape.stop else ''}"
        if shape and scored == [config.benchmark]
        else " + ".join([*scored, *config.reward_model, str(evaluation.metric)]).strip("+ "),
        "decoding": "none: the likeliest letter"
        if isinstance(config, EvalConfig) and config.likelihood
        else f"temperature {evaluation.eval_temperature:g}{' (greedy)' * (evaluation.eval_temperature == 0)}, "
        f"top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p:g}, at most {sampling.max_completion_length} "
        f"tokens, {evaluation.num_generations_eval} per prompt{f', best of {config.best_of}' * (config.best_of > 1)}, seed "
        f"{config.run.seed}, sampler {'the server' if config.server else sampling.sampler}",
        "psigrad": __version__,
    }
    return made


def sample_and_score(config: EvalConfig | SampleConfig, scored: bool) -> Report:
    """Sample completions of the rows' prompts, score them if `scored` is True, and return the `Report`."""
    check_output(config.output)
    for text in idle(config).values():
        redaction.say(text)
    machine.prepare_torch(config.run)
    samplers.check_sampling(config.sampling)
    check_images(config)
    best_of = config.best_of if isinstance(config, EvalConfig) else 1
    metric = config.evaluation.metric if isinstance(config, EvalConfig) else ""
    functions = (metric,) if metric and best_of == 1 else None if scored else ()
    size = best_of if best_of > 1 else config.evaluation.num_generations_eval
    rewards = RewardSetup.of(config, functions)
    if config.server:
        with rewards.scorer(None) as scorer:
            return _choose(config, rewards, *_by_server(config, rewards, scorer, size))
    model = load_model(replace(config.model, adapter="merge"), config.run, None)
    with episodes_for(config, model.tokenizer) as episodes, rewards.scorer(model.tokenizer) as scorer:
        return _choose(config, rewards, *_by_model(config, rewards, scorer, size, model, episodes))


def _by_model(
    config: EvalConfig | SampleConfig,
    rewards: RewardSetup,
    scorer: Scorer | None,
    size: int,
    model: LanguageModel,
    episodes: Player | None,
) -> tuple[dict[str, Any], list[Trajectory], Sequence[Row]]:
    """Sample `size` completions of each prompt with a local model and score them. Return (figures, completions, rows)."""
    rows = rewards.judgeable(_rows(config, episodes, model.tokenizer), redaction.log)
    if isinstance(config, EvalConfig) and config.likelihood:
        letters = extras.load("likelihood").likeliest_letters(model, rows)
        found = score(scorer, [Trajectory(i, 0, *own) for i, own in enumerate(letters)], dict(enumerate(rows)))
        return figures_of(found, 1, rewards.metric), found, rows
    evaluator = evaluator_for(config, model, rewards, scorer, rows, None, episodes, size=size)
    with contextlib.closing(samplers.make(config.sampling, model)) as sampler:
        figures, trajectories = evaluator(model, sampler, 0)
    return figures, trajectories, rows


def _by_server(
    config: EvalConfig | SampleConfig, rewards: RewardSetup, scorer: Scorer | None, size: int
) -> tuple[dict[str, Any], list[Trajectory], Sequence[Row]]:
    """Sample completions from a server and score them. The seeds and the form of the returned values are those of `_by_model`."""
    if config.plays:
        raise UserError("environment, tools and agent need a local model; remove them, or remove --server.")
    if config.evaluation.eval_kl:
        raise UserError("eval_kl needs the model's own distribution, which a server does not return; remove eval_kl.")
    rows = rewards.judgeable(_rows(config, None, None), redaction.log)
    for row in rows:
        if row.prompt is None:
            raise UserError(f"{row.source} has no prompt; a row of the form prompt-only or prompt-completion was expected.")
    params = samplers.sampling_params(config.sampling, None, rows, config.evaluation.eval_temperature)
    limits = (config.server_timeout, config.server_attempts, config.server_concurrency)
    server = extras.load("server").ServedModel(config.server, config.model.path, config.server_key_variable, *limits)
    derived = [[seeds.derive(config.run.seed, "eval", i, k) for k in range(size)] for i in range(len(rows))]
    replies = {(i, k): reply for i, k, reply in server.completions(rows, derived, params)}
    written = [
        Trajectory(i, k, (), replies[i, k].completion, 0, text=replies[i, k].text) for i in range(len(rows)) for k in range(size)
    ]
    found = score(scorer, written, dict(enumerate(rows)))
    return figures_of(found, size, rewards.metric), found, rows


def _choose(
    config: EvalConfig | SampleConfig,
    rewards: RewardSetup,
    figures: dict[str, Any],
    trajectories: list[Trajectory],
    rows: Sequence[Row],
) -> Report:
    """Return the report on all completions or, with `best_of`, on each prompt's completion with the highest reward."""
    if not isinstance(config, EvalConfig) or config.best_of == 1:
        return Report(figures, trajectories, rows)
    best = _best(trajectories, config.best_of)
    figures = figures_of(best, 1, rewards.metric)
    if (metric := RewardSetup.of_metric(config)) is None:
        return Report(figures, best, rows)
    with metric.scorer(None) as scorer:
        measured = score(scorer, best, {t.row: rows[t.row] for t in best})
    return Report({**figures, **figures_of(measured, 1, metric.metric)}, measured, rows)


def kls_to(model: str, reference: str, report: Report, config: OnlineConfig | EvalConfig) -> list[float]:
    """Load both models. Return the exact KL(model‖reference) of each non-empty completion, in nats, summed over its tokens."""
    plain = replace(config.model, lora_rank=0, adapter="merge", quantize_base="")
    pair = [
        load_model(replace(plain, path=path, revision=plain.revision if path == plain.path else ""), config.run, None)
        for path in (model, reference)
    ]
    evaluator = Evaluator([], None, "", samplers.sampling_params(config.sampling, pair[0], report.rows), 0, reference=pair[1])
    return evaluator.kl(pair[0], report.trajectories)


def kl_to(model: str, reference: str, report: Report, config: OnlineConfig) -> float:
    """Return the mean exact KL(model‖reference) of the completions in `report`, in nats per completion; see `kls_to`."""
    values = kls_to(model, reference, report, config)
    return sum(values) / max(1, len(values))


def _best(trajectories: list[Trajectory], size: int) -> list[Trajectory]:
    """Return the best of each prompt's `size` adjacent completions, by reward. The earliest wins a tie."""
    groups = [trajectories[i : i + size] for i in range(0, len(trajectories), size)]
    return [max(group, key=lambda t: float("-inf") if t.reward is None else t.reward) for group in groups]


def _rows(config: EvalConfig | SampleConfig, episodes: Player | None, tokenizer: Any) -> list[Row]:
    """Return the rows that the environment of `episodes` makes, or else those of the dataset, as the model reads them."""
    own, data = environment_rows(config, episodes), config.data
    benchmark = config.benchmark if isinstance(config, EvalConfig) else ""
    if own is None and isinstance(config, EvalConfig) and benchmark:
        rows = _benchmark_rows(config)
    else:
        rows = read_dataset(data, "prompt-only", data.dataset, data.split, redaction.log).rows if own is None else own
    (rows,) = to_model_rows(tokenizer, [rows[: config.evaluation.eval_prompts or len(rows)]], data.plain_prompts, redaction.log)
    return offer_tools(config, rows)


def _benchmark_rows(config: EvalConfig) -> list[Row]:
    """Return the dataset's rows as a benchmark's prompts, each with `num_fewshot` worked examples before the question."""
    asked = {"prompt": "{" + BENCHMARKS[config.benchmark].asked + "}"}
    data = replace(config.data, columns={**asked, **parse_columns(config.data.columns)})
    rows, count = read_dataset(data, "prompt-only", data.dataset, data.split, redaction.log).rows, config.num_fewshot
    if config.fewshot_dataset:
        shots = read_dataset(data, "prompt-only", config.fewshot_dataset, data.split, redaction.log).rows
    else:
        shots, rows = rows[:count], rows[count:]
    if len(shots) < count or not rows:
        raise UserError(
            f"num_fewshot is {count}, but there are {len(shots) + len(rows)} rows: too few for the examples and a question; give "
            "more rows or lower num_fewshot."
        )
    return as_prompts(config.benchmark, rows, shots[:count])
