"""The memory check sees the longest samples, takes nothing from the run, and leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_jobs import online_config, ppo_config, preference_config, reward_config, sft_config

from psigrad.errors import UserError
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes import finish, online, preference, reward, sft

RECIPES = {
    "sft": (sft_config, sft.run),
    "grpo": (online_config, online.run),
    "ppo": (ppo_config, online.run),
    "dpo": (preference_config, preference.run),
    "reward": (reward_config, reward.run),
}


def checked(config):
    return replace(config, optim=replace(config.optim, rehearse=True))


def metrics(folder) -> str:
    return (folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=pytest.mark.slow if r in ("dpo", "reward") else ()) for r in RECIPES])
def test_a_checked_run_is_the_same_run(recipe, job, tmp_path, monkeypatch):
    make, run = RECIPES[recipe]
    calls = []
    for module, kind in ((online, "check_online"), (finish, "check_offline")):
        original = getattr(module, kind)
        monkeypatch.setattr(module, kind, lambda job, original=original: (original(job), calls.append(1)))
    run(make(job, tmp_path / "plain", max_steps=2, save_steps=0))
    assert not calls
    run(checked(make(job, tmp_path / "checked", max_steps=2, save_steps=0)))
    assert calls == [1]
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "checked")


def test_the_pass_is_over_the_longest_prompts_with_full_completions(job, tmp_path, monkeypatch):
    config = checked(online_config(job, tmp_path / "run", max_steps=1))
    seen = []
    original = LanguageModel.evaluate

    def spied(self, inputs, **options):
        seen.append(inputs)
        return original(self, inputs, **options)

    monkeypatch.setattr(LanguageModel, "evaluate", spied)
    online.run(config)
    first = seen[0]
    assert {len(c) for group in first.completions for c in group} == {config.sampling.max_completion_length}
    prompts = [len(p) for p in first.prompts]
    assert min(prompts) == max(prompts)  # the job's prompts are all alike, so these are the longest


def test_memory_that_does_not_suffice_is_a_sentence(job, tmp_path, monkeypatch):
    def none_left(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory")

    def replaced(job):
        monkeypatch.setattr(LanguageModel, "evaluate", none_left)
        original(job)

    original = online.check_online
    monkeypatch.setattr(online, "check_online", replaced)
    with pytest.raises(UserError, match="longest samples of this run do not fit"):
        online.run(checked(online_config(job, tmp_path / "run", max_steps=1)))
