"""The commands of this package. Each parses its arguments, calls one public function and prints."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psigrad import extras, redaction
from psigrad.cli import flags
from psigrad.config import LmEvalConfig, OnlineConfig, SampleConfig
from psigrad.config.fields import flag_of
from psigrad.config.methods import declaration
from psigrad.errors import UserError
from psigrad.paths import check_output
from psigrad_extras import help_texts
from psigrad_extras.preflight.settings import CHECK, PlanConfig, for_check


def check(arguments: list[str]) -> int:
    """Print checks of a model, its data and its settings before training. Return exit status 1 if a check fails."""
    rest = [argument for argument in arguments if argument != "--json"]
    name = rest.pop(0) if rest and not rest[0].startswith("-") and "=" not in rest[0] else ""
    usage, method = f"check {name or '[METHOD]'} --model PATH --dataset DATASET [--json]", declaration(name or "grpo")
    asked: Any = flags.parse(method.settings, usage, rest, method.defaults if name else None, CHECK)
    config, form = for_check(asked, name)
    from psigrad.records.report import terminal
    from psigrad_extras.preflight import check, first_rows

    rows, as_json = first_rows.read_first_rows(config, form), "--json" in arguments
    tried = [*first_rows.try_rewards(config), *first_rows.try_turns(config)]
    if not as_json:
        terminal.print_lines([*first_rows.lines(rows), *tried])
    checks = check.run(config, _told, samples=form in ("", "prompt-only") or bool(config.reward))
    _told("")
    print(redaction.escape(check.report(checks, as_json=as_json, rows=rows)))
    return 0 if check.all_pass(checks) else 1


def defaults(arguments: list[str]) -> int:
    """Print the defaults that differ from those of TRL and Stable-Baselines3."""
    from psigrad_extras.defaults import table

    print(table())
    return 0


def _told(name: str) -> None:
    """Print the name of the running check on the last line of a terminal. An empty name clears the line."""
    if sys.stderr.isatty():
        print("\r\x1b[K" + (name and f"checking {name} …"), end="", file=sys.stderr, flush=True)


def plan(arguments: list[str]) -> int:
    """Print the memory, batch arithmetic and speed of a run."""
    config, asked = _parse_plan(arguments)
    from psigrad_extras.preflight.plan import plan as command

    print(redaction.escape(command.run(config, asked)))
    return 0


def compare(arguments: list[str]) -> int:
    """Train with several methods and draw the comparison."""
    methods, given, rest = flags.parse_lists(arguments, "--seeds", "--pairs")
    usage = "compare METHOD ... --model PATH --dataset DATASET [--seeds 0 1 2] [--pairs FILE]"
    about = "Compare methods, from the same model and with the same number of samples. --pairs: pairs for preference methods."
    config = flags.parse(OnlineConfig, usage, rest, {"algorithm": methods[0]} if methods else {}, about)
    from psigrad.records.report import terminal
    from psigrad_extras.investigate import compare as compare_page
    from psigrad_extras.investigate import comparison as compare

    seeds = tuple(flags.parse_number("--seeds", value, int) for value in given["--seeds"]) or (0, 1, 2)
    page = compare.run(compare.Comparison(tuple(methods), config, seeds, "".join(given["--pairs"][:1])))
    terminal.print_table(*compare_page.rows(compare_page.read(page.parent)))
    print(f"report  {page}")
    return 0


def lm_eval(arguments: list[str]) -> int:
    """Print the results of lm-eval's tasks for a model, and for its baseline if there is one."""
    config = flags.parse(LmEvalConfig, "lm-eval --model MODEL --tasks TASK ...", arguments)
    with extras.needing("lm-eval", "lm-eval"):
        from psigrad_extras.connect import lm_eval as harness
    _print_tasks(harness.run(config).metrics)
    return 0


def _print_tasks(metrics: Sequence[Any]) -> None:
    """Print the metrics of tasks with 95 % intervals: the model's and, if there is a baseline, its metrics and the difference."""
    from psigrad.records.report import terminal

    columns = ["model", *(["baseline", "difference"] if any(one.baseline is not None for one in metrics) else [])]
    cells = [[one.task, one.metric, str(one.documents), *(_span(getattr(one, name)) for name in columns)] for one in metrics]
    terminal.print_table(["task", "metric", "documents", *columns], cells)


