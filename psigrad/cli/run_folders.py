"""Commands on run folders, and on the votes of people: replay, report, upload, the studio."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from psigrad.cli import flags
from psigrad.errors import UserError


def report(arguments: list[str]) -> int:
    """Draw a report."""
    usage = "psigrad report RUN [RUN ...] [--output FILE]"
    if flags.asks_for_help(arguments):
        print(f"{usage}\n\nDraw the report of a run folder again, or of several compared.")
        return 0
    folders, output = flags.names_and_output("report", arguments)
    if not folders:
        raise UserError(f"report got no run folder; the usage is {usage}.")
    from psigrad.records import report

    print(f"report: {report.write(folders, output)}")
    return 0


_REPLAY = "psigrad replay RUN --step N [--method NAME|MAPPING ...] [--output FILE]"


def replay(arguments: list[str]) -> int:
    """Recompute a step of a run; exit status 1 where it is not the recorded one."""
    if flags.asks_for_help(arguments):
        print(f"{_REPLAY}\n\nRecompute a step of an online run from the nearest checkpoint before it and the run's rows, and say")
        print("what is not as it is recorded. With --method also what other methods would have done with the same completions:")
        print("dapo, rloo, …, or a variant such as '{preset: grpo, kl: null}'. The page with every token goes to RUN/replays/.")
        return 0
    names, listed, rest = flags.parse_lists(arguments, "--step", "--method", "--output")
    if len(names) != 1 or rest or len(listed["--step"]) != 1 or len(listed["--output"]) > 1:
        raise UserError(f"replay takes one run folder and one step; the usage is {_REPLAY}.")
    from psigrad.config.nested import read_value
    from psigrad.language.recipes import replay
    from psigrad.records.report import replay_page, terminal

    number, methods = flags.whole_number("--step", listed["--step"][0]), [read_value(text) for text in listed["--method"]]
    found = replay.replay(names[0], number, methods)
    print("\n".join(replay.lines_of(found)))
    terminal.print_columns(found.methods)
    print(f"page: {replay_page.write(found, ''.join(listed['--output']))}")
    return 1 if found.differences else 0


def export(arguments: list[str]) -> int:
    """Write a model as others use it."""
    usage = "psigrad export RUN_OR_MODEL --to gguf|merged|adapter [--output FOLDER] [--quantization f16]"
    if flags.asks_for_help(arguments):
        print(f"{usage}\n\nThe model of a run, a folder, a hub name or a GGUF file, in a folder of its own:\n")
        print("  gguf     one file for llama.cpp, with its chat template and a Modelfile for Ollama; --quantization is f32, f16,")
        print(
            "           bf16, q8_0, q5_1, q5_0, q4_1 or q4_0\n  merged   the whole model, an adapter merged in, for transformers"
        )
        print("  adapter  the adapter alone, for peft")
        return 0
    names, _, rest = flags.parse_lists(arguments)
    given = flags.plain("export", rest, {"to": "", "output": "", "quantization": "f16", "trust_remote_code": False})
    if len(names) != 1:
        raise UserError(f"export got {' '.join(names) or 'nothing'} and takes one run folder or model; the usage is {usage}.")
    from psigrad.language.recipes import exporting as recipe

    made = recipe.run(names[0], given.pop("to"), given.pop("output"), given.pop("quantization"), **given)
    off = (
        f": {made.path.stat().st_size / 1e6:,.0f} MB, off by {made.error:.2g} of the weights' norm" if made.path.is_file() else ""
    )
    print(f"{made.path}{off}")
    if off:
        print(f"ollama create NAME -f {made.path.parent / 'Modelfile'}    or    llama-server -m {made.path} --jinja")
    return 0


def merge(arguments: list[str]) -> int:
    """`export --to merged`."""
    if "--to" in arguments:
        raise UserError("merge writes the merged model; `psigrad export` takes --to.")
    return export(arguments if flags.asks_for_help(arguments) else [*arguments, "--to", "merged"])


def sweep(arguments: list[str]) -> int:
    """Search over settings."""
    usage = (
        "psigrad sweep METHOD --search NAME:LOW..HIGH[:log] NAME:A,B,C … [--trials 20] [--seeds 0 1 2] [--metric NAME] "
        "[--direction maximize|minimize] [--search-by tpe|random] [--output-dir FOLDER] [METHOD's settings]"
    )
    if flags.asks_for_help(arguments):
        print(f"{usage}\n\nTrials over any settings, chosen by Optuna, each trained over the seeds and judged by its held-out")
        print("figure. The same command goes on where it was stopped. METHOD is one of `psigrad --help`, or: control ppo.")
        return 0
    single = ("--trials", "--metric", "--direction", "--search-by", "--output-dir")
    names, listed, rest = flags.parse_lists(arguments, "--search", "--seeds", *single)
    given = {flag: listed[flag][0] if len(listed[flag]) == 1 else "" for flag in single}
    if wrong := next((flag for flag in single if len(listed[flag]) > 1), ""):
        raise UserError(f"sweep got {wrong} {' '.join(listed[wrong])} and takes one value; the usage is {usage}.")
    if not names:
        raise UserError(f"sweep got no method; the usage is {usage}.")
    for flag, known in (("--direction", ("maximize", "minimize")), ("--search-by", ("tpe", "random"))):
        if given[flag] and given[flag] not in known:
            raise UserError(f"{flag} is {given[flag]!r}; expected {' or '.join(known)}.")
    from psigrad.language.recipes import search as recipe

    asked: Any = {"sampler": given["--search-by"] or "tpe", "direction": given["--direction"], "metric": given["--metric"]}
    page = recipe.run(
        recipe.Search(
            command=(*names, *rest),
            spaces=tuple(map(recipe.space_of, listed["--search"])),
            folder=Path(given["--output-dir"] or "runs/sweep"),
            trials=flags.whole_number("--trials", given["--trials"] or "20"),
            seeds=tuple(flags.whole_number("--seeds", text) for text in listed["--seeds"]) or (0,),
            **asked,
        )
    )
    print(recipe.summary(page.parent))
    print(f"sweep   {page}")
    return 0


def push(arguments: list[str]) -> int:
    """Upload a finished run's model."""
    usage = "psigrad push RUN REPO [--private] [--revision BRANCH]"
    if flags.asks_for_help(arguments):
        print(f"{usage}\n\nUpload model/ of a finished run with its model card to REPO (user/name) on the Hugging Face hub.")
        print("The token is that of HF_TOKEN or of `hf auth login`. A repository that is there gets a new commit.")
        print("\n  --private          make a new repository private")
        print("  --revision BRANCH  branch to upload to, made where it is missing (default main)")
        return 0
    names, listed, rest = flags.parse_lists(arguments, "--revision")
    given = flags.plain("push", rest, {"private": False})
    if len(names) != 2 or len(listed["--revision"]) > 1:
        raise UserError(f"push got {' '.join(names) or 'nothing'} and takes a run folder and a repository; the usage is {usage}.")
    from psigrad.runs import hub

    print(hub.push(names[0], names[1], private=given["private"], revision="".join(listed["--revision"])))
    return 0


