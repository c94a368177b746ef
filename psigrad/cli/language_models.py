"""Commands that train, sample, score and measure language models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from psigrad import extras, redaction
from psigrad.cli import flags
from psigrad.config import EvalConfig, Reward
from psigrad.config.methods import declaration, list_declarations
from psigrad.config.nested import read_value
from psigrad.errors import UserError
from psigrad.paths import check_output


def train(name: str) -> Callable[[list[str]], int]:
    """Return the command that trains with the method `name`. It takes a list of arguments and returns an exit status."""

    def run(arguments: list[str]) -> int:
        method = declaration(name)
        about = f"{name}: {method.summary}. {method.settings.__doc__}" if method.defaults else ""
        config = flags.parse(method.settings, f"{name} --model PATH --dataset DATASET", arguments, method.defaults, about)
        for setting in {"algorithm", "loss"} & set(method.defaults):
            check_method(name, getattr(config, setting), setting)
        from psigrad.processes.parallel import launch

        if config.placement.processes > 1 and not launch.is_rank():
            return launch.run(config.placement.processes, [name, *arguments])
        from psigrad.language.recipes import dispatch
        from psigrad.records.report import terminal

        config = dispatch.fit_memory(config)
        if launch.is_first_rank() and (plan := extras.find("plan")):
            plan.warn(config)
            plan.foretell(config, input if sys.stdin.isatty() and sys.stderr.isatty() else None)
        result = dispatch.run(config)
        if launch.is_first_rank():
            terminal.print_result(result)
        return 0

    return run


_SCORE = """\
Score recorded completions: rows with a prompt and a completion. Give reward functions (--reward) or a reward model (--model).
--model: a reward model, instead of --reward
--device: with --model: auto, cpu or cuda
--reward: one or more reward functions: built-in names, module:function, or mappings such as '{reward: code, partial: true}'
--reward-weights: one weight per reward function; by default all 1
--dataset: a file, a folder or a hub name
--split: split of the dataset
--output: file for the scores; without it they are printed
--columns: rename columns, such as question=prompt
--tokenizer: a model whose tokenizer counts tokens, for rewards that need it
--bad-rows: malformed rows: stop raises an error, skip drops them
--reward-timeout: seconds that a call of a reward function may take
--attack: test the reward: score wrong answers, and right ones in other forms; exit with 1 if a wrong one is rewarded
--max-rows: with --attack: use only the first N prompts"""


def score(arguments: list[str]) -> int:
    """Score every row with reward functions or a reward model, and print or write the scores."""
    _, listed, rest = flags.parse_lists(arguments, "--reward", "--reward-weights")
    if not listed["--reward"] and not flags.asks_for_help(arguments):
        return _score_by_model(rest)
    texts = ("model", "reward", "dataset", "split", "output", "columns", "tokenizer")
    defaults: dict[str, Any] = {**dict.fromkeys(texts, ""), "split": "test", "bad_rows": "stop", "reward_timeout": 10.0}
    if "--attack" in rest or flags.asks_for_help(arguments):
        help_only = {"device": "auto", "reward_weights": ()} if flags.asks_for_help(arguments) else {}
        defaults |= {"attack": False, "max_rows": 50, **help_only}
    given = flags.parse_plain("score (--reward REWARD ... | --model MODEL) --dataset DATASET", rest, defaults, _SCORE)
    if given.pop("model"):
        raise UserError("score got both --model and --reward; give only a reward model or only reward functions.")
    check_output(given["output"])
    rewards, dataset = [read_value(text, Reward, "--reward") for text in listed["--reward"]], given.pop("dataset")
    how = {"weights": [flags.parse_number("--reward-weights", text, float) for text in listed["--reward-weights"]],
           "timeout": given["reward_timeout"], **{name: given[name] for name in ("split", "columns", "bad_rows")}}  # fmt: skip
    if given.get("attack"):
        if given["tokenizer"]:
            raise UserError("score --attack passes no tokens to rewards; remove --tokenizer and any reward that counts tokens.")
        return _attack(rewards, dataset, given["output"], max_rows=given["max_rows"], **how)
    from psigrad.language.recipes import score_rows

    scores = score_rows.score(rewards, dataset, tokenizer=given["tokenizer"], **how)
    _write("".join(json.dumps(one.row()) + "\n" for one in scores), given["output"], len(scores))
    score_rows.check_scored(scores)
    print(redaction.escape(redaction.clear(score_rows.summary(scores))), file=sys.stderr)
    return 0


def _attack(rewards: list[Any], dataset: str, output: str, **how: Any) -> int:
    """Test rewards with right and wrong answers, and print the misjudged ones. Return 1 if a wrong one is rewarded, else 0."""
    if not dataset:
        raise UserError("No dataset was given; name a file of prompts and answers with --dataset.")
    attack = extras.load("attack")
    found = attack.attack(rewards, dataset, **how)
    if output:
        _write("".join(json.dumps(asdict(one)) + "\n" for one in found), output, len(found))
    print(redaction.escape(attack.report(found)))
    return 1 if any(one.misjudged and not one.right for one in found) else 0


def _score_by_model(arguments: list[str]) -> int:
    defaults = {"model": "", "dataset": "", "columns": "", "split": "test", "bad_rows": "stop", "output": "", "device": "auto"}
    given = flags.parse_plain("score --model MODEL --dataset DATASET", arguments, defaults)
    check_output(output := given.pop("output"))
    from psigrad.language.recipes import reward

    scored = reward.score_rows(given.pop("model"), given.pop("dataset"), **given)
    lines = (json.dumps(row, default=str) if output.endswith(".jsonl") else f"{row['reward']:.6g}" for row in scored)
    _write("".join(f"{line}\n" for line in lines), output, len(scored))
    return 0


def _write(lines: str, output: str, count: int) -> None:
    if output:
        Path(output).write_text(lines)
        print(f"{count} scores: {output}")
    else:
        print(lines, end="")


def tasks(arguments: list[str]) -> int:
    """Print the names of reasoning-gym's tasks."""
    flags.parse_plain("tasks", arguments, {}, "Print the names of reasoning-gym's procedural tasks, one per line.")
    from psigrad.language.data.tasks import task_names

    print("\n".join(task_names()))
    return 0