def _span(figure: tuple[float, float, float] | None) -> str:
    if figure is None:
        return ""
    from psigrad.records.read import show_interval

    return show_interval(*figure)


def _parse_plan(arguments: Sequence[str]) -> tuple[Any, PlanConfig]:
    """Return (settings of the method that the first argument names, settings of the plan). Print help and exit on --help."""
    name = next((text for text in arguments[:1] if not text.startswith("-")), "")
    if not name and flags.asks_for_help(arguments):
        print("usage: psigrad plan METHOD --model PATH [flags] [METHOD's settings]\n")
        print("Predict the peak memory, batch sizes and speed of a run, without loading the model's weights.\n")
        flags.parse_known(PlanConfig, "plan", arguments)
        raise SystemExit(0)
    if not name:
        raise UserError("plan got no method; the usage is psigrad plan METHOD --model PATH [flags] [METHOD's settings].")
    method = declaration(name)
    asked, rest = flags.parse_known(PlanConfig, f"plan {name}", arguments[1:])
    rest = [part for given in rest for part in (given.split("=", 1) if given.startswith("--device=") else [given])]
    for place, (flag, value) in enumerate(itertools.pairwise(rest)):
        if flag == "--device" and re.fullmatch(r"[a-z]+\d.*", value.lower()):  # the name of a GPU, not cpu, auto or cuda:0
            asked, rest[place + 1] = replace(asked, gpu=value), "cuda"
    return flags.parse(method.settings, f"plan {name} --model PATH", rest, defaults=method.defaults), asked


def replay(arguments: list[str]) -> int:
    """Recompute a step of a run. Return exit status 1 if it differs from the recorded one."""
    given = flags.parse_plain("replay RUN --step N", arguments, {"step": 0, "method": (), "output": ""}, help_texts.REPLAY)
    if not given["step"]:
        raise UserError("replay got no --step; give the number of a step of the run, from 1.")
    from psigrad.config.nested import read_value
    from psigrad.records.read import show_number
    from psigrad.records.report import terminal
    from psigrad_extras.investigate import replay, replay_page

    if output := given["output"]:
        replay_page.check(output)
    found = replay.replay(given["names"][0], given["step"], [read_value(text) for text in given["method"]])
    print(redaction.escape("\n".join(replay.lines_of(found))))
    figures = dict.fromkeys(name for own in found.methods.values() for name in own)
    cells = [[name, *(show_number(own.get(name)) for own in found.methods.values())] for name in figures]
    terminal.print_table(["", *found.methods], cells)
    print(f"page: {replay_page.write(found, output)}")
    return 1 if found.differences else 0


def referee(arguments: list[str]) -> int:
    """Print the first tensor in which two implementations of training differ. Return exit status 1 if they differ."""
    known = {"trl": "", "python": sys.executable, "steps": 2, "tolerance": 0.0}
    given = flags.parse_plain("referee [SETTINGS.yaml] [OTHER.yaml]", arguments, known, help_texts.REFEREE)
    paths, steps, tolerance = given["names"], given["steps"], given["tolerance"]
    if len(paths) not in ((0, 1) if given["trl"] else (2,)):
        raise UserError("referee takes --trl with a script and at most one settings file, or two settings files without --trl.")
    if steps < 1 or tolerance < 0:
        raise UserError(f"--steps is {steps} and --tolerance {tolerance:g}; expected at least 1 step, and no negative tolerance.")
    from psigrad_extras.referee import referee

    parts, lines = referee.run(paths, given["trl"], given["python"], steps, tolerance)
    print(redaction.escape("\n".join(lines)))
    return int(parts)


def export(arguments: list[str]) -> int:
    """Write a model in a format for other programs."""
    return _export("export RUN_OR_MODEL --to FORMAT", arguments, {"to": "", "quantization": "f16"}, help_texts.EXPORT)


