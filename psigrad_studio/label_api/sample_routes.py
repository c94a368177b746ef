"""Routes that sample completions to be labelled. They run `psigrad sample` in a separate process, then import its rows."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from psigrad.errors import UserError
from psigrad_studio.checkpoint_list import Checkpoint, find
from psigrad_studio.json_api import json_response
from psigrad_studio.label_api.project_routes import TaskOptionsForm, rows_of
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.label_api.task_routes import ProjectForm
from psigrad_studio.labels import intake, projects
from psigrad_studio.labels.intake import Added, TaskOptions
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.refusals import Conflict

MOST_PROMPTS = 5000


class SampleForm(ProjectForm):
    """The body of a sampling request: a model's id, prompts (one per line, or JSONL), and sampling settings."""

    model: Annotated[str, Field(max_length=64)]
    prompts: str
    chat: bool = False
    """True if each line is a user's message. False: it is a text to continue."""
    completions: Annotated[int, Field(ge=1, le=64)] = 4
    temperature: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False, strict=False)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=8192)] = 256
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    making: TaskOptionsForm = TaskOptionsForm()


@dataclass
class SampleJob:
    """One sampling job. `state` is sampling, done, failed or stopped. `said` is the reason of a failure."""

    project: int
    model: str
    prompts: int
    state: str = "sampling"
    said: str = ""
    added: Added | None = None


class SampleJobs:
    """A runner of at most one job at a time. The result of the last job is kept until the next one starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.job: SampleJob | None = None

    def begin(self, job: SampleJob, command: list[str], rows: list[dict[str, Any]], finish: Any) -> None:
        """Run `command` with `rows` as its --dataset, and pass the content of its --output to `finish`.

        Raises `Conflict` if another job is running.
        """
        with self._lock:
            if self.job is not None and self.job.state == "sampling":
                raise Conflict(f"The studio is already sampling from {self.job.model}; wait for the end, or stop it.")
            self.job = job
        threading.Thread(target=self._run, args=(job, command, rows, finish), daemon=True).start()

    def stop(self) -> None:
        """Stop the running job. None of its rows are imported."""
        with self._lock:
            if self.job is not None and self.job.state == "sampling":
                self.job.state = "stopped"
                if self._process is not None:
                    self._process.terminate()

    def _run(self, job: SampleJob, command: list[str], rows: list[dict[str, Any]], finish: Any) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="psigrad-sample-") as folder:
                prompts, output = Path(folder) / "prompts.jsonl", Path(folder) / "sampled.jsonl"
                prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
                said = self._wait(job, [*command, "--dataset", str(prompts), "--output", str(output)])
                if job.state == "sampling" and said is None:
                    job.added = finish(output.read_text(encoding="utf-8"))
                    job.state = "done"
                elif job.state == "sampling":
                    job.said, job.state = said or "", "failed"
        except Exception as error:  # shown to the user who requests the job's state
            job.said, job.state = str(error), "failed"

    def _wait(self, job: SampleJob, command: list[str]) -> str | None:
        """Return None if the command succeeded, otherwise the last line of its errors."""
        with self._lock:
            if job.state != "sampling":
                return None
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            self._process = process
        _, complaints = process.communicate()
        lines = complaints.strip().splitlines()
        return None if process.returncode == 0 else (lines[-1].removeprefix("psigrad: ") if lines else "The process was killed.")


def add_routes(routes: APIRouter, store: LabelStore) -> None:
    """Add the routes for sampling, for administrators of the studio."""
    sampling = SampleJobs()

    @routes.get("/models")
    def models(request: Request) -> Response:
        store.administrator(request)
        return json_response([{"id": c.id, "name": c.name} for c in _models(store).values()])

    @routes.get("/sampling")
    def state(request: Request) -> Response:
        store.administrator(request)
        return json_response(sampling.job)

    @routes.post("/sample")
    def sample(form: SampleForm, request: Request) -> Response:
        person = store.administrator(request)
        projects.info(store.db, person, form.project)
        chosen, rows, making = _models(store).get(form.model), _prompts(form), TaskOptions(**form.making.model_dump())
        if chosen is None:
            raise UserError("This model is not in the runs folder; choose one from the list.")

        def finish(text: str) -> Added:
            return _bring_in(store, person, form.project, chosen, text, making)

        sampling.begin(SampleJob(form.project, chosen.name, len(rows)), _command(form, chosen), rows, finish)
        return json_response(sampling.job)

    @routes.post("/unsample")
    def unsample(request: Request) -> Response:
        store.administrator(request)
        sampling.stop()
        return json_response(sampling.job)


def _models(store: LabelStore) -> dict[str, Checkpoint]:
    """Return the models that can be sampled, including adapters. The command merges an adapter into the base that it names."""
    return find(store.settings.runs, store.settings.checkpoints)


def _prompts(form: SampleForm) -> list[dict[str, Any]]:
    """Return rows with a prompt each. Raises `UserError` if there are none or too many."""
    if form.prompts.lstrip().startswith("{"):
        rows = list(rows_of(form.prompts, "prompts"))
    else:
        lines = [line.strip() for line in form.prompts.splitlines() if line.strip()]
        rows = [{"prompt": [{"role": "user", "content": line}] if form.chat else line} for line in lines]
    if not 1 <= len(rows) <= MOST_PROMPTS:
        raise UserError(f"There are {len(rows)} prompts; expected 1 to {MOST_PROMPTS}, one per line, or JSONL with prompt.")
    return rows


def _command(form: SampleForm, chosen: Checkpoint) -> list[str]:
    flags = {
        "--model": chosen.folder,
        "--num-generations-eval": form.completions,
        "--temperature": form.temperature,
        "--max-completion-length": form.max_tokens,
        "--seed": form.seed,
    }
    return [sys.executable, "-m", "psigrad", "sample", *(str(part) for pair in flags.items() for part in pair)]


def _bring_in(store: LabelStore, person: Person, project: int, chosen: Checkpoint, text: str, making: TaskOptions) -> Added:
    rows = [row for row in rows_of(text, chosen.name) if row.get("completion")]
    source = f"sampled from {chosen.name}"
    return intake.add_rows(store.db, person, project, rows, making, source=source, sampler=chosen.name, run=chosen.run)
