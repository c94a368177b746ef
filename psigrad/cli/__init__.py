"""The commands. Each parses its arguments, calls a public function and prints. Slow imports are delayed until they are needed."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from psigrad import __version__, extras
from psigrad.cli import begin, mathematics
from psigrad.cli import language_models as language
from psigrad.cli.flags import Command
from psigrad.config import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.methods import list_declarations
from psigrad.errors import UserError, nearest
from psigrad.runs.progress import ignore_closed_output


def _training(settings: type[Any]) -> dict[str, Command]:
    return {name: Command(m.summary, language.train(name)) for name, m in list_declarations().items() if m.settings is settings}


# The commands of the optional packages, by name, and the command of the plug-in for control.
_extra, _serve, _studio = (partial(extras.command, package) for package in ("psigrad_extras", "psigrad_serve", "psigrad_studio"))
_control = extras.command("control", "control")

GROUPS = {
    "get started": {
        "init": Command("write a new project with tests, for a verifiable reward, preferences, tools or control", begin.init),
        "demo": Command("train a small model from scratch by SFT and GRPO, and show the result", _extra("demo")),
        "doctor": Command("list which features for training this machine has, and which are missing", _extra("doctor")),
        "from-trl": Command(
            "convert a TRL script or YAML file to psigrad's settings, and list the differences", _extra("from_trl")
        ),
        "check": Command("check a model, its data and its settings before training", _extra("check")),
    },
    "train on completions that the model samples (online RL)": _training(OnlineConfig),
    "train on recorded comparisons (preferences)": _training(PreferenceConfig),
    "train on examples, and reward models": {
        **_training(SFTConfig),
        **_training(RewardConfig),
        "score": Command("score recorded completions by reward functions or a reward model", language.score),
    },
    "make data, measure, plan": {
        "sample": Command("sample completions and write a dataset: all of them, the best per prompt, or pairs", _extra("sample")),
        "pairs": Command("convert rankings or ratings to pairs; ties are dropped and counted", _extra("pairs")),
        "tasks": Command("list the procedural tasks of reasoning-gym", language.tasks),
        "eval": Command("sample a model's completions of held-out prompts and score them", language.evaluate),
        "lm-eval": Command("run tasks of EleutherAI's lm-eval, and show which ones training has made worse", _extra("lm_eval")),
        "judge-report": Command("measure how often an LLM judge agrees with people, and its biases", _studio("judge_report")),
        "plan": Command("estimate the peak memory, batches and speed of a run before it starts", _extra("plan")),
        "compare": Command("compare methods over seeds, with the same model and number of samples", _extra("compare")),
        "sweep": Command("search for the best settings of a method with Optuna, over several seeds", _extra("sweep")),
        "replay": Command("recompute a step of an online run exactly, or with other methods", _extra("replay")),
        "referee": Command("find the first tensor that differs: TRL against psigrad, or two settings files", _extra("referee")),
        "report": Command("redraw the report.html of a run, or compare several runs", language.report),
        "export": Command("export a model as GGUF (for Ollama), with the adapter merged, or the adapter alone", _extra("export")),
        "merge": Command("merge an adapter into its model, as export --to merged does", _extra("merge")),
        "push": Command("upload a finished run's model with its model card to the Hugging Face hub", _extra("push")),
        "studio": Command("start the web application: grid world, runs, labelling, chat", _studio("studio")),
    },
    "use a model": {
        "serve": Command("serve a model or a run with an API like OpenAI's and Anthropic's", _serve("serve")),
        "chat": Command("chat with a model or a run in the terminal", _serve("chat")),
    },
    "small problems and formulas": {
        "explain": Command("print a method's formula, how two methods differ, or what a warning means", mathematics.explain),
        "grid": Command("solve a grid world in the terminal, one sweep at a time", _extra("grid")),
        "control": Command("train an agent on a Gymnasium environment: PPO, A2C, REINFORCE, TRPO, DQN", _control),
        "experiment": Command("test claims about policy gradients on problems whose exact answer is known", _extra("experiment")),
    },
}
COMMANDS: dict[str, Command] = {name: command for group in GROUPS.values() for name, command in group.items()}


# The commands of `psigrad --help`; `psigrad --all` lists the others too.
_COMMON = {
    "commands": "demo init check plan eval chat serve studio",
    "methods": "sft grpo dr_grpo dapo rloo ppo distill dpo kto simpo orpo reward",
}


def help_text(every: bool = False) -> str:
    """Return the text of `psigrad --help`. It lists the most used commands, or all of them if `every` is True."""
    groups = {title: list(group) for title, group in GROUPS.items()} if every else {t: n.split() for t, n in _COMMON.items()}
    width = max(len(name) for names in groups.values() for name in names)
    lines = [
        "psigrad: reinforcement learning from a grid world to the post-training of language models",
        "",
        "usage: psigrad COMMAND [arguments]     psigrad COMMAND --help     psigrad --version",
    ]
    for title, names in groups.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {COMMANDS[name].purpose}" for name in names)]
    return "\n".join(lines if every else [*lines, "", f"psigrad --all lists all {len(COMMANDS)} commands and methods."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 for success, 2 for a mistake in the command; docs/runs.md lists the others."""
    with ignore_closed_output():  # a reader such as `head` may close the pipe: the work still runs to its end and sets the status
        return _status_of(list(sys.argv[1:] if argv is None else argv))