def check_method(preset: str, given: Any, setting: str = "algorithm") -> None:
    """Raise `UserError` if `given`, the value of `setting`, names a method other than the command's, `preset`."""
    named = given.get("preset", preset) if isinstance(given, dict) else given
    if isinstance(named, str) and named != preset and named in list_declarations():
        raise UserError(
            f"The command is {preset}, but the settings name the {setting} {named}; run `psigrad {named}`, or remove "
            f"{setting} from the settings."
        )


def evaluate(arguments: list[str]) -> int:
    """Sample completions of held-out prompts and print their scores."""
    config = flags.parse(EvalConfig, "eval --model PATH --dataset DATASET", arguments)
    from psigrad.language.recipes import evaluate
    from psigrad.records.report import terminal

    done = evaluate.run(config)
    terminal.print_figures(done.figures)
    terminal.print_lines((f"{name}: {value}", "") for name, value in done.settings.items())
    terminal.print_completions(done.prompts, [t.text for t in done.trajectories], [t.reward for t in done.trajectories])
    if done.unscored:
        redaction.say(done.unscored)
    return 0


def report(arguments: list[str]) -> int:
    """Redraw the report of a run, or write a report that compares several runs."""
    about = "Redraw the report of a run, or compare several runs in one report.\n--output: file for the report; by default "
    about += "report.html in RUN, or in the current folder for several runs"
    given = flags.parse_plain("report RUN [RUN ...]", arguments, {"output": ""}, about)
    from psigrad.records import report

    print(f"report: {report.write(given['names'], given['output'] or None)}")
    return 0
