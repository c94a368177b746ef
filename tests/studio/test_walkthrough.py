"""The closed loop in a browser: groups of a GRPO run, blind votes of two people, an export, a reward model and DPO.

The clicks and commands are those of docs/studio.md, "From a group to a better model", on a model that learns in a second.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from browser import PATIENCE, chromium
from live_desk import PASSWORD
from playwright.sync_api import Page, expect
from transformers import AutoModelForCausalLM, AutoTokenizer

from psigrad import cli
from psigrad.language.models import tiny
from psigrad.language.recipes import reward

PROJECT = "Which says it more often"
BETA = 0.1
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with runs/parrot/grpo in it: four steps on a model that repeats a letter one to four times."""
    place = tmp_path_factory.mktemp("walkthrough")
    draw = random.Random(0)
    rows = [
        {"prompt": f"say {c}:", "completion": f" {c}" * draw.randint(1, 4), "answer": c} for c in draw.choices("abcdefgh", k=200)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny.tokenizer([row["prompt"] + row["completion"] for row in rows], 270)
    tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64).save_pretrained(place / "base")
    tokenizer.save_pretrained(place / "base")
    lesson = f"--dataset {place}/rows.jsonl --learning-rate"
    psigrad(f"sft --model {place}/base {lesson} 1e-2 --max-steps 80 --batch-size 16 --output-dir {place}/runs/parrot/sft")
    sampling = "--reward similarity --max-steps 4 --prompts-per-step 4 --num-generations 6 --max-completion-length 6"
    psigrad(f"grpo --model {place}/runs/parrot/sft/model {lesson} 1e-3 {sampling} --output-dir {place}/runs/parrot/grpo")
    return place


def psigrad(line: str) -> None:
    """The command `psigrad LINE`, in this process, which has imported torch already."""
    short = "--eval-prompts 0 --threads 1 --no-progress --no-report"
    assert cli.main([*line.split(), *short.split()]) == 0, line


@contextmanager
def studio(place: Path) -> Iterator[str]:
    """`psigrad studio runs` in a process of its own; the address that it prints."""
    command = [sys.executable, "-m", "psigrad", "studio", "runs", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=place) as process:
        try:
            yield re.search(r"http://\S+", process.stdout.readline())[0]
        finally:
            process.send_signal(signal.SIGINT)


@contextmanager
def browsers() -> Iterator[Callable[[str], Page]]:
    """visit(address) -> a page in a browser that nobody else has used."""
    troubles: list[str] = []

    def visit(address: str) -> Page:
        context = browser.new_context(viewport={"width": 1280, "height": 860}, reduced_motion="reduce")
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        return page

    with chromium() as browser:
        yield visit
    assert not troubles, troubles


# ---- the clicks


def make_project(page: Page) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Label").click()
    page.get_by_role("link", name="New project").click()
    page.get_by_label("Name").fill(PROJECT)
    page.get_by_label("Instructions").fill("Choose the one that says the letter more often.")
    page.get_by_label("People who answer each task").fill("2")
    page.get_by_role("button", name="Create the project").click()
    expect(page.locator("#title")).to_have_text(PROJECT)


def send_pairs(page: Page) -> list[set[str]]:
    """Pairs of the first group of step 1 go to the desk: #0 beside one or two of other lengths. Gives their texts."""
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Runs").click()
    page.get_by_role("button", name="parrot/grpo", exact=True).click()
    page.get_by_role("tab", name="Rollouts").click()
    page.get_by_label("Step", exact=True).fill("1")
    page.get_by_role("button", name="Search").click()
    members = page.locator(".group .member")
    expect(page.locator(".prompt h2")).to_contain_text("Step 1 ")
    expect(members).to_have_count(6)
    texts = [member.locator(".tokens, .said").first.text_content().removesuffix(END) for member in members.all()]
    others = {len(text): n for n, text in enumerate(texts) if len(text) != len(texts[0])}
    members.nth(0).get_by_label("compare").check()
    sent = []
    for other in list(others.values())[:2]:
        members.nth(other).get_by_label("compare").check()
        page.get_by_label("Project").select_option(label=PROJECT)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".sending")).to_contain_text(f"Sent to the project “{PROJECT}”")
        sent.append({texts[0], texts[other]})
        if len(sent) < 2:
            members.nth(other).get_by_label("compare").uncheck()
    assert sent
    return sent


def bring_the_run_in(page: Page) -> None:
    """Two pairs of each of ten prompts."""
    page.get_by_role("link", name="Go to the labelling desk").click()
    page.get_by_role("link", name="Material").click()
    form = page.locator("form", has=page.get_by_role("heading", name="A run"))
    form.get_by_role("combobox", name="Run", exact=True).select_option("parrot/grpo")
    form.get_by_label("Prompts, at most").fill("10")
    form.get_by_label("Tasks of each prompt, at most").fill("2")
    form.get_by_role("button", name="Import the run").click()
    expect(page.locator(".said")).to_contain_text(re.compile(r"parrot/grpo: \d\d new tasks from"))


def invite(page: Page) -> str:
    """The link for a labeller."""
    page.get_by_role("link", name="People").click()
    page.get_by_role("button", name="Create a link").click()
    return page.locator(".once input").input_value()


def come_in(page: Page) -> None:
    page.get_by_label("Name").fill("Ben")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Join").click()
    page.get_by_role("link", name=PROJECT).click()


