"""Programs that people bring, unmodified, against a small model that SFT taught their calls: `make test-agents`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import programs
import pytest
import school

import psigrad
from psigrad.language.models import language_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.training.online import online_rl
from psigrad_serve.agents import agent_gateway
from psigrad_serve.served import Recorder

pytestmark = pytest.mark.agents
PAGE = Path(__file__).parents[3] / "docs" / "agents.md"


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    return school.school(tmp_path_factory.mktemp("school"), steps=180)


class Greedy(Recorder):
    """Answers with the most probable tokens, and counts the answers."""

    answers = 0

    def prepare(self, session_id, call):
        """See `Recorder`."""
        return replace(call, params=replace(call.params, temperature=0.0))

    def on_completion(self, *told):
        """See `Recorder`."""
        self.answers += 1


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_completes_a_task_of_two_rounds_of_tools(program, taught):
    model, counted = language_model.load(str(taught)), Greedy()
    assert school.played(program, model, None, counted) == 1.0
    assert counted.answers == 3, "two rounds of tools, and the answer"


def heard_by(monkeypatch) -> tuple[set, list, set]:
    """(what was sampled behind what, the batches that are trained on, the texts that forward passes with a gradient read)."""
    sampled, batches, read = set(), [], set()
    record, batch_of, evaluate = agent_gateway.AgentGateway.on_completion, online_rl.to_batch, LanguageModel.evaluate

    def on_completion(self, session_id, call, completion, *more):
        sampled.add((call.prompt_ids, completion.ids))
        return record(self, session_id, call, completion, *more)

    def to_batch(*given):
        batches.append(batch_of(*given))
        return batches[-1]

    def watched(self, inputs, **how):
        if online_rl.torch.is_grad_enabled():
            read.update((*p, *c) for p, own in zip(inputs.prompts, inputs.completions, strict=True) for c in own)
        return evaluate(self, inputs, **how)

    monkeypatch.setattr(agent_gateway.AgentGateway, "on_completion", on_completion)
    monkeypatch.setattr(online_rl, "to_batch", to_batch)
    monkeypatch.setattr(LanguageModel, "evaluate", watched)
    return sampled, batches, read


def trained(trajectory) -> set:
    """Each run of trained tokens, behind what the policy had read."""
    found = set()
    for context in trajectory.contexts:
        own = trajectory.mask[context.start : context.start + len(context.ids)]
        for run in re.finditer("1+", "".join("1" if one else "0" for one in own)):
            found.add(((*context.prompt_ids, *context.ids[: run.start()]), tuple(context.ids[run.start() : run.end()])))
    return found


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_is_trained_once_on_the_tokens_that_were_sampled(program, taught, tmp_path, monkeypatch):
    sampled, batches, read = heard_by(monkeypatch)
    asked = {"prompt": [{"role": "user", "content": programs.question(school.TASK)}], **school.TASK}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(asked)}\n" * 2)
    psigrad.train(
        "reinforce_total_return", model=str(taught), dataset=str(tmp_path / "rows.jsonl"), output_dir=str(tmp_path / "run"),
        agent=f"{programs.__file__}:{program.__name__}", agent_workers=2, agent_calls=6, prompts_per_step=2, num_generations=2,
        max_completion_length=96, temperature=0.3, max_steps=1, eval_prompts=0, threads=1, progress=False, report=False,
    )  # fmt: skip
    (batch,) = batches
    rewarded = [t for t in batch.inputs if t.reward]
    assert len(batch.inputs) == 4 and rewarded and not any(t.reason for t in batch.inputs), [t.reason for t in batch.inputs]
    assert set().union(*map(trained, batch.inputs)) == sampled
    assert all(len(trained(t)) == t.turns for t in batch.inputs), "each answer is trained once"
    missing = [(t.row, t.k) for t in rewarded for c in t.contexts if (*c.prompt_ids, *c.ids) not in read]
    assert not missing, "and the gradient is of these texts"
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["updates"] == 1 and metrics["grad_norm"] > 0


def test_the_page_names_each_program_with_the_version_that_is_tested():
    table = dict(re.findall(r"^\| `([\w-]+)` ([\d.]+)[ (]", PAGE.read_text(), re.MULTILINE))
    assert len(table) == len(programs.PROGRAMS)
    assert table == {name: version(name) for name in table}
