"""Commands that train, sample, score and measure language models."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from psigrad.cli.common import asks_for_help, finished, flag_of
from psigrad.errors import UserError


def train(name: str) -> Callable[[list[str]], int]:
    """The command of a training method."""

    def run(arguments: list[str]) -> int:
        from psigrad.cli import flags
        from psigrad.config.methods import declaration

        method = declaration(name)
        config = flags.parse(method.settings, name, arguments, defaults=method.defaults)
        for setting in {"algorithm", "loss"} & set(method.defaults):
            agree(name, getattr(config, setting), setting)
        from psigrad.processes.parallel import launch

        if config.placement.processes > 1 and not launch.is_rank():
            return launch.run(config.placement.processes, [name, *arguments])
        from psigrad.language.recipes import api
        from psigrad.preflight.plan import plan as command

        if launch.first():
            command.warn(config)
        result = api.run(config)
        return finished(result) if launch.first() else 0

    return run


def score(arguments: list[str]) -> int:
    """Write what a reward model, or reward functions, say of every row."""
    from psigrad.cli import flags

    _, listed, rest = flags.listed(arguments, "--reward", "--reward-weights")
    if not listed["--reward"] and not asks_for_help(arguments):
        return _score_by_model(rest)
    defaults = {"reward": "", "dataset": "", "split": "test", "output": "", "tokenizer": "", "reward_timeout": 10.0}
    given = flags.plain("score", rest, {"model": "", **defaults})
    if given.pop("model"):
        raise UserError("score got --model and --reward; give a reward model or reward functions.")
    weights = [flags.number("--reward-weights", text) for text in listed["--reward-weights"]]
    from psigrad.language.recipes import score_rows

    scores = score_rows.score(
        listed["--reward"],
        given["dataset"],
        weights=weights,
        split=given["split"],
        tokenizer=given["tokenizer"],
        timeout=given["reward_timeout"],
    )
    _write("".join(json.dumps(one.row()) + "\n" for one in scores), given["output"], len(scores))
    print(score_rows.summary(scores), file=sys.stderr)
    return 0


def _score_by_model(arguments: list[str]) -> int:
    from psigrad.cli import flags

    given = flags.plain("score", arguments, {"model": "", "dataset": "", "split": "test", "output": "", "device": "auto"})
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
    from psigrad.cli import flags
    from psigrad.config import SampleConfig

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
    from psigrad.cli import flags

    given = flags.plain("pairs", arguments, {"dataset": "", "output": "", "scale": 10, "tie": 0.0})
    from psigrad.language.recipes import sample

    written, converted = sample.convert(given["dataset"], given["output"], scale=given["scale"], tie=given["tie"])
    print(f"{written.rows} pairs: {written.path} ({converted.ties} ties and {converted.alone} single answers left out)")
    return 0


def push(arguments: list[str]) -> int:
    """Upload a finished run's model."""
    usage = "psigrad push RUN REPO [--private] [--revision BRANCH]"
    if asks_for_help(arguments):
        print(f"{usage}\n\nUpload model/ of a finished run with its model card to REPO (user/name) on the Hugging Face hub.")
        print("The token is that of HF_TOKEN or of `hf auth login`. A repository that is there gets a new commit.")
        print("\n  --private          make a new repository private")
        print("  --revision BRANCH  branch to upload to, made where it is missing (default main)")
        return 0
    from psigrad.cli import flags

    names, listed, rest = flags.listed(arguments, "--revision")
    given = flags.plain("push", rest, {"private": False})
    if len(names) != 2 or len(listed["--revision"]) > 1:
        raise UserError(f"push got {' '.join(names) or 'nothing'} and takes a run folder and a repository; the usage is {usage}.")
    from psigrad.runs import hub

    print(hub.push(names[0], names[1], private=given["private"], revision="".join(listed["--revision"])))
    return 0


def check(arguments: list[str]) -> int:
    """Print whether a model, its data and its settings will train rightly; exit status 1 where not all of it holds."""
    from psigrad.cli import flags
    from psigrad.config import OnlineConfig

    config = flags.parse(OnlineConfig, "check [--json]", [argument for argument in arguments if argument != "--json"])
    from psigrad.preflight import check

    found = check.run(config)
    print(check.report(found, as_json="--json" in arguments))
    return 0 if check.all_pass(found) else 1


def plan(arguments: list[str]) -> int:
    """Print what a run will take."""
    from psigrad.cli import flags

    config, asked = flags.planned(arguments)
    from psigrad.preflight.plan import plan as command

    print(command.run(config, asked))
    return 0


def bench(arguments: list[str]) -> int:
    """Print what training steps take."""
    from psigrad.cli import flags
    from psigrad.preflight.settings import BenchConfig

    config = flags.parse(BenchConfig, "bench", arguments)
    from psigrad.preflight.bench import timing as command

    print(command.run(config))
    return 0


