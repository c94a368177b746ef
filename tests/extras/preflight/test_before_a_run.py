"""What is said before a run: what the rewards give to real rows, and how long the run will be."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import vision_models
from painters import draw
from speed import measured_once  # noqa: F401 (a fixture)
from tiny_jobs import agent_config, online_config, sft_config
from tiny_rewards import Doors, WrongDoors, deadly, of_misspelt, of_nothing, of_two, price, reds

from psigrad import cli
from psigrad.config import Evaluation
from psigrad.errors import UserError
from psigrad.language.data.templates import CHATML
from psigrad_extras.preflight import check, first_rows
from psigrad_extras.preflight.plan import plan

pytestmark = pytest.mark.usefixtures("measured_once")


def on(job, tmp_path, *rewards):
    return replace(online_config(job, tmp_path / "run"), reward=rewards, reward_timeout=120.0)


def test_the_rewards_are_called_on_real_rows_before_any_model_is_loaded(job, tmp_path, monkeypatch):
    monkeypatch.setattr("psigrad.language.loading.load_model.load_model", lambda *given: pytest.fail("a model was loaded"))
    start = time.process_time()
    lines = [line for line, _ in first_rows.try_rewards(on(job, tmp_path, "exact"))]
    assert time.process_time() - start < 10
    # of each of two rows its own answer, and another
    assert [line.split()[1] for line in lines] == ["1", "0", "1", "0"] and "train.jsonl:1" in lines[0] and "'?'" in lines[1]


def test_the_rewards_see_the_images_of_rows(job, tmp_path):
    rows = [{"prompt": "how red?", "images": [draw((red, 0, 0))]} for red in (7, 9)]
    given = on(job, tmp_path, reds)
    seeing = str(vision_models.make("idefics3", tmp_path / "base", hidden=32, layers=1))
    given = replace(given, data=replace(given.data, dataset=rows), model=replace(given.model, path=seeing))
    assert [line.split()[1] for line, _ in first_rows.try_rewards(given)] == ["7", "9"]
    rows += [{"prompt": f"{i}?", "images": []} for i in range(4)]  # shorter prompts, of which the check samples completions
    blind = replace(given, data=replace(given.data, dataset=rows), sampling=replace(given.sampling, sampler="transformers"))
    with pytest.raises(UserError, match=r"has an image, but sampling\.sampler=transformers reads only text"):
        check.run(blind)


@pytest.mark.parametrize(("reward", "said"), [(of_misspelt, "needs the column 'anwser'"), (of_nothing, "AttributeError")])
def test_a_reward_that_cannot_judge_is_a_sentence(reward, said, job, tmp_path):
    with pytest.raises(UserError, match=said):
        first_rows.try_rewards(on(job, tmp_path, reward))


def test_all_columns_that_the_rewards_miss_are_named_at_once(job, tmp_path):
    with pytest.raises(UserError) as refused:
        first_rows.try_rewards(on(job, tmp_path, of_misspelt, of_two))
    assert "of_misspelt needs the column 'anwser', " in str(refused.value)
    assert "of_two needs the columns 'level' and 'solution', which the dataset does not have (found: " in str(refused.value)


def test_tools_are_called_and_the_environment_is_played_once_on_a_real_row(job, tmp_path, monkeypatch):
    monkeypatch.setattr("psigrad.language.loading.load_model.load_model", lambda *given: pytest.fail("a model was loaded"))
    given = on(job, tmp_path)
    (row,) = first_rows._tried_rows(replace(given, data=replace(given.data, max_rows=1)))
    answer = row.columns["answer"]
    ((called, _),) = first_rows.try_turns(replace(given, tools=(price,)))
    assert called == f"tool price answers {f'1 of {answer!r}, EUR'!r} to (answer={answer!r}, count=1) on {row.source}"
    ((played, _),) = first_rows.try_turns(replace(given, environment=Doors))
    assert played == f"the environment answers {f'? is not {answer}'!r} and the reward 0.5 to '?' on {row.source}"
    assert first_rows.try_turns(given) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": (price, deadly)}, r"tool deadly did not answer \(kind='\?'\): the environment's process died"),
        ({"environment": WrongDoors}, "the environment did not answer '\\?': the environment raised AttributeError"),
    ],
    ids=["tool", "environment"],
)
def test_a_tool_or_an_environment_that_cannot_answer_is_a_sentence(changes, said, job, tmp_path):
    with pytest.raises(UserError, match=said):
        first_rows.try_turns(replace(on(job, tmp_path), **changes))


def test_the_command_says_all_of_it_before_it_loads_a_model(job, tmp_path, monkeypatch, capsys):
    """Rows by the template, what rewards give, what a tool answers: in under 10 s, whatever the model takes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def near(completions, answer, **columns):\n    return [float(a in c) for c, a in zip(completions, answer)]\n\n\n"
        'def price(answer: str) -> str:\n    """What it costs.\n\n    Args:\n        answer: what is bought\n    """\n'
        '    return f"10 for {answer}"\n'
    )

    def loads(*given):
        raise UserError("Now a model would be loaded.")

    monkeypatch.setattr("psigrad_extras.preflight.check_subject.load_model", loads)
    given = ["check", "--model", f"{job}/base", "--chat-template-path", "chatml.jinja", "--dataset", f"{job}/train.jsonl"]
    (tmp_path / "chatml.jinja").write_text(CHATML)
    start = time.process_time()
    assert cli.main([*given, "--reward", "mine.py:near", "--tools", "mine.py:price"]) == 2
    assert time.process_time() - start < 10
    said, error = capsys.readouterr()
    places = [
        said.index(part) for part in ("train.jsonl:1", "prompt  | ", "reward 1 for the answer", "tool price answers '10 for ")
    ]
    assert places == sorted(places) and error.strip().endswith("Now a model would be loaded.")
    # negative control: what cannot judge is said, and a model is not even asked for
    assert cli.main([*given, "--reward", "mine.py:nowhere"]) == 2
    assert "nowhere" in (error := capsys.readouterr().err) and "would be loaded" not in error


