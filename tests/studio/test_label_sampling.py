"""Sampling a model for the labels: one at a time, stopped when told, and what went wrong is said."""

from __future__ import annotations

import json
import sys

import pytest
from live_desk import guest, project, told
from live_studio import live_studio
from timing import until

from psigrad.cli import flags
from psigrad.config import SampleConfig
from psigrad.errors import UserError
from psigrad_studio.checkpoint_list import Checkpoint
from psigrad_studio.label_api.sample_routes import SampleForm, SampleJob, SampleJobs, _command, _prompts
from psigrad_studio.labels.intake import Added
from psigrad_studio.labels.refusals import Conflict

ECHO = "import sys; a = sys.argv; open(a[a.index('--output') + 1], 'w').write(open(a[a.index('--dataset') + 1]).read())"
ROWS = [{"prompt": "one"}, {"prompt": "two"}]


def begun(code: str, finish=lambda text: Added(completions=len(text.splitlines()))) -> SampleJobs:
    sampling = SampleJobs()
    sampling.begin(SampleJob(1, "a model", 2), [sys.executable, "-c", code], ROWS, finish)
    return sampling


def ended(sampling: SampleJobs) -> SampleJob:
    until(lambda: sampling.job.state != "sampling")
    return sampling.job


def test_what_was_sampled_is_brought_in():
    job = ended(begun(ECHO))
    assert (job.state, job.added) == ("done", Added(completions=2))


def test_its_last_line_is_said_when_it_fails():
    job = ended(begun("import sys; sys.exit('noise\\npsigrad: The model is broken.')"))
    assert (job.state, job.said, job.added) == ("failed", "The model is broken.", None)
    assert ended(begun("import os; os.kill(os.getpid(), 9)")).said == "The process was killed."
    assert "sampled.jsonl" in ended(begun("pass")).said


def test_a_refusal_of_what_comes_in_is_said():
    def refuse(text: str) -> Added:
        raise UserError("row 1 is wrong")

    assert ended(begun(ECHO, refuse)).said == "row 1 is wrong"


def test_adapters_are_offered_too(tmp_path):
    """That the command takes one is tests/language/loading/test_adapters.py."""
    adapter, run = {"task_type": "CAUSAL_LM", "base_model_name_or_path": "base"}, tmp_path / "lora"
    (run / "model").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"model": {"path": "base"}}))
    (run / "model" / "adapter_config.json").write_text(json.dumps(adapter))
    (run / "model" / "adapter_model.safetensors").touch()
    with live_studio(runs=tmp_path) as studio:
        assert [model["name"] for model in told(studio.ask("GET", "/api/label/models"))] == ["lora, final model"]


def test_one_at_a_time_until_it_is_stopped():
    sampling = begun("import time; time.sleep(600)")
    with pytest.raises(Conflict, match="already sampling from a model"):
        sampling.begin(SampleJob(1, "another", 1), [], ROWS, None)
    until(lambda: sampling._process is not None)
    sampling.stop()
    sampling._process.wait(60)  # a fraction of what it would take by itself
    assert sampling.job.state == "stopped"
    sampling.begin(SampleJob(1, "another", 1), [sys.executable, "-c", ECHO], ROWS, lambda text: Added())
    assert ended(sampling).state == "done"


def test_prompts_are_lines_or_jsonl():
    def prompts(text: str, **more) -> list[dict]:
        return _prompts(SampleForm(project=1, model="m", prompts=text, **more))

    assert prompts("a\n\n b \n") == [{"prompt": "a"}, {"prompt": "b"}]
    assert prompts("a", chat=True) == [{"prompt": [{"role": "user", "content": "a"}]}]
    assert prompts('{"prompt": "x", "answer": 1}\n') == [{"prompt": "x", "answer": 1}]
    for text, said in (("", "0 prompts"), ("x\n" * 6000, "6000 prompts"), ('{"prompt": 1}\nx', "prompts:2 is not JSON")):
        with pytest.raises(UserError, match=said):
            prompts(text)


def test_the_command_is_one_that_psigrad_sample_takes(tmp_path):
    form = SampleForm(project=1, model="m", prompts="a", completions=3, temperature=0.5, max_tokens=9, seed=4)
    command = _command(form, Checkpoint("m", "a model", tmp_path, 1, 1))
    assert command[1:4] == ["-m", "psigrad", "sample"]
    config = flags.parse(SampleConfig, "sample", [*command[4:], "--dataset", "x", "--output", "y"])
    assert (config.model.path, config.evaluation.num_generations_eval, config.run.seed) == (str(tmp_path), 3, 4)
    assert (config.evaluation.eval_temperature, config.sampling.max_completion_length) == (0.5, 9)


def test_only_administrators_of_the_studio_sample_and_only_what_is_listed(tmp_path):
    with live_studio(runs=tmp_path) as studio:
        made = project(studio, 1)
        admin = guest(studio, made, "admin")
        body = {"project": made, "model": "../../etc", "prompts": "a"}
        for path, content in (("models", None), ("sampling", None), ("sample", body), ("unsample", {})):
            asked = admin.get(f"/api/label/{path}") if content is None else admin.post(f"/api/label/{path}", content)
            assert asked.status == 403, path
        reply = studio.post("/api/label/sample", body)
        assert reply.status == 422 and "not in the runs folder" in reply.json["error"]["message"]
        assert told(studio.ask("GET", "/api/label/sampling")) is None


@pytest.mark.long
def test_a_model_is_sampled_and_its_pairs_are_there(tmp_path):
    from tiny_jobs import make_job

    make_job(tmp_path)
    with live_studio(runs=tmp_path) as studio:
        made = project(studio, 0)
        (model,) = told(studio.ask("GET", "/api/label/models"))
        body = {"project": made, "model": model["id"], "prompts": "say a:\nsay b:", "completions": 3, "max_tokens": 8}
        told(studio.post("/api/label/sample", body))
        until(lambda: told(studio.ask("GET", "/api/label/sampling"))["state"] != "sampling", 240)
        job = told(studio.ask("GET", "/api/label/sampling"))
        assert job["state"] == "done" and job["added"]["prompts"] == 2 and job["added"]["tasks"] >= 4, job
        assert told(studio.post("/api/label/next", {"project": made}))["task"]["prompt"].startswith("say ")
        votes = studio.ask("GET", f"/api/label/results?project={made}&by=sampler")
        assert json.loads(votes.body)["progress"]["tasks"] == job["added"]["tasks"]