_JUDGE_REPORT = "psigrad judge-report VOTES --model NAME --base-url URL [--criteria '{correctness: 2, brevity: 1}'] [flags]"


def judge_report(arguments: list[str]) -> int:
    """Print how a judge compares with people's votes and with itself."""
    if flags.asks_for_help(arguments):
        print(f"{_JUDGE_REPORT}\n\nHow a judge compares with people's votes (agreement, Cohen's kappa, by criterion) and itself")
        print("(order, length, its own model's texts). VOTES is a file that the labelling desk exports, or its database with")
        print("--project NAME. Each pair is shown to the judge in both orders, as by the reward ranking.\n")
    names, listed, rest = flags.parse_lists(arguments, "--criteria")
    texts = dict.fromkeys(("model", "base_url", "project", "self_model", "cache", "output"), "")
    usual = {**texts, "api_key_variable": "OPENAI_API_KEY", "max_pairs": 0}
    given = flags.plain("judge-report VOTES", rest, usual)
    if len(names) != 1:
        raise UserError(f"judge-report takes one file of votes, or a database; the usage is {_JUDGE_REPORT}.")
    from psigrad.config.nested import read_value
    from psigrad.language.rewards.group_ranking import GroupRanking
    from psigrad.records.report import terminal
    from psigrad_studio import judge_report as command

    criteria = read_value(" ".join(listed["--criteria"])) if listed["--criteria"] else {"quality": 1.0}
    where = {name: given[name] for name in ("model", "base_url", "api_key_variable", "cache")}
    judge = GroupRanking(criteria=criteria, **where)
    judge.check()
    votes = command.votes_of(names[0], given["project"])
    found = command.report(judge, votes, most=given["max_pairs"], own=given["self_model"])
    terminal.print_summary(found.rows)
    print("\n".join(command.lines_of(found)))
    if given["output"]:
        Path(given["output"]).write_text(json.dumps(asdict(found), indent=1) + "\n")
    return 0


def studio(arguments: list[str]) -> int:
    """Serve the studio."""
    usage = (
        "psigrad studio [RUNS_FOLDER] [--checkpoint FOLDER ...] [--model-memory GB] [--database URL] [--allow-host NAME ...]"
        " [--port N] [--no-open]\n"
        "psigrad studio [RUNS_FOLDER] [--database FILE] --backup FILE | --restore FILE"
    )
    if flags.asks_for_help(arguments):
        print(f"{usage}\n\nThe web application: grid world, runs, labelling desk, chat. It binds this machine only.")
        print("--backup copies the labels to a new file, also while a studio runs; --restore puts such a file in their place.")
        return 0
    folders, listed, rest = flags.parse_lists(arguments, "--checkpoint", "--allow-host")
    given = flags.plain(
        "studio", rest, {"port": 0, "open": True, "model_memory": 8.0, "database": "", "backup": "", "restore": ""}
    )
    if len(folders) > 1:
        raise UserError(f"studio got {len(folders)} folders and takes one; the usage is {usage}.")
    from psigrad_studio import serve

    folder = "".join(folders)
    if given["backup"] or given["restore"]:
        print(serve.copied(folder, given["database"], given["backup"], given["restore"]))
        return 0
    chat = {"checkpoints": listed["--checkpoint"], "model_memory": given["model_memory"]}
    labels = {"database": given["database"], "allow_host": listed["--allow-host"]}
    serve.studio(folder, port=given["port"], open_browser=given["open"], **chat, **labels)
    return 0