def test_a_run_says_first_how_long_it_will_be_and_by_which_kernel(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "kernels", lambda: SimpleNamespace(products=SimpleNamespace(instructions=lambda dtype: "A kernel")))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    plan.foretell(sft_config(job, tmp_path / "run"))
    said = capsys.readouterr().err
    # six steps of four rows of some seven tokens
    assert said.startswith("psigrad: 6 steps of 4 rows, about 1") and " s here (A kernel), without evaluations." in said
    plan.foretell(replace(sft_config(job, tmp_path / "run"), evaluation=Evaluation(eval_prompts=0)))
    assert capsys.readouterr().err.endswith(" s here (A kernel).\n"), "what is not done is not told of"
    monkeypatch.setattr(plan, "kernels", lambda: "no C++ compiler was found")
    plan.foretell(sft_config(job, tmp_path / "run"))
    assert " s here, without evaluations." in capsys.readouterr().err
    monkeypatch.setattr(os, "getloadavg", lambda: (12.34, 0.0, 0.0))
    plan.foretell(sft_config(job, tmp_path / "run"))
    assert re.search(r" without evaluations\. The machine is busy \(load 12\.3 on \d+ cores\), so", capsys.readouterr().err)
    plan.foretell(agent_config(job, tmp_path / "agent"))
    assert (said := capsys.readouterr().err).endswith(" tokens per turn.\n"), said


def test_a_long_run_that_nobody_asked_for_is_begun_on_a_yes_alone(job, tmp_path, monkeypatch):
    unsaid, asked = sft_config(job, tmp_path / "run", max_steps=0), []

    def answer(text):
        return lambda question: asked.append(question) or text

    plan.foretell(unsaid, answer("n"))
    assert not asked, "it is short"
    monkeypatch.setattr(plan, "HOUR", 0)
    plan.foretell(unsaid, answer("y"))
    with pytest.raises(UserError, match="The run was not confirmed"):
        plan.foretell(unsaid, answer(""))
    assert len(asked) == 2
    plan.foretell(unsaid)  # no terminal, no question
    plan.foretell(sft_config(job, tmp_path / "run", max_steps=6), answer("n"))
    assert len(asked) == 2, "who says how long is not asked"
