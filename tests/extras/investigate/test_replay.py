"""A step is recomputed to the bit from the run's folder; what is planted there is named; other methods see the same samples."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import vision_models
from painters import Painter, draw
from resuming import following_config, lagging_config
from tiny_jobs import agent_config, episodes_config, online_config, ppo_config

from psigrad.cli import main
from psigrad.config import Data, Evaluation
from psigrad.errors import UserError
from psigrad.language.recipes import online
from psigrad.records import run_folder
from psigrad_extras.investigate import replay_page
from psigrad_extras.investigate.replay import Replay, lines_of, replay

pytestmark = pytest.mark.usefixtures("rewards_here")


def single_pass(job, output, **run):
    """One optimiser step a collection, through the activations that sampling kept; no KL, so a loss is a loss."""
    made = online_config(job, output, algorithm={"preset": "grpo", "kl": None}, **run)
    return replace(made, num_minibatches=1, evaluation=Evaluation(eval_prompts=0))


def pictured(_, output, **run):
    """Pictures of rows and of an environment, groups drawn again for lack of signal, and completions of older weights."""
    folder = output.parent
    vision_models.make("qwen3_vl", folder / "base", hidden=32, layers=2)
    draw("red").save(folder / "a.png")
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "paint"}]}]
    (folder / "train.jsonl").write_text((json.dumps({"prompt": prompt, "images": ["a.png"]}) + "\n") * 8)
    made = online_config(folder, output, algorithm="dapo", **run)
    sampling = replace(made.sampling, max_completion_length=16, sampler="pictures:Brief")
    made = replace(made, reward=(), environment=Painter, max_turns=3, lag=1, max_refills=2, sampling=sampling)
    data = Data(dataset=str(folder / "train.jsonl"))
    return replace(made, data=data, evaluation=Evaluation(eval_prompts=0), micro_batch_tokens=256)


CONFIGS = {"grpo": online_config, "single pass": single_pass}
MORE = {
    "ppo": ppo_config,
    "ppo shared": partial(ppo_config, critic_shared=True),
    "episodes": episodes_config,
    "agent": agent_config,
    "lag": lagging_config,
    "following reference": following_config,
    "online dpo": partial(online_config, algorithm="online_dpo"),
    "pictures": pictured,
}


@pytest.fixture(scope="module")
def made(job, tmp_path_factory):
    """A finished run of each configuration, made once."""
    known = {}

    def of(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-")) / "run"
            online.run((CONFIGS | MORE)[name](job, folder))
            known[name] = folder
        return known[name]

    return of


@pytest.mark.parametrize("name", [*CONFIGS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
@pytest.mark.parametrize(("step", "begun"), [(6, 4), (2, 0)])
def test_a_step_is_recomputed_to_the_bit(name, step, begun, made):
    before = {path: path.read_bytes() for path in made(name).glob("*.*")}
    found = replay(made(name), step)
    assert (found.differences, found.notes, found.begun) == ([], [], begun)
    assert {path: path.read_bytes() for path in made(name).glob("*.*")} == before, "a replay writes nothing to the run"


@pytest.fixture
def planted(made, tmp_path):
    """A copy of a run in which one row of a file is changed; the changed row."""

    def plant(name, file, change, which):
        folder = tmp_path / "run"
        shutil.copytree(made(name), folder)
        rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        row = next(row for row in rows if which(row))
        change(row)
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder, row

    return plant


def trained(step):
    return lambda row: row["step"] == step and row.get("kind") == "train" and row["advantage"]


def test_a_changed_reward_is_named(planted):
    folder, row = planted("single pass", "rollouts.jsonl", lambda row: row.update(reward=row["reward"] + 0.25), trained(6))
    said = replay(folder, 6).differences
    whose = f"step 6, row {row['row']}, completion {row['k']}"
    assert said[0].startswith(
        f"{whose}: its reward is {row['reward']:g} in its row, but its rewards sum to {row['reward'] - 0.25:g}"
    )
    assert any(line.startswith(f"{whose}: advantage is") for line in said)
    assert any(line.startswith("step 6: grad_norm is") for line in said)


def test_a_changed_token_is_named_also_in_a_step_before(planted):
    def change(row):
        row["completion_ids"][2] += 1 if row["completion_ids"][2] < 100 else -1

    folder, row = planted("single pass", "rollouts.jsonl", change, trained(5))
    token = row["completion_ids"][2]
    found = replay(folder, 6)
    assert found.differences[0].startswith(
        f"step 5, row {row['row']}, completion {row['k']}: token 2 is {token} in its row, but "
    ), found.differences[0]
    assert any(line.startswith("step 6: grad_norm is") for line in found.differences), "what follows trained on another token"
    assert next(iter(lines_of(found))).endswith("from the checkpoint of step 4: 2 steps recomputed")


def test_a_figure_changed_in_its_last_digit_is_named(planted):
    folder, row = planted("grpo", "metrics.jsonl", lambda row: row.update(grad_norm=row["grad_norm"] * (1 + 2**-52)),
                          lambda row: row["step"] == 6 and "grad_norm" in row)  # fmt: skip
    (said,) = replay(folder, 6).differences
    assert said.startswith(f"step 6: grad_norm is {row['grad_norm']!r} in metrics.jsonl, but ")


def test_other_methods_by_hand(made):
    """All completions have 4 tokens: the mean over each is a sum over 4, that of dr_grpo's shape over a fixed length of 8 half as
    much, and what its advantage is turned around points the other way.
    """
    same, halved = {"preset": "grpo", "kl": None}, {"preset": "grpo", "kl": None, "aggregate": {"part": "fixed_length", "n": 8}}
    folder = made("single pass")
    found = replay(folder, 6, [same, halved, {"preset": "rloo", "kl": None}], most_groups=99)
    run, again, half, rloo = found.methods.values()
    assert run["gradient norm"] == json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["grad_norm"]
    assert again["gradient norm"] == pytest.approx(run["gradient norm"], rel=1e-5)
    assert half["gradient norm"] == pytest.approx(run["gradient norm"] / 2, rel=1e-5)
    assert [x["cosine to the run's gradient"] for x in (run, again, half)] == pytest.approx([1, 1, 1], abs=1e-6)
    assert 0 < rloo["cosine to the run's gradient"] < 0.9999
    rows = {(r["row"], r["k"]): r for line in (folder / "rollouts.jsonl").read_text().splitlines()
            if (r := json.loads(line))["step"] == 6 and r["kind"] == "train"}  # fmt: skip
    seen = 0
    for group in found.groups:
        rewards = [c["reward"] for c in group["completions"]]
        for c in group["completions"]:
            own, _, _, loo = c["methods"].values()
            if own["ratio"][0] != own["ratio"][0]:  # a group without signal is not run forward
                continue
            seen += 1
            assert c["reward"] == rows[group["row"], c["k"]]["reward"]
            assert own["ratio"] == [1.0] * 4 and own["clipped"] == [0.0] * 4
            assert own["weight"] == pytest.approx([a / (16 * 4) for a in own["advantage"]], abs=1e-7)
            assert loo["advantage"] == pytest.approx([c["reward"] - (sum(rewards) - c["reward"]) / 3] * 4, abs=1e-6)
    assert seen >= 4


def test_weights_go_back_before_another_method_is_tried(made):
    """With two optimiser steps a collection, the run's own method from the same weights is the run's own step again."""
    run, other, again = replay(made("grpo"), 6, ["rloo", "grpo"]).methods.values()
    assert again["gradient norm"] == pytest.approx(run["gradient norm"], rel=1e-4)
    assert again["cosine to the run's gradient"] == pytest.approx(1, abs=1e-6)
    assert again["greatest ratio"] == pytest.approx(run["greatest ratio"], rel=1e-5) != pytest.approx(1)
    assert other["cosine to the run's gradient"] < 0.999


def test_pairs_are_made_of_the_same_completions(made):
    """The run's own method once more, as another: two optimiser steps from the same weights, on the same pairs."""
    run, again, rloo = replay(made("online dpo"), 6, ["online_dpo", "rloo"]).methods.values()
    assert again["pairs"] == run["pairs"] > 0
    assert again["gradient norm"] == pytest.approx(run["gradient norm"], rel=1e-4)
    assert again["cosine to the run's gradient"] == pytest.approx(1, abs=1e-6)
    assert -1 <= rloo["cosine to the run's gradient"] < 0.9999


