"""The commands. Each parses, calls one public function and prints; nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from psigrad import __version__
from psigrad.errors import UserError, nearest


class Command(NamedTuple):
    """What a command does, in a line, and the function that does it: arguments -> exit status."""

    purpose: str
    run: Callable[[list[str]], int]


def _sft(arguments: list[str]) -> int:
    from psigrad import flags
    from psigrad.config import SFTConfig

    config = flags.parse(SFTConfig, "sft", arguments)
    from psigrad.recipes import sft

    return _finished(sft.run(config))


def _online(preset: str, **defaults: Any) -> Callable[[list[str]], int]:
    def run(arguments: list[str]) -> int:
        from psigrad import flags
        from psigrad.config import OnlineConfig

        config = flags.parse(OnlineConfig, preset, arguments, defaults={"algorithm": preset, **defaults})
        _agree(preset, config.algorithm)
        from psigrad.recipes import online

        return _finished(online.run(config))

    return run


def _reward(arguments: list[str]) -> int:
    from psigrad import flags
    from psigrad.config import RewardConfig

    config = flags.parse(RewardConfig, "reward", arguments)
    from psigrad.recipes import reward

    return _finished(reward.run(config))


def _preference(preset: str) -> Callable[[list[str]], int]:
    def run(arguments: list[str]) -> int:
        from psigrad import flags
        from psigrad.config import PreferenceConfig

        config = flags.parse(PreferenceConfig, preset, arguments, defaults={"loss": preset})
        _agree(preset, config.loss, "loss")
        from psigrad.recipes import preference

        return _finished(preference.run(config))

    return run


def _score(arguments: list[str]) -> int:
    from psigrad import flags

    defaults = {"model": "", "dataset": "", "split": "test", "output": "", "device": "auto"}
    given = flags.plain("score", arguments, defaults)
    output = given.pop("output")
    from psigrad.recipes import reward

    scores = reward.score(given.pop("model"), given.pop("dataset"), **given)
    lines = "".join(f"{score:.6g}\n" for score in scores)
    if output:
        Path(output).write_text(lines)
        print(f"{len(scores)} scores: {output}")
    else:
        print(lines, end="")
    return 0


def _sample(arguments: list[str]) -> int:
    from psigrad import flags
    from psigrad.config import SampleConfig

    config = flags.parse(SampleConfig, "sample", arguments)
    from psigrad.recipes import sample

    written = sample.run(config)
    left_out = f" ({written.ties} prompts whose rewards are all equal left out)" if written.ties else ""
    print(f"{written.rows} rows: {written.path}{left_out}")
    return 0


def _pairs(arguments: list[str]) -> int:
    from psigrad import flags

    given = flags.plain("pairs", arguments, {"dataset": "", "output": "", "scale": 10, "tie": 0.0})
    from psigrad.recipes import sample

    written, converted = sample.convert(given["dataset"], given["output"], scale=given["scale"], tie=given["tie"])
    print(f"{written.rows} pairs: {written.path} ({converted.ties} ties and {converted.alone} single answers left out)")
    return 0


def _compare(arguments: list[str]) -> int:
    from psigrad import flags
    from psigrad.config import OnlineConfig

    methods, given, rest = flags.listed(arguments, "--seeds", "--pairs")
    config = flags.parse(OnlineConfig, "compare METHOD ... [--seeds 0 1 2] [--pairs FILE]", rest)
    from psigrad.recipes import compare

    seeds = tuple(flags.whole_number("--seeds", value) for value in given["--seeds"]) or (0, 1, 2)
    page = compare.run(compare.Comparison(tuple(methods), config, seeds, "".join(given["--pairs"][:1])))
    print(f"report  {page}")
    return 0


def _agree(preset: str, given: Any, setting: str = "algorithm") -> None:
    """`psigrad rloo --config grpo.yaml` would train by another method than the one typed."""
    named = given.get("preset", preset) if isinstance(given, dict) else given
    if isinstance(named, str) and named != preset and named in COMMANDS:
        raise UserError(
            f"The command is {preset} and the settings name the {setting} {named}; type `psigrad {named}`, or take the name out "
            "of the settings."
        )


def _eval(arguments: list[str]) -> int:
    from psigrad import flags
    from psigrad.config import EvalConfig

    config = flags.parse(EvalConfig, "eval", arguments)
    from psigrad.recipes import evaluate
    from psigrad.report import terminal

    done = evaluate.run(config)
    terminal.figures(done.figures)
    terminal.samples(done.prompts, [t.text for t in done.trajectories], [t.reward for t in done.trajectories])
    return 0


def _demo(arguments: list[str]) -> int:
    from psigrad import flags

    settings = flags.plain("demo", arguments, {"output_dir": "runs/demo", "seed": 0, "progress": True})
    from psigrad.recipes import demo

    return _finished(demo.run(**settings))


def _explain(arguments: list[str]) -> int:
    usage = "psigrad explain NAME [OTHER]"
    if _asks_for_help(arguments):
        print(f"{usage}\n\nThe formula that NAME optimises, term by term, or how OTHER differs from it.")
        return 0
    if not 1 <= len(arguments) <= 2:
        raise UserError(f"explain got {len(arguments)} names and takes one or two; the usage is {usage}.")
    from psigrad import objective

    print(objective.explain(*arguments))
    return 0


def _report(arguments: list[str]) -> int:
    usage = "psigrad report RUN [RUN ...] [--output FILE]"
    if _asks_for_help(arguments):
        print(f"{usage}\n\nDraw the report of a run folder again, or of several compared.")
        return 0
    from psigrad import flags

    folders, output = flags.names_and_output("report", arguments)
    if not folders:
        raise UserError(f"report got no run folder; the usage is {usage}.")
    from psigrad import report

    print(f"report: {report.write(folders, output)}")
    return 0


def _grid(arguments: list[str]) -> int:
    from dataclasses import asdict

    from psigrad import flags
    from psigrad.recipes import grid

    grid.run(grid.GridSettings(**flags.plain("grid", arguments, asdict(grid.GridSettings()))))
    return 0


def _experiment(arguments: list[str]) -> int:
    from psigrad import flags
    from psigrad.recipes import experiment

    usage = f"psigrad experiment {'|'.join(experiment.EXPERIMENTS)} [--seeds N] [--episodes N] [--out FOLDER]"
    if not arguments or arguments[0].startswith("-"):
        if not _asks_for_help(arguments):
            raise UserError(f"experiment got no name; the usage is {usage}.")
        print("\n".join([usage, "", *(f"  {name:<5} {e.purpose}" for name, e in experiment.EXPERIMENTS.items())]))
        return 0
    settings = flags.parse(experiment.named(arguments[0]).settings, f"experiment {arguments[0]}", arguments[1:])
    experiment.run(arguments[0], settings)
    return 0


def _studio(arguments: list[str]) -> int:
    usage = "psigrad studio [RUNS_FOLDER] [--port N] [--no-open]"
    if _asks_for_help(arguments):
        print(f"{usage}\n\nThe web application: a grid world to play with. It serves this machine only.")
        return 0
    from psigrad import flags

    folders, _, rest = flags.listed(arguments)
    given = flags.plain("studio", rest, {"port": 0, "open": True})
    if len(folders) > 1:
        raise UserError(f"studio got {len(folders)} folders and takes one; the usage is {usage}.")
    from psigrad.studio import serve

    serve.studio("".join(folders), port=given["port"], open_browser=given["open"])
    return 0


def _control(arguments: list[str]) -> int:
    from psigrad import flags
    from psigrad.config import ControlConfig
    from psigrad.recipes import tuned

    # the first word may be the algorithm: psigrad control ppo --env CartPole-v1
    first = {"algorithm": arguments[0]} if arguments and not arguments[0].startswith("-") and "=" not in arguments[0] else {}
    rest, command = arguments[len(first) :], "control [ALGORITHM]"
    asked = flags.parse(ControlConfig, command, rest, defaults=first)
    from psigrad.recipes import control

    known = tuned.settings_for(control.name_of(asked.algorithm), str(asked.env)) if asked.tuned else {}
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
    return _finished(control.run(flags.parse(ControlConfig, command, rest, defaults={**first, **known})))


def _tasks(arguments: list[str]) -> int:
    if _asks_for_help(arguments):
        print("psigrad tasks\n\nNames of the procedural tasks of reasoning-gym, one per line.")
        return 0
    if arguments:
        raise UserError(f"tasks got {arguments[0]!r} and takes no arguments; `psigrad tasks` lists every task.")
    from reasoning_gym.factory import DATASETS

    print("\n".join(sorted(DATASETS)))
    return 0


COMMANDS = {
    "demo": Command("train a small model from nothing by SFT and GRPO, and show what came of it", _demo),
    "sft": Command("supervised fine-tuning on completions or conversations", _sft),
    "grpo": Command("online RL: group relative policy optimisation", _online("grpo")),
    "dr_grpo": Command("online RL: GRPO without its length and difficulty biases", _online("dr_grpo")),
    "dapo": Command("online RL: clip-higher, dynamic sampling, token-level loss", _online("dapo")),
    "gspo": Command("online RL: one clipped ratio per sequence", _online("gspo")),
    "cispo": Command("online RL: truncated importance weights", _online("cispo")),
    "rloo": Command("online RL: REINFORCE with a leave-one-out baseline", _online("rloo")),
    "reinforce": Command("online RL: REINFORCE with the batch mean as baseline", _online("reinforce")),
    "reinforce_pp": Command("online RL: REINFORCE++, advantages whitened over the batch", _online("reinforce_pp")),
    "ppo": Command("online RL: proximal policy optimisation with a critic", _online("ppo", num_iterations=4, num_generations=1)),
    "ppo_penalty": Command(
        "online RL: PPO with an adaptive KL penalty in place of the clip",
        _online("ppo_penalty", num_iterations=4, num_generations=1),
    ),
    "online_dpo": Command("online preferences: the best and worst of each group as a pair", _online("online_dpo")),
    "raft": Command("online RL: cross-entropy on the best completion of each prompt", _online("raft")),
    "sample": Command("completions of a model as a dataset: all, the best of each prompt, or pairs", _sample),
    "pairs": Command("pairs out of rankings or ratings, ties left out and counted", _pairs),
    "reward": Command("a reward model from comparisons, or a process reward model from labelled steps", _reward),
    "score": Command("what a reward model says of prompts with completions", _score),
    "dpo": Command("preferences: direct preference optimisation; loss=cdpo, hinge and more", _preference("dpo")),
    "ipo": Command("preferences: a squared loss that stays finite however sure the labels are", _preference("ipo")),
    "simpo": Command("preferences: length-normalised log-probs and a margin, no reference", _preference("simpo")),
    "orpo": Command("preferences: odds ratio beside the likelihood of the chosen, no reference", _preference("orpo")),
    "kto": Command("preferences: completions that are good or bad by themselves", _preference("kto")),
    "compare": Command("several methods from one checkpoint, over seeds, with equal samples", _compare),
    "eval": Command("sample held-out prompts from a model and score them", _eval),
    "explain": Command("the formula a method optimises, term by term, or how two differ", _explain),
    "control": Command("reinforcement learning on a Gymnasium environment: PPO, A2C, REINFORCE, TRPO, DQN", _control),
    "grid": Command("a grid world solved sweep by sweep, in the terminal", _grid),
    "experiment": Command("claims about policy gradients, shown on problems whose exact answer is known", _experiment),
    "studio": Command("the web application: a grid world in the browser", _studio),
    "report": Command("draw report.html of a run again, or compare several runs", _report),
    "tasks": Command("names of the procedural tasks of reasoning-gym", _tasks),
}


def help_text() -> str:
    """What `psigrad --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "psigrad: reinforcement learning from a grid world to the post-training of language models",
            "",
            "usage: psigrad COMMAND [arguments]     psigrad COMMAND --help     psigrad --version",
            "",
            *lines,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 2 a mistake of the user, 130 stopped by Ctrl-C, 143 by SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"psigrad {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    try:
        if name not in COMMANDS:
            raise UserError(f"There is no command {name!r}; `psigrad --help` lists them{nearest(name, COMMANDS) or '.'}")
        return COMMANDS[name].run(rest)
    except KeyboardInterrupt:
        print("psigrad: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        # UserError everywhere, ValueError from objective/, whose sentences are as good; a bug of ours must show its traceback
        if os.environ.get("PSIGRAD_TRACEBACK") or not _meant_for_people(error):
            raise
        print(f"psigrad: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)


def _asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether -h or --help is among the arguments."""
    return "-h" in arguments or "--help" in arguments


def _meant_for_people(error: ValueError) -> bool:
    """Whether the error was raised by a check of ours and not by a library deep below."""
    if isinstance(error, UserError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(
        ("psigrad.objective", "psigrad.rollout.types")
    )


def _finished(result: object) -> int:
    from psigrad.report import terminal

    terminal.finished(result)
    return 0
