"""Commands that train, sample, score and measure language models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from psigrad.cli import flags
from psigrad.config import EvalConfig, LmEvalConfig, OnlineConfig, SampleConfig
from psigrad.config.methods import declaration, declared
from psigrad.errors import UserError
from psigrad.preflight.settings import BenchConfig


def train(name: str) -> Callable[[list[str]], int]:
    """The command of a training method."""

    def run(arguments: list[str]) -> int:
        method = declaration(name)
        config = flags.parse(method.settings, name, arguments, defaults=method.defaults)
        for setting in {"algorithm", "loss"} & set(method.defaults):
            agree(name, getattr(config, setting), setting)
        from psigrad.processes.parallel import launch

        if config.placement.processes > 1 and not launch.is_rank():
            return launch.run(config.placement.processes, [name, *arguments])
        from psigrad.language.recipes import api
        from psigrad.preflight.plan import plan as command
        from psigrad.records.report import terminal

        if launch.first():
            command.warn(config)
            command.foretell(config, input if sys.stdin.isatty() and sys.stderr.isatty() else None)
        result = api.run(config)
        if launch.first():
            terminal.print_result(result)
        return 0

    return run


def score(arguments: list[str]) -> int:
    """Write what a reward model, or reward functions, say of every row."""
    _, listed, rest = flags.parse_lists(arguments, "--reward", "--reward-weights")
    if not listed["--reward"] and not flags.asks_for_help(arguments):
        return _score_by_model(rest)
    texts = ("reward", "dataset", "split", "output", "columns", "tokenizer")
    defaults: dict[str, Any] = {**dict.fromkeys(texts, ""), "split": "test", "reward_timeout": 10.0}
    if "--attack" in rest or flags.asks_for_help(arguments):
        defaults |= {"attack": False, "max_rows": 50}
    given = flags.plain("score", rest, {"model": "", **defaults})
    if given.pop("model"):
        raise UserError("score got --model and --reward; give a reward model or reward functions.")
    rewards, dataset = listed["--reward"], given.pop("dataset")
    how = {"weights": [flags.number("--reward-weights", text) for text in listed["--reward-weights"]],
           "timeout": given["reward_timeout"], "split": given["split"], "columns": given["columns"]}  # fmt: skip
    if given.get("attack"):
        if given["tokenizer"]:
            raise UserError("score --attack counts no tokens; leave out --tokenizer, and rewards of lengths alone.")
        return _attack(rewards, dataset, given["output"], max_rows=given["max_rows"], **how)
    from psigrad.language.recipes import score_rows

    scores = score_rows.score(rewards, dataset, tokenizer=given["tokenizer"], **how)
    _write("".join(json.dumps(one.row()) + "\n" for one in scores), given["output"], len(scores))
    score_rows.check_scored(scores)
    print(score_rows.summary(scores), file=sys.stderr)
    return 0


def _attack(rewards: list[str], dataset: str, output: str, **how: Any) -> int:
    """Say which answers the rewards misjudge; exit status 1 where a wrong one is rewarded."""
    if not dataset:
        raise UserError("No dataset was given; name a file of prompts with answers with --dataset.")
    from psigrad.language.recipes import attack

    found = attack.attack(rewards, dataset, **how)
    if output:
        _write("".join(json.dumps(asdict(one)) + "\n" for one in found), output, len(found))
    print(attack.report(found))
    return 1 if any(one.misjudged and not one.right for one in found) else 0


def _score_by_model(arguments: list[str]) -> int:
    defaults = {"model": "", "dataset": "", "columns": "", "split": "test", "output": "", "device": "auto"}
    given = flags.plain("score", arguments, defaults)
    output = given.pop("output")
    from psigrad.language.recipes import reward

    scores = reward.score(given.pop("model"), given.pop("dataset"), **given)
    _write("".join(f"{score:.6g}\n" for score in scores), output, len(scores))
    return 0


def _write(lines: str, output: str, count: int) -> None:
    if output:
        Path(output).write_text(lines)
        print(f"{count} scores: {output}")
    else:
        print(lines, end="")


def sample(arguments: list[str]) -> int:
    """Write completions of a model as a dataset."""
    config = flags.parse(SampleConfig, "sample", arguments)
    from psigrad.language.recipes import sample

    written = sample.run(config)
    ties = [f"{written.ties} prompts whose rewards are all equal"] if written.ties else []
    empty = [f"{written.empty} empty completion{'s' * (written.empty > 1)}"] if written.empty else []
    left_out = f" ({' and '.join([*ties, *empty])} left out)" if ties or empty else ""
    print(f"{written.rows} rows: {written.path}{left_out}")
    return 0


def pairs(arguments: list[str]) -> int:
    """Write the pairs of rankings or ratings."""
    given = flags.plain("pairs", arguments, {"dataset": "", "output": "", "columns": "", "scale": 10, "tie": 0.0})
    from psigrad.language.recipes import sample

    written, converted = sample.convert(**given)
    print(f"{written.rows} pairs: {written.path} ({converted.ties} ties and {converted.alone} single answers left out)")
    return 0


def tasks(arguments: list[str]) -> int:
    """Print the names of reasoning-gym's tasks."""
    if flags.asks_for_help(arguments):
        print("psigrad tasks\n\nNames of the procedural tasks of reasoning-gym, one per line.")
        return 0
    if arguments:
        raise UserError(f"tasks got {arguments[0]!r} and takes no arguments; `psigrad tasks` lists every task.")
    from psigrad.language.data.tasks import task_names

    print("\n".join(task_names()))
    return 0