def compare(arguments: list[str]) -> int:
    """Train by several methods and draw the comparison."""
    from psigrad.cli import flags
    from psigrad.config import OnlineConfig

    methods, given, rest = flags.listed(arguments, "--seeds", "--pairs")
    config = flags.parse(
        OnlineConfig, "compare METHOD ... [--seeds 0 1 2] [--pairs FILE]", rest, {"algorithm": methods[0]} if methods else {}
    )
    from psigrad.language.recipes import comparison as compare
    from psigrad.records.report import terminal

    seeds = tuple(flags.whole_number("--seeds", value) for value in given["--seeds"]) or (0, 1, 2)
    page = compare.run(compare.Comparison(tuple(methods), config, seeds, "".join(given["--pairs"][:1])))
    terminal.methods(page.parent)
    print(f"report  {page}")
    return 0


def agree(preset: str, given: Any, setting: str = "algorithm") -> None:
    """`psigrad rloo --config grpo.yaml` would train by another method than the one typed."""
    from psigrad.config.methods import declared

    named = given.get("preset", preset) if isinstance(given, dict) else given
    if isinstance(named, str) and named != preset and named in declared():
        raise UserError(
            f"The command is {preset} and the settings name the {setting} {named}; type `psigrad {named}`, or take the name out "
            "of the settings."
        )


def evaluate(arguments: list[str]) -> int:
    """Sample held-out prompts and print their scores."""
    from psigrad.cli import flags
    from psigrad.config import EvalConfig

    config = flags.parse(EvalConfig, "eval", arguments)
    from psigrad.language.recipes import evaluate
    from psigrad.records.report import terminal

    done = evaluate.run(config)
    terminal.figures(done.figures)
    terminal.samples(done.prompts, [t.text for t in done.trajectories], [t.reward for t in done.trajectories])
    if done.unscored:
        print(f"psigrad: {done.unscored}", file=sys.stderr)
    return 0


def lm_eval(arguments: list[str]) -> int:
    """Print what lm-eval's tasks say of a model, and of the one that it is compared with."""
    from psigrad.cli import flags
    from psigrad.config import LmEvalConfig

    config = flags.parse(LmEvalConfig, "lm-eval", arguments)
    try:
        from psigrad.compat import lm_eval as harness
    except ImportError as error:
        raise UserError(f'lm-eval cannot be imported ({error}); install it: pip install "psigrad[lm-eval]".') from error
    from psigrad.records.report import terminal

    terminal.compared(harness.run(config).metrics)
    return 0


def demo(arguments: list[str]) -> int:
    """Run the demo."""
    from psigrad.cli import flags

    settings = flags.plain("demo", arguments, {"output_dir": "runs/demo", "seed": 0, "progress": True})
    from psigrad.language.recipes import demo

    return finished(demo.run(**settings))


_FROM_TRL = "psigrad from-trl SCRIPT.py|CONFIG.yaml [--trainer grpo] [--output FILE.yaml]"


def from_trl(arguments: list[str]) -> int:
    """Print the settings that train as a script of TRL does, or a file of its command line, and what differs."""
    if asks_for_help(arguments):
        print(
            f"{_FROM_TRL}\n\nThe equal settings of psigrad, as YAML and as a command, and what differs. "
            "The script is read, not run."
        )
        return 0
    from psigrad.cli import flags

    paths, given, rest = flags.listed(arguments, "--trainer", "--output")
    if len(paths) != 1 or rest:
        raise UserError(f"from-trl takes one script or file; the usage is {_FROM_TRL}.")
    from psigrad.compat.scripts import convert_file

    made = convert_file(paths[0], "".join(given["--trainer"][:1]))
    told = {
        "differs": made.differs,
        "no equal here": made.no_equal,
        "look at": made.look_at,
        "needless here": made.nothing,
    }
    notes = [line for title, lines in told.items() if lines for line in ("#", f"# {title}:", *(f"#   {line}" for line in lines))]
    output = "".join(given["--output"][:1])
    if output:
        Path(output).write_text(made.yaml())
        print(f"# psigrad {made.method} --config {output}")
    else:
        print(made.yaml() + f"\n# as a command:\n# {_command(made.method, made.settings)}")
    print("\n".join(notes))
    return 0


def _command(method: str, settings: dict[str, Any]) -> str:
    """The command line of these settings."""
    words = ["psigrad", method]
    for name, value in settings.items():
        if name.partition(".")[0] in ("algorithm", "loss"):
            text = value if isinstance(value, str) else json.dumps(value)
            words.append(shlex.quote(f"{name}={text}"))
        elif isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(name).replace("--", "--no-", 1))
        elif isinstance(value, list | tuple) and not value:
            words.append(shlex.quote(f"{name}=[]"))
        else:
            several = value if isinstance(value, list | tuple) else [value]
            words += [flag_of(name), *(shlex.quote(str(one)) for one in several)]
    return " ".join(words)
