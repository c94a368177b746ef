"""The commands of this package. Each one parses its arguments, calls one public function and prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from psigrad.cli import flags
from psigrad.paths import check_output

_JUDGED = """\
Compare a judge with people's votes (agreement and Cohen's kappa, by criterion), and test it for bias: does it prefer the
first answer, the longer one, or texts of its own model? VOTES is a file that the labelling desk has exported, or its database
with --project NAME. The judge reads each pair in both orders, as the reward `ranking` does.
--model: name of the judge model at the endpoint
--base-url: URL of an OpenAI-compatible endpoint, such as http://localhost:8000/v1
--criteria: criteria and their weights, such as '{correctness: 2, brevity: 1}'; by default only quality
--project: project of the votes, if VOTES is a database
--self-model: the name that the votes use for the judge's own model
--cache: folder that keeps the judge's replies for the next run
--output: JSON file for the figures
--api-key-variable: environment variable with the endpoint's key
--max-pairs: read only the first N pairs; by default all"""


def judge_report(arguments: list[str]) -> int:
    """Run `psigrad judge-report`: print the agreement of a judge with human votes and with itself, and return the exit status."""
    texts = dict.fromkeys(("model", "base_url", "project", "self_model", "cache", "output"), "")
    usual = {**texts, "criteria": (), "api_key_variable": "OPENAI_API_KEY", "max_pairs": 0}
    given = flags.parse_plain("judge-report VOTES --model MODEL --base-url URL", arguments, usual, _JUDGED)
    from psigrad.config.nested import read_value
    from psigrad.records.report import terminal
    from psigrad_extras.judges.group_ranking import GroupRanking
    from psigrad_studio import judge_report as command

    check_output(given["output"])
    criteria = read_value(" ".join(given["criteria"])) if given["criteria"] else {"quality": 1.0}
    where = {name: given[name] for name in ("model", "base_url", "api_key_variable", "cache")}
    judge = GroupRanking(criteria=criteria, **where)
    judge.check()
    votes = command.votes_of(given["names"][0], given["project"])
    found = command.report(judge, votes, most=given["max_pairs"], own=given["self_model"])
    terminal.print_summary(found.rows)
    print("\n".join(command.lines_of(found)))
    if given["output"]:
        Path(given["output"]).write_text(json.dumps(asdict(found), indent=1) + "\n")
    return 0


_STUDIO = """\
Start the web application: grid world, runs, labelling, chat. It listens on this machine only. It shows the runs in
RUNS_FOLDER (default runs).
--checkpoint: folders of more models for the chat
--allow-host: host names at which a reverse proxy serves the studio
--port: port; by default the first free one from 8420
--open: open the studio in a browser (the default)
--model-memory: memory for the weights of the chat's models, in GB
--database: where labels are stored: a file or a postgresql:// URL; by default labels.db next to RUNS_FOLDER
--backup: copy the labels to this new file and exit, even while a studio runs
--restore: replace the labels with those of this backup and exit"""


def studio(arguments: list[str]) -> int:
    """Run `psigrad studio`: serve the studio until Ctrl-C, or back up or restore its labels, and return the exit status."""
    known = {"port": 0, "open": True, "model_memory": 8.0, "database": "", "backup": "", "restore": ""}
    lists: dict[str, Any] = {"checkpoint": (), "allow_host": ()}
    given = flags.parse_plain("studio [RUNS_FOLDER]", arguments, {**known, **lists}, _STUDIO)
    from psigrad_studio import serve

    folder = "".join(given["names"])
    if given["backup"] or given["restore"]:
        print(serve.copied(folder, given["database"], given["backup"], given["restore"]))
        return 0
    chat = {"checkpoints": given["checkpoint"], "model_memory": given["model_memory"]}
    labels = {"database": given["database"], "allow_host": given["allow_host"]}
    serve.studio(folder, port=given["port"], open_browser=given["open"], **chat, **labels)
    return 0