def check(arguments: list[str]) -> int:
    """Print whether a model, its data and its settings will train rightly; exit status 1 where not all of it holds."""
    config = flags.parse(OnlineConfig, "check [--json]", [argument for argument in arguments if argument != "--json"])
    from psigrad.language.data.rendered_rows import lines
    from psigrad.preflight import check, first_rows
    from psigrad.records.report import terminal

    rows, as_json = first_rows.read_first_rows(config), "--json" in arguments
    if not as_json:
        terminal.print_lines([*lines(rows), *first_rows.try_rewards(config)])
    checks = check.run(config)
    print(check.report(checks, as_json=as_json, rows=rows))
    return 0 if check.all_pass(checks) else 1


def plan(arguments: list[str]) -> int:
    """Print what a run will take."""
    config, asked = flags.parse_plan(arguments)
    from psigrad.preflight.plan import plan as command

    print(command.run(config, asked))
    return 0


def bench(arguments: list[str]) -> int:
    """Print what training steps take."""
    config = flags.parse(BenchConfig, "bench", arguments)
    from psigrad.preflight.bench import timing as command

    print(command.run(config))
    return 0


def compare(arguments: list[str]) -> int:
    """Train by several methods and draw the comparison."""
    methods, given, rest = flags.parse_lists(arguments, "--seeds", "--pairs")
    config = flags.parse(
        OnlineConfig, "compare METHOD ... [--seeds 0 1 2] [--pairs FILE]", rest, {"algorithm": methods[0]} if methods else {}
    )
    from psigrad.language.recipes import comparison as compare
    from psigrad.records.report import terminal

    seeds = tuple(flags.whole_number("--seeds", value) for value in given["--seeds"]) or (0, 1, 2)
    page = compare.run(compare.Comparison(tuple(methods), config, seeds, "".join(given["--pairs"][:1])))
    terminal.print_methods(page.parent)
    print(f"report  {page}")
    return 0


def agree(preset: str, given: Any, setting: str = "algorithm") -> None:
    """`psigrad rloo --config grpo.yaml` would train by another method than the one typed."""
    named = given.get("preset", preset) if isinstance(given, dict) else given
    if isinstance(named, str) and named != preset and named in declared():
        raise UserError(
            f"The command is {preset} and the settings name the {setting} {named}; type `psigrad {named}`, or take the name out "
            "of the settings."
        )


def evaluate(arguments: list[str]) -> int:
    """Sample held-out prompts and print their scores."""
    config = flags.parse(EvalConfig, "eval", arguments)
    from psigrad.language.recipes import evaluate
    from psigrad.records.report import terminal

    done = evaluate.run(config)
    terminal.print_figures(done.figures)
    terminal.print_lines((f"{name}: {value}", "") for name, value in done.settings.items())
    terminal.print_completions(done.prompts, [t.text for t in done.trajectories], [t.reward for t in done.trajectories])
    if done.unscored:
        print(f"psigrad: {done.unscored}", file=sys.stderr)
    return 0


def lm_eval(arguments: list[str]) -> int:
    """Print what lm-eval's tasks say of a model, and of the one that it is compared with."""
    config = flags.parse(LmEvalConfig, "lm-eval", arguments)
    try:
        from psigrad.compat import lm_eval as harness
    except ImportError as error:
        raise UserError(f'lm-eval cannot be imported ({error}); install it: pip install "psigrad[lm-eval]".') from error
    from psigrad.records.report import terminal

    terminal.print_tasks(harness.run(config).metrics)
    return 0


def demo(arguments: list[str]) -> int:
    """Run the demo."""
    known = {"output_dir": "runs/demo", "seed": 0, "sft_steps": 800, "rl_steps": 500, "progress": True}
    settings = flags.plain("demo", arguments, known)
    from psigrad.language.recipes import demo
    from psigrad.records.report import terminal

    terminal.print_result(demo.run(**settings))
    return 0