def merge(arguments: list[str]) -> int:
    """Write a model in the format of transformers, with its adapter merged."""
    return _export("merge RUN_OR_MODEL", arguments, {}, help_texts.MERGE)


def _export(usage: str, arguments: list[str], own: dict[str, str], about: str) -> int:
    given = flags.parse_plain(usage, arguments, {**own, "output": "", "trust_remote_code": False}, about)
    from psigrad_extras.connect import exporting as recipe

    (source,) = given.pop("names")
    made = recipe.run(source, **{"to": "merged"} | given)
    is_gguf = made.path.is_file()
    size = f": {made.path.stat().st_size / 1e6:,.0f} MB, error {made.error:.2g} of the weights' norm" if is_gguf else ""
    print(f"{made.path}{size}")
    if made.base:
        print(f"the adapter is merged into its base model, whose weights are rounded to {made.base} as in training")
    if is_gguf:
        print(f"ollama create NAME -f {made.path.parent / 'Modelfile'}    or    llama-server -m {made.path} --jinja")
    return 0


def sweep(arguments: list[str]) -> int:
    """Search over settings."""
    usage = "sweep METHOD --search NAME:LOW..HIGH[:log] NAME:A,B,C … [METHOD's settings]"
    if flags.asks_for_help(arguments):
        known = {"search": (), "trials": 20, "seeds": (), "metric": "", "direction": "", "output_dir": "runs/sweep"}
        flags.parse_plain(usage, arguments, known, help_texts.SWEEP)
    single = ("--trials", "--metric", "--direction", "--output-dir")
    names, listed, rest = flags.parse_lists(arguments, "--search", "--seeds", *single)
    given = {flag: " ".join(listed[flag]) for flag in single}
    if not names or not listed["--search"]:
        raise UserError(f"sweep got {'no method' if not names else 'no --search'}; the usage is psigrad {usage}.")
    if given["--direction"] not in ("", "maximize", "minimize"):
        raise UserError(f"--direction is {given['--direction']!r}; expected maximize or minimize.")
    from psigrad.records.read import interval, show_number
    from psigrad.records.report import terminal
    from psigrad_extras.investigate import search

    study = search.run(
        (*names, *rest),
        dict(map(search.space_of, listed["--search"])),
        Path(given["--output-dir"] or "runs/sweep"),
        trials=flags.parse_number("--trials", given["--trials"] or "20", int),
        seeds=sorted({flags.parse_number("--seeds", text, int) for text in listed["--seeds"] or ["0"]}),
        metric=given["--metric"],
        direction=given["--direction"],
    )
    done = [trial for trial in study.trials if trial.value is not None]
    columns = list(done[0].params)
    spans = [(t, interval(dict(zip(("low", "high"), t.user_attrs["interval"], strict=True)))) for t in done]
    cells = [[f"{t.number}", *(f"{t.params[n]}" for n in columns), show_number(t.value), span] for t, span in spans]
    terminal.print_table(["trial", *columns, "mean", "95 % over seeds"], cells)
    print(f"best    {' '.join(f'{name}={value}' for name, value in study.best_params.items())}: {study.best_value:.4g}")
    return 0


def sample(arguments: list[str]) -> int:
    """Sample completions of a model and write them as a dataset."""
    config = flags.parse(SampleConfig, "sample --model PATH --dataset DATASET --output FILE", arguments)
    from psigrad_extras.datasets import sample

    written = sample.run(config)
    ties = [f"{written.ties} prompts whose rewards are all equal"] if written.ties else []
    empty = [f"{written.empty} empty completion{'s' * (written.empty > 1)}"] if written.empty else []
    left_out = f" ({' and '.join([*ties, *empty])} left out)" if ties or empty else ""
    print(f"{written.rows} rows: {written.path}{left_out}")
    if written.unscored:
        redaction.say(written.unscored)
    return 0