def _status_of(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("psigrad: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or os.environ.get("PSIGRAD_TRACEBACK"):
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        print(
            f"psigrad: {error.strerror}: this process may open {most} files; raise the limit (ulimit -n 1024).", file=sys.stderr
        )
        return 2
    except ValueError as error:
        # UserError comes from anywhere, ValueError only from objective/, whose messages are also for users. A bug in psigrad must
        # show its traceback.
        if os.environ.get("PSIGRAD_TRACEBACK") or not _is_user_message(error):
            raise
        from psigrad import redaction

        redaction.say(str(error))
        return getattr(error, "exit_status", 2)
    except ModuleNotFoundError as error:
        if os.environ.get("PSIGRAD_TRACEBACK") or not (extra := extras.find_extra(error.name or "")):
            raise
        print(f"psigrad: {extras.not_installed('This command', error, extra)}", file=sys.stderr)
        return 2
    finally:
        sys.stdout.flush()  # detects a closed pipe here, not when Python exits


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help", "--all"):
        print(help_text("--all" in arguments))
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"psigrad {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        word = name.lower().replace("_", "-")
        if said := next((said for words, said in _PEERS.items() if word in words.split()), ""):
            raise UserError(f"There is no command {name!r}: {said}.")
        raise UserError(f"There is no command {name!r}; `psigrad --all` lists all commands{nearest(name, COMMANDS) or '.'}")
    return COMMANDS[name].run(rest)


# Commands of other libraries (TRL, axolotl, LLaMA-Factory, unsloth, lm-eval) -> the command to use in psigrad.
_PEERS = {
    "train learn fit run rl rlhf": "use `psigrad grpo` with a reward, `psigrad sft` on examples or `psigrad dpo` on comparisons",
    "finetune fine-tune tune lora qlora pretrain": "use `psigrad sft` to train on examples; `--lora-rank 16` trains an adapter",
    "generate infer inference predict complete rollout": "use `psigrad sample` for a dataset, or `psigrad chat` to talk",
    "evaluate evaluation test validate": "use `psigrad eval` with a reward, or `psigrad lm-eval` for public benchmarks",
    "rm reward-model reward-modeling": "use `psigrad reward` to train a reward model",
    "convert quantize save": "use `psigrad export`",
    "webui ui gui web dashboard board app": "use `psigrad studio`",
    "api deploy server": "use `psigrad serve`",
    "preprocess validate-data dataset": "use `psigrad check` to see how the model reads your rows",
    "env info": "use `psigrad doctor` to list what this machine offers and the installed versions",
    "vllm-serve": "add `--sampler vllm` to a run, which starts vLLM itself, or to `psigrad serve MODEL`",
}


def _is_user_message(error: ValueError) -> bool:
    """Return True if psigrad raised the error and its message is for users; False if it comes from another library."""
    if isinstance(error, UserError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(
        ("psigrad.objective", "psigrad.language.rollout.types")
    )
