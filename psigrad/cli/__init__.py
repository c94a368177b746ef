"""The commands. Each parses, calls one public function and prints; nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from psigrad import __version__
from psigrad.cli import language, worlds
from psigrad.errors import UserError, nearest


class Command(NamedTuple):
    """What a command does, in a line, and the function that does it: arguments -> exit status."""

    purpose: str
    run: Callable[[list[str]], int]


COMMANDS = {
    "demo": Command("train a small model from nothing by SFT and GRPO, and show what came of it", language.demo),
    "sft": Command("supervised fine-tuning on completions or conversations", language.train("sft")),
    "grpo": Command("online RL: group relative policy optimisation", language.train("grpo")),
    "dr_grpo": Command("online RL: GRPO without its length and difficulty biases", language.train("dr_grpo")),
    "dapo": Command("online RL: clip-higher, dynamic sampling, token-level loss", language.train("dapo")),
    "gspo": Command("online RL: one clipped ratio per sequence", language.train("gspo")),
    "cispo": Command("online RL: truncated importance weights", language.train("cispo")),
    "rloo": Command("online RL: REINFORCE with a leave-one-out baseline", language.train("rloo")),
    "reinforce": Command("online RL: REINFORCE with the batch mean as baseline", language.train("reinforce")),
    "reinforce_pp": Command("online RL: REINFORCE++, advantages whitened over the batch", language.train("reinforce_pp")),
    "ppo": Command("online RL: proximal policy optimisation with a critic", language.train("ppo")),
    "ppo_penalty": Command(
        "online RL: PPO with an adaptive KL penalty in place of the clip",
        language.train("ppo_penalty"),
    ),
    "online_dpo": Command("online preferences: the best and worst of each group as a pair", language.train("online_dpo")),
    "raft": Command("online RL: cross-entropy on the best completion of each prompt", language.train("raft")),
    "sample": Command("completions of a model as a dataset: all, the best of each prompt, or pairs", language.sample),
    "pairs": Command("pairs out of rankings or ratings, ties left out and counted", language.pairs),
    "reward": Command("a reward model from comparisons, or a process reward model from labelled steps", language.train("reward")),
    "score": Command("what a reward model says of prompts with completions", language.score),
    "dpo": Command("preferences: direct preference optimisation; loss=cdpo, hinge and more", language.train("dpo")),
    "ipo": Command("preferences: a squared loss that stays finite however sure the labels are", language.train("ipo")),
    "simpo": Command("preferences: length-normalised log-probs and a margin, no reference", language.train("simpo")),
    "orpo": Command("preferences: odds ratio beside the likelihood of the chosen, no reference", language.train("orpo")),
    "kto": Command("preferences: completions that are good or bad by themselves", language.train("kto")),
    "compare": Command("several methods from one checkpoint, over seeds, with equal samples", language.compare),
    "plan": Command("peak memory, batch arithmetic and speed of a run before it starts", language.plan),
    "bench": Command("training steps of a model, timed by phase, beside TRL where it is installed", language.bench),
    "eval": Command("sample held-out prompts from a model and score them", language.evaluate),
    "explain": Command("the formula a method optimises, term by term, or how two differ", worlds.explain),
    "control": Command("reinforcement learning on a Gymnasium environment: PPO, A2C, REINFORCE, TRPO, DQN", worlds.control),
    "grid": Command("a grid world solved sweep by sweep, in the terminal", worlds.grid),
    "experiment": Command("claims about policy gradients, shown on problems whose exact answer is known", worlds.experiment),
    "studio": Command("the web application: grid world, runs, labelling desk, chat", worlds.studio),
    "report": Command("draw report.html of a run again, or compare several runs", worlds.report),
    "tasks": Command("names of the procedural tasks of reasoning-gym", worlds.tasks),
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
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # a reader who has left is noticed here, not when Python ends
        return status
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


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"psigrad {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise UserError(f"There is no command {name!r}; `psigrad --help` lists them{nearest(name, COMMANDS) or '.'}")
    return COMMANDS[name].run(rest)


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