def pairs(arguments: list[str]) -> int:
    """Convert rankings or ratings to preference pairs and write them."""
    known = {"dataset": "", "output": "", "columns": "", "scale": 10, "tie": 0.0}
    given = flags.parse_plain("pairs --dataset FILE --output FILE", arguments, known, help_texts.PAIRS)
    from psigrad_extras.datasets import sample

    written, converted = sample.convert(**given)
    print(f"{written.rows} pairs: {written.path} ({converted.ties} ties and {converted.alone} prompts without a pair left out)")
    return 0


def grid(arguments: list[str]) -> int:
    """Solve a grid world in the terminal."""
    from psigrad_extras.grid import GridSettings, run

    run(flags.parse(GridSettings, "grid", arguments))
    return 0


def push(arguments: list[str]) -> int:
    """Upload a finished run's model."""
    given = flags.parse_plain("push RUN REPO", arguments, {"private": False, "revision": ""}, help_texts.PUSH)
    from psigrad_extras.connect import hub

    print(hub.push(*given.pop("names"), **given))
    return 0


def doctor(arguments: list[str]) -> int:
    """Print which features for training this machine has, and which are missing."""
    about = "List what this machine offers for training and what is missing.\n--json: print the list as JSON"
    given = flags.parse_plain("doctor", arguments, {"json": False}, about)
    from psigrad_extras.preflight import doctor

    print(doctor.report(as_json=given["json"]))
    return 0


def experiment(arguments: list[str]) -> int:
    """Run an experiment."""
    from psigrad_extras import experiments

    usage = f"psigrad experiment {'|'.join(experiments.EXPERIMENTS)} [--seeds N] [--episodes N] [--out FOLDER]"
    if not arguments or arguments[0].startswith("-"):
        if not flags.asks_for_help(arguments):
            raise UserError(f"experiment got no name; the usage is {usage}.")
        print(f"{usage}\n\nRun an experiment and write its figures. `psigrad experiment NAME --help` explains its flags.")
        for title, few in experiments.groups().items():
            print(f"\n{title}:\n\n" + "\n".join(f"  {one.name:<16}  {one.purpose}" for one in few))
        return 0
    settings = flags.parse(experiments.find(arguments[0]).settings, f"experiment {arguments[0]}", arguments[1:])
    experiments.run(arguments[0], settings)
    return 0


def from_trl(arguments: list[str]) -> int:
    """Print the settings that are equivalent to a script of TRL or a file of its command line, and the differences."""
    given = flags.parse_plain("from-trl SCRIPT.py|CONFIG.yaml", arguments, {"trainer": "", "output": ""}, help_texts.FROM_TRL)
    check_output(output := given["output"])
    from psigrad_extras.connect.trl_scripts import convert_file

    made = convert_file(given["names"][0], given["trainer"])
    kinds = {"differs": made.differs, "no equivalent in psigrad": made.no_equal,
             "check yourself": made.look_at, "not needed in psigrad": made.nothing}  # fmt: skip
    notes = [line for title, lines in kinds.items() if lines for line in ("#", f"# {title}:", *(f"#   {line}" for line in lines))]
    if output:
        Path(output).write_text(made.yaml())
        print(f"# psigrad {made.method} --config {output}")
    else:
        print(made.yaml() + f"\n# as a command:\n# {_command(made.method, made.settings)}")
    print("\n".join(notes))
    return 0


def _command(method: str, settings: dict[str, Any]) -> str:
    """Return the command line of psigrad for a method with these settings."""
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


def demo(arguments: list[str]) -> int:
    """Run the demo."""
    vision = "--vision" in arguments
    steps = {"sft_steps": 1000, "rl_steps": 250} if vision else {"sft_steps": 800, "rl_steps": 500}
    known = {"output_dir": "runs/demo-vision" if vision else "runs/demo", "seed": 0, **steps, "progress": True, "vision": False}
    settings = flags.parse_plain("demo", arguments, known, help_texts.DEMO)
    del settings["vision"]
    if settings["progress"]:
        # printed before torch is imported, which takes seconds
        print(help_texts.VISION_STARTS if vision else help_texts.DEMO_STARTS, flush=True)
    from psigrad.records.report import terminal
    from psigrad_extras import demo, demo_vision

    terminal.print_result((demo_vision if vision else demo).run(**settings))
    return 0