def test_the_command_and_its_page(made, capsys, tmp_path):
    page = tmp_path / "replay.html"
    methods = ("--method", "dr_grpo", "online_dpo")
    assert main(["replay", str(made("single pass")), "--step", "6", *methods, "--output", str(page)]) == 0
    out = capsys.readouterr().out
    assert "bit for bit" in out and "dr_grpo" in out and "cosine" in out
    text = page.read_text()
    assert "bit for bit" in text and "weight " in text and 'class="up4' in text and "<script" not in text
    assert not (made("single pass") / run_folder.REPLAYS).exists()
    parts = [{"type": "image", "sha256": "ab" * 32, "width": 16, "height": 8}, {"type": "text", "text": "how?"}]
    group = {"row": 0, "prompt": [{"role": "user", "content": parts}], "completions": []}
    shown = replay_page.page(Replay("run", 1, 0, [], [], {}, [group], {}))
    assert "[image 16×8 ababab]\nhow?" in shown and "sha256" not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--step", "7"), "has no step 7; its metrics.jsonl has steps 1 to 6. Give one"),
        (("--step", "6", "--method", "dappo"), "no algorithm 'dappo'"),
        (("--step", "6", "--method", "vapo", "rloo"), "no critic, which vapo needs; give --method a method without a critic"),
        ((), "replay got no --step"),
    ],
)
def test_mistakes_are_one_sentence(arguments, said, made, capsys):
    assert main(["replay", str(made("single pass")), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_is_no_online_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not the folder of an online RL run"):
        replay(tmp_path, 1)


def test_a_run_that_trained_an_agent_in_half_precision_is_refused(made, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(made("single pass"), folder)
    for file in [folder / "config.json", *(folder / "checkpoints").glob("*/manifest.json")]:
        settings = json.loads(file.read_text())
        own = settings.get("settings") or settings
        own |= {"agent_command": "true", "model": {**own["model"], "dtype": "bfloat16"}}
        file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="ran an agent with dtype bfloat16"):
        replay(folder, 6)
