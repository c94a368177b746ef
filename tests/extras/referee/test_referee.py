"""`psigrad referee`: two files of settings part where they differ, mistakes are one sentence, and comparison has bounds."""

from __future__ import annotations

import sys

import pytest
import torch
import yaml
from tiny_jobs import make_job

from psigrad import cli
from psigrad_extras.referee import first_difference, trl_side

PLAIN = {
    "algorithm": {"preset": "grpo", "kl": {"coefficient": 0.05}},
    "prompts_per_step": 4, "num_generations": 4, "num_minibatches": 2, "micro_batch_tokens": 48,
    "sampling": {"max_completion_length": 6}, "optim": {"learning_rate": 1e-2, "max_grad_norm": 0.1},
    "run": {"max_steps": 6, "threads": 1, "device": "cpu"},
}  # fmt: skip
REWARD = """
import math
SCALE = 2.0
def variety(completions, **columns):
    return [SCALE * math.sqrt(len({*text})) for text in completions]
print("this would train")
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = make_job(tmp_path_factory.mktemp("referee"))
    (folder / "mine.py").write_text(REWARD)
    return folder


def write(job, name, **changed):
    settings = PLAIN | {"model": {"path": str(job / "base")}, "data": {"dataset": str(job / "train.jsonl")}}
    settings |= {"reward": [f"{job}/mine.py:variety"]}
    for key, value in changed.items():
        settings[key] = {**settings[key], **value} if isinstance(value, dict) else value
    (job / name).write_text(yaml.safe_dump(settings))
    return str(job / name)


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({}, ""),
        ({"sampling": {"max_completion_length": 6, "temperature": 0.8}}, "sampling log-probs"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"run": {"seed": 1}}, ""),  # draws are handed over
                ({"num_generations": 2}, "batch"),
                ({"sampling": {"max_completion_length": 3}}, "completion ids"),
                ({"sampling": {"max_completion_length": 6, "top_k": 20}}, "sampling log-probs"),
                ({"algorithm": {"kl": None}}, "reference log-probs"),
                ({"missing_eos_penalty": 1.0}, "rewards"),
                ({"algorithm": {"psi": "leave_one_out"}}, "advantages"),
                ({"algorithm": {"aggregate": "token_mean"}}, "loss weights"),
                ({"algorithm": {"kl": {"coefficient": 0.5}}}, "loss slopes"),
                ({"optim": {"learning_rate": 2e-2}}, "learning rate"),
                ({"optim": {"adam_beta1": 0.5}}, "update"),
            )
        ),
    ],
    ids=str,
)
def test_two_files_part_where_they_differ(job, capsys, changed, first):
    status = cli.main(["referee", write(job, "a.yaml"), write(job, "b.yaml", **changed)])
    said = capsys.readouterr().out
    assert status == bool(first)
    assert (
        (f"The first tensor in which they differ: {first}, in step" in said)
        if first
        else "agree in all tensors up to step 2" in said
    )


def test_a_mistake_is_one_sentence(job, capsys):
    python = job / "no_trl"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no packages
    python.chmod(0o755)
    (job / "no_trainer.py").write_text("print('nothing to train')\n")
    broken = write(job, "broken.yaml", model={"path": str(job / "nowhere")})
    pairs = write(job, "pairs.yaml", algorithm="online_dpo")
    script = str(job / "no_trainer.py")
    for arguments, words in (
        ([], "takes --trl with a script"),
        (["--trl", "nowhere.py"], "There is no script"),
        (["--trl", "mine.py 'a"], "No closing quotation"),
        (["--trl", script, "--python", "/nowhere/python"], "cannot be started"),
        (["--trl", script, broken, broken], "at most one settings file"),
        (["--trl", script, "--python", str(python)], "has no supported TRL"),
        ([broken, broken], "nowhere"),
        ([pairs, pairs], "policy-gradient methods on single completions"),
        ([write(job, "a.yaml"), write(job, "a.yaml"), "--steps", "0"], "at least 1 step"),
    ):
        assert cli.main(["referee", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said, said


def test_a_reward_is_moved_without_the_rest_of_its_script(job, tmp_path):
    (placed,) = trl_side._place_rewards([f"{job}/mine.py:variety"], tmp_path)
    text = (tmp_path / "rewards_0.py").read_text()
    assert placed == f"{tmp_path}/rewards_0.py:variety" and "SCALE = 2.0" in text and "this would train" not in text


def test_a_reward_is_moved_with_the_imports_of_its_blocks():
    source = "try:\n    import math as m\nexcept ImportError:\n    import cmath as m\ndef reward(x):\n    return m.sqrt(x)\n"
    assert "import math as m" in trl_side._needed_by("reward", source)


def step(**changed):
    """A step of one completion of two tokens, with one update."""
    update = {"rows of the update": [0], "log-probs of the pass": {0: [-1.0, -2.0]}, "loss weights": {0: [0.5, 0.5]}, "loss": 0.0,
              "loss slopes": {0: [-0.5, -0.5]}, "learning rate": 0.1, "gradient": {"w": torch.tensor([1.0, 1e-6])},
              "update": {"w": torch.tensor([-0.1, 0.1])}}  # fmt: skip
    update |= {name: value for name, value in changed.items() if name in update}
    made = {"mask": [[1.0, 1.0]], "rendered prompt": ["say a:"], "log-probs": [[-1.0, -2.0]], "updates": [update]}
    return made | {name: value for name, value in changed.items() if name in made}


@pytest.mark.parametrize(
    ("changed", "first", "words"),
    [
        ({"log-probs": [[-1.0, -2.00001]]}, "", ""),  # 5e-6 of the scale
        ({"log-probs": [[-1.0, -2.1]]}, "log-probs", "Row 0 (prompt 'say a:'), token 1: psigrad has -2, TRL has -2.1."),
        ({"loss weights": {0: [0.25, 0.25]}}, "loss weights", "2 of 2 values differ."),
        ({"loss": 1e-6}, "", ""),  # beside slopes of 1 together
        ({"loss": 0.01}, "loss", "psigrad has 0, TRL has 0.01"),
        ({"update": {"w": torch.tensor([-0.1, -0.1])}}, "", ""),  # the gradient of the second weight is rounding
        ({"update": {"w": torch.tensor([-0.05, 0.1])}}, "update", "w: the norm is"),
        ({"gradient": {"v": torch.ones(2)}}, "gradient", "v: psigrad has nothing, TRL has shape (2,)."),
    ],
    ids=str,
)
def test_rounding_is_no_difference_and_a_difference_has_its_place(changed, first, words):
    found = [
        one
        for one in first_difference.compare([step()], [step(**changed)], ("psigrad", "TRL"), first_difference.TOLERANCE)
        if one.parts
    ]
    assert [one.name for one in found[:1]] == ([first] if first else [])
    assert not first or any(words in sentence for sentence in found[0].parts)