def vote(page: Page, slips: frozenset[frozenset[str]] = frozenset()) -> list[frozenset[str]]:
    """Answer everything by keyboard: the longer is better. Of the pairs in `slips` the other side is taken. Gives the pairs."""
    seen: list[frozenset[str]] = []
    while True:
        expect(page.locator(".how")).to_contain_text(f"{len(seen)} answered")
        expect(page.locator(".asked, .done")).to_be_visible()
        if page.locator(".done").is_visible():
            return seen
        assert "parrot" not in page.content() and "step" not in page.locator("main").inner_text()
        texts = page.locator(".words").all_text_contents()
        seen.append(frozenset([page.locator(".asked").text_content(), *texts]))
        first, second = (len(text) for text in texts)
        page.keyboard.press("t" if first == second else "ab"[(first < second) != (seen[-1] in slips)])


def export(page: Page, path: Path) -> list[dict]:
    """The preferences, downloaded."""
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Preferences").click()
    waiting.value.save_as(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- what was learned


def right(model: Path, rows: list[dict]) -> float:
    """The share of the pairs whose chosen completion has the higher score."""
    scores = [
        reward.score_rows(str(model), [{"prompt": r["prompt"], "completion": r[side]} for r in rows])
        for side in ("chosen", "rejected")
    ]
    return sum(chosen["reward"] > rejected["reward"] for chosen, rejected in zip(*scores, strict=True)) / len(rows)


def margin(policy: Path, reference: Path, rows: list[dict]) -> float:
    """Mean of β log π(chosen)/π_ref(chosen) − β log π(rejected)/π_ref(rejected), by transformers and not by psigrad."""
    torch.set_num_threads(1)  # scoring set another number, and threads wait long for one another over a model this small
    tokenizer = AutoTokenizer.from_pretrained(policy)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (policy, reference)]

    @torch.no_grad()
    def gain(prompt: str, completion: str) -> float:
        before = tokenizer(prompt).input_ids
        ids = torch.tensor([before + tokenizer(completion).input_ids + [tokenizer.eos_token_id]])
        logp = [
            model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(before) - 1 :].sum() for model in models
        ]
        return BETA * float(logp[0] - logp[1])

    return sum(gain(row["prompt"], row["chosen"]) - gain(row["prompt"], row["rejected"]) for row in rows) / len(rows)


def train(place: Path, name: str, dataset: Path) -> SimpleNamespace:
    """Folders of a reward model and of a policy that were trained on a file of preferences."""
    common = f"--model {place}/runs/parrot/sft/model --dataset {dataset} --batch-size 8 --max-steps 16"
    psigrad(f"reward {common} --learning-rate 1e-2 --output-dir {place}/runs/parrot/rm-{name}")
    psigrad(f"dpo {common} --learning-rate 3e-3 --no-cache-reference --output-dir {place}/runs/parrot/dpo-{name}")
    return SimpleNamespace(rm=place / f"runs/parrot/rm-{name}/model", dpo=place / f"runs/parrot/dpo-{name}/model")


@pytest.mark.slow
@pytest.mark.needs("chromium")
def test_from_a_group_over_blind_votes_to_a_reward_model_and_dpo(place):
    with studio(place) as address, browsers() as visit:
        owner = visit(address)
        make_project(owner)
        sent = send_pairs(owner)
        bring_the_run_in(owner)
        ben = visit(invite(owner))
        come_in(ben)
        owner.get_by_role("link", name="Label", exact=True).last.click()
        tasks = vote(owner)
        assert all(any(pair < task for task in tasks[: len(sent)]) for pair in sent)  # ahead of what was imported
        slip = frozenset(tasks[:1])
        assert set(vote(ben, slip)) == set(tasks)

        owner.get_by_role("link", name="Results").click()
        shown = owner.locator(".results")
        expect(shown).to_contain_text(f"{2 * len(tasks)} of {2 * len(tasks)} answers received")
        expect(shown.locator(".tile").first).to_contain_text(f"{round(100 * (len(tasks) - 1) / len(tasks))} %equal answers")
        rows = export(owner, place / "preferences.jsonl")

    assert len(rows) >= 8 and all(len(row["chosen"]) > len(row["rejected"]) for row in rows)
    check_lineage(place, rows)
    flipped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    (place / "flipped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in flipped))
    made, control = train(place, "votes", place / "preferences.jsonl"), train(place, "flipped", place / "flipped.jsonl")
    start = place / "runs/parrot/sft/model"
    for each in (made, control):
        print(f"{len(rows)} rows: ranked right {right(each.rm, rows):.2f}, implicit margin {margin(each.dpo, start, rows):.2f}")
    assert right(made.rm, rows) > 0.75 and margin(made.dpo, start, rows) > 0.1
    assert right(control.rm, rows) < 0.25 and margin(control.dpo, start, rows) < -0.1
    assert margin(start, start, rows) == 0


def check_lineage(place: Path, rows: list[dict]) -> None:
    """Every origin that a row names is a line of the run's rollouts with that text."""
    lines = (place / "runs/parrot/grpo/rollouts.jsonl").read_text().splitlines()
    written = {(r["step"], r["row"], r["k"]): r["completion"] for r in map(json.loads, lines) if r["kind"] == "train"}
    for row in rows:
        for side in ("chosen", "rejected"):
            assert row["lineage"][side]
            for origin in row["lineage"][side]:
                assert origin["run"] == "parrot/grpo" and written[origin["step"], origin["row"], origin["k"]] == row[side]
