"""Commands that explain and draw, solve grid worlds, play control environments and serve the studio."""

from __future__ import annotations

from psigrad.cli.common import asks_for_help, finished
from psigrad.errors import UserError


def explain(arguments: list[str]) -> int:
    """Print a formula."""
    usage = "psigrad explain NAME [algorithm.part=value ...] [OTHER [algorithm.part=value ...]]"
    if asks_for_help(arguments):
        print(f"{usage}\n\nThe formula that NAME optimises, part by part, or how OTHER differs from it.")
        print("Changes stand behind the name that they change: psigrad explain grpo algorithm.kl=null")
        return 0
    from psigrad.config.nested import put, read_value

    methods: list[dict[str, object]] = []
    for text in arguments:
        name, sign, value = text.partition("=")
        if sign and methods:
            name = name.removeprefix("algorithm.").removeprefix("loss.")
            put(methods[-1], name, read_value(value), f"override {text!r}")
        else:
            methods.append({"preset": text})
    if not 1 <= len(methods) <= 2:
        raise UserError(f"explain got {len(methods)} names and takes one or two; the usage is {usage}.")
    from psigrad.config import algorithms

    print(algorithms.explain(methods[0], *methods[1:]))
    if len(methods) == 1 and len(methods[0]) > 1:
        print(f"What differs from {methods[0]['preset']}:\n")
        print(algorithms.explain({"preset": methods[0]["preset"]}, methods[0]))
    return 0


def doctor(arguments: list[str]) -> int:
    """Print what the machine offers."""
    if asks_for_help(arguments):
        print("psigrad doctor [--json]\n\nWhat this machine offers for training, and what is missing, one line each.")
        return 0
    from psigrad.cli import flags

    given = flags.plain("doctor", arguments, {"json": False})
    from psigrad.preflight import doctor

    print(doctor.report(as_json=given["json"]))
    return 0


def report(arguments: list[str]) -> int:
    """Draw a report."""
    usage = "psigrad report RUN [RUN ...] [--output FILE]"
    if asks_for_help(arguments):
        print(f"{usage}\n\nDraw the report of a run folder again, or of several compared.")
        return 0
    from psigrad.cli import flags

    folders, output = flags.names_and_output("report", arguments)
    if not folders:
        raise UserError(f"report got no run folder; the usage is {usage}.")
    from psigrad.records import report

    print(f"report: {report.write(folders, output)}")
    return 0


def tasks(arguments: list[str]) -> int:
    """Print the names of reasoning-gym's tasks."""
    if asks_for_help(arguments):
        print("psigrad tasks\n\nNames of the procedural tasks of reasoning-gym, one per line.")
        return 0
    if arguments:
        raise UserError(f"tasks got {arguments[0]!r} and takes no arguments; `psigrad tasks` lists every task.")
    from reasoning_gym.factory import DATASETS

    print("\n".join(sorted(DATASETS)))
    return 0


def grid(arguments: list[str]) -> int:
    """Solve a grid world in the terminal."""
    from psigrad.cli import flags, grid

    grid.run(flags.parse(grid.GridSettings, "grid", arguments))
    return 0


def experiment(arguments: list[str]) -> int:
    """Run an experiment."""
    from psigrad.cli import flags
    from psigrad.experiments import declarations as experiment

    usage = f"psigrad experiment {'|'.join(experiment.EXPERIMENTS)} [--seeds N] [--episodes N] [--out FOLDER]"
    if not arguments or arguments[0].startswith("-"):
        if not asks_for_help(arguments):
            raise UserError(f"experiment got no name; the usage is {usage}.")
        print(usage)
        for title, few in experiment.groups().items():
            print(f"\n{title}:\n\n" + "\n".join(f"  {one.name:<16}  {one.purpose}" for one in few))
        return 0
    settings = flags.parse(experiment.find(arguments[0]).settings, f"experiment {arguments[0]}", arguments[1:])
    experiment.run(arguments[0], settings)
    return 0


def studio(arguments: list[str]) -> int:
    """Serve the studio."""
    usage = (
        "psigrad studio [RUNS_FOLDER] [--checkpoint FOLDER ...] [--model-memory GB] [--database URL] [--allow-host NAME ...]"
        " [--port N] [--no-open]\n"
        "psigrad studio [RUNS_FOLDER] [--database FILE] --backup FILE | --restore FILE"
    )
    if asks_for_help(arguments):
        print(f"{usage}\n\nThe web application: grid world, runs, labelling desk, chat. It binds this machine only.")
        print("--backup copies the labels to a new file, also while a studio runs; --restore puts such a file in their place.")
        return 0
    from psigrad.cli import flags

    folders, listed, rest = flags.listed(arguments, "--checkpoint", "--allow-host")
    given = flags.plain(
        "studio", rest, {"port": 0, "open": True, "model_memory": 8.0, "database": "", "backup": "", "restore": ""}
    )
    if len(folders) > 1:
        raise UserError(f"studio got {len(folders)} folders and takes one; the usage is {usage}.")
    from psigrad_studio import serve

    if given["backup"] or given["restore"]:
        print(serve.copied("".join(folders), given["database"], given["backup"], given["restore"]))
        return 0
    chat = {"checkpoints": listed["--checkpoint"], "model_memory": given["model_memory"]}
    labels = {"database": given["database"], "allow_host": listed["--allow-host"]}
    serve.studio("".join(folders), port=given["port"], open_browser=given["open"], **chat, **labels)
    return 0


def control(arguments: list[str]) -> int:
    """Train on a Gymnasium environment."""
    from psigrad.cli import flags
    from psigrad.control.settings import ControlConfig

    # the first word may be the algorithm: psigrad control ppo --env CartPole-v1
    first = {"algorithm": arguments[0]} if arguments and not arguments[0].startswith("-") and "=" not in arguments[0] else {}
    rest, command = arguments[len(first) :], "control [ALGORITHM]"
    asked = flags.parse(ControlConfig, command, rest, defaults=first)
    from psigrad.control import builder, hyperparameters, run

    known = hyperparameters.settings_for(builder.name_of(asked.algorithm), str(asked.env)) if asked.tuned else {}
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
    return finished(run.run(flags.parse(ControlConfig, command, rest, defaults={**first, **known})))
