"""Pictures that an environment or an agent draws in the middle of an episode: trained as sampled, and there after a kill."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
import vision_models
from painters import Painter, draw, drawing_agent
from pictures import Brief
from resuming import digest, dying_at
from tiny_jobs import forked, online_config

from psigrad.config import Data
from psigrad.language import images
from psigrad.language.data.sources import from_rows
from psigrad.language.data.templates import prompt_ids
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import Episodes, play
from psigrad.language.images import FIRST
from psigrad.language.models import language_model
from psigrad.language.recipes import online
from psigrad.language.rollout.types import SamplingParams

FAMILIES = ("idefics3", "gemma3", "qwen3_5")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A folder for each family, with a tiny model and prompts of which every second has a picture."""
    made = {}
    for family in FAMILIES:
        folder = made[family] = tmp_path_factory.mktemp(family)
        vision_models.make(family, folder / "base", hidden=32, layers=2)
        draw("red", (16, 16)).save(folder / "a.png")
        for name in ("train", "held_out"):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(raw_row(i, ["a.png"])) + "\n" for i in range(8)))
    return made


def raw_row(i, pictures):
    parts = [{"type": "image"}] if i % 2 else []
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": f"paint {i}"}]}]
    return {"prompt": prompt, "images": pictures if i % 2 else []}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_turn_s_log_probs_are_those_of_the_episode_alone(family, jobs):
    model = language_model.load(str(jobs[family] / "base"), vision=True)
    for name, weight in model.network.named_parameters():
        if "mm_input_projection" in name:  # zeros at the start
            torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(1))
    rows = from_rows([raw_row(i, [str(jobs[family] / "a.png")]) for i in range(3)], "prompt-only").rows
    prompts = [(i, tuple(prompt_ids(model.tokenizer, row)), row) for i, row in enumerate(rows)]
    sampler, params = Brief(model), SamplingParams(40)
    with InProcess(Painter) as playing:
        found = play(
            Episodes(playing), sampler, prompts, params, num_generations=2, seed_of=lambda i, k: 10 * i + k,
            tokenizer=model.tokenizer, version=0, max_length=500,
        )  # fmt: skip
    for one in found:
        ids, own = one.completion.ids, one.mask
        assert one.reason == "" and one.turns == 3 and len({images.split_id(t)[0].digest for t in ids if t >= FIRST}) == 2
        assert not any(chosen for token, chosen in zip(ids, own, strict=True) if token >= FIRST)
        seen, place = list(one.prompt_ids), model.vision.token_id
        assert place not in ids and place not in seen and any(token >= FIRST for token in seen)
        (alone,) = sampler.log_probs(one.prompt_ids, [ids], params)
        gaps = [abs(a - b) for a, b, chosen in zip(alone, one.completion.logprobs, own, strict=True) if chosen]
        assert max(gaps) < 1e-4
        blind = [place if token >= FIRST else token for token in ids]
        (other,) = sampler.log_probs(tuple(place if t >= FIRST else t for t in seen), [blind], params)
        assert max(abs(a - b) for a, b in zip(alone, other, strict=True)) > 1e-3, "negative control: without its pictures"


def painting(job, output):
    """Two of three turns are asked about what the environment has drawn."""
    made = replace(online_config(job, output, max_steps=4), prompts_per_step=2, num_generations=2)
    made = replace(made, evaluation=replace(made.evaluation, eval_prompts=1))
    made = replace(made, reward=(), environment=Painter, max_turns=3, data=Data(dataset=str(job / "train.jsonl")))
    made = replace(made, sampling=replace(made.sampling, max_completion_length=16, sampler="pictures:Brief"))
    model = replace(made.model, vision=True, trained_towers=("vision_model", "connector") if job.name.startswith("idef") else ())
    return replace(made, model=model, micro_batch_tokens=256, num_iterations=2)


def asking(job, output):
    made = painting(job, output)
    return replace(made, environment="", max_turns=1, agent=drawing_agent, agent_workers=2)


RUNS = {
    "gemma3": lambda *of: replace(painting(*of), lag=2),
    "qwen3_5": painting,
    "an agent": asking,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "qwen3_5" else ()) for name in RUNS])
def test_a_run_is_killed_and_resumed_bitwise_with_pictures_that_only_the_episode_drew(name, jobs, tmp_path):
    job = jobs.get(name, jobs["idefics3"])

    def work(folder, count=0):
        seen: list[str] = []
        dying_at(count, seen)
        online.run(RUNS[name](job, tmp_path / folder))
        (tmp_path / "events").write_text("\n".join(seen))

    assert forked(lambda: work("whole")) == 0
    events = (tmp_path / "events").read_text().splitlines()
    drawn = list((tmp_path / "whole" / "images").glob("*.png"))
    lines = [json.loads(line) for line in (tmp_path / "whole" / "rollouts.jsonl").read_text().splitlines()]
    assert name == "an agent" or {line["turns"] for line in lines} >= {3}
    assert len(drawn) > 4 and all(line["reward"] is not None for line in lines), [line["reason"] for line in lines]

    status = forked(lambda: work("killed", 2 * len(events) // 3))
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert list((tmp_path / "killed" / "checkpoints").iterdir())
    assert forked(lambda: online.run(RUNS[name](job, tmp_path / "killed"))) == 0
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
