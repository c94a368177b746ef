"""What a run makes of its rows: which are turned into turns, left out, held out and said; what rewards are shown of them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from in_memory import rollout_of
from tiny_chat import HEAD, save_chat_model
from tiny_jobs import online_config
from tiny_rewards import has_label

from psigrad.config import Data, Evaluation, Model, OnlineConfig, Run, SFTConfig
from psigrad.errors import UserError
from psigrad.language.data import pairs
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.row_rendering import Segment, render
from psigrad.language.data.templates import CHATML
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import Episodes
from psigrad.language.models import tiny
from psigrad.language.recipes import conversation, online, sft
from psigrad.language.recipes.row_encoding import Encoder, encode_rows
from psigrad.language.rewards import RewardError


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


@pytest.mark.parametrize("plain", [False, True])
def test_plain_prompts_of_a_run_with_a_chat_model(plain: bool, chat: Path, job: Any, tmp_path: Path, capsys: Any) -> None:
    config = online_config(job, tmp_path / "run", max_steps=1)
    data = Data(dataset=[{"question": "say a:"}] * 4, columns="question=prompt", plain_prompts=plain)
    config = replace(config, evaluation=replace(config.evaluation, eval_prompts=None))
    online.run(replace(config, model=Model(path=str(chat)), data=data, reward=("length",)))
    said = capsys.readouterr().err
    how = "are sent unchanged: plain_prompts is set" if plain else "are sent as user turns of the chat template"
    assert said.count("4 plain prompts") == 1 and how in said and "held out" not in said
    (told,) = events(tmp_path / "run", "prompt_form")
    assert (told["user_turns"], told["plain"]) == ((0, 4) if plain else (4, 0))
    (shown,) = events(tmp_path / "run", "first_rows")
    assert shown["rows"][0][1][0] == ["prompt", "say a:" if plain else HEAD] and len(shown["rows"]) == 3
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in rollouts} == {"say a:"}, "people see what the dataset has"


def test_rewards_are_shown_the_text_of_the_dataset(chat: Path) -> None:
    from psigrad.language.data.dataset_layouts import to_turns
    from psigrad.language.loading import samplers
    from psigrad.language.loading.load_model import load_model
    from psigrad.language.rollout.scoring import Scored, Scoring
    from psigrad.language.rollout.types import Prompt, SamplingParams

    model = load_model(Model(path=str(chat)), Run(device="cpu"), None)
    row = to_turns(model.tokenizer, Row("x", prompt="say a:\n", columns={"answer": "a"}))
    seen: list[Any] = []

    class Watching:
        def begin(self) -> Scoring:
            return Scoring(lambda groups: [seen.append(g) or Scored(1.0) for g in groups for _ in range(len(g))])

    from psigrad.config import Sampling
    from psigrad.language.data.templates import prompt_ids

    prompt = Prompt(0, tuple(prompt_ids(model.tokenizer, row)), row)
    sampler = samplers.make(Sampling(), model)
    rollout_of(sampler, model, Watching())([prompt], SamplingParams(4), 2, lambda i, k: k, version=0)
    assert list(seen[0].prompts) == ["say a:\n"] * 2 and all(isinstance(text, str) for text in seen[0].completions)


def test_tools_go_with_plain_prompts_of_a_chat_model_and_an_environment_gets_the_text(chat: Path) -> None:
    from psigrad.language.data.dataset_layouts import to_turns
    from psigrad.language.loading.load_model import load_model

    tokenizer = load_model(Model(path=str(chat)), Run(device="cpu"), None).tokenizer
    row = to_turns(tokenizer, Row("x", prompt="say a:"))

    def add(a: int, b: int) -> int:
        """The sum.

        Args:
            a: one
            b: another
        """
        return a + b

    config = online_config_of_tools(chat, add)
    (offered,) = conversation.offer_tools(config, [row])
    assert offered.columns["tools"][0]["function"]["name"] == "add"
    with pytest.raises(ValueError, match="tools need a chat template"):
        conversation.offer_tools(config, [Row("x", prompt="say a:")])


def online_config_of_tools(chat: Path, tool: Any) -> Any:
    return OnlineConfig(model=Model(path=str(chat)), tools=(tool,))


def test_rows_without_a_token_to_learn_are_left_out_and_counted(chat: Path, tmp_path: Path, capsys: Any) -> None:
    """Half of the rows have a prompt that alone is longer than max_length: their loss is 0 and their steps are lost."""
    rows = [{"prompt": "say a:" * (20 if i % 2 else 1), "completion": "a"} for i in range(20)]
    config = SFTConfig(
        model=Model(path=str(chat)),
        data=Data(dataset=rows, plain_prompts=True),
        run=Run(output_dir=str(tmp_path / "run"), max_steps=10, device="cpu", report=False, progress=False),
        evaluation=Evaluation(eval_prompts=0),
        batch_size=1,
        max_length=40,
    )
    sft.run(config)
    assert "10 of 20 rows have no token to train on within 40 tokens and are dropped" in capsys.readouterr().err
    (told,) = events(tmp_path / "run", "rows_left_out")
    assert (told["nothing_to_learn"], told["kept"]) == (10, 10)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 10 and min(losses) > 0.1


def test_a_row_is_shown_as_its_model_reads_it(chat: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat)
    user, bot = {"role": "user", "content": "say a:"}, {"role": "assistant", "content": "a"}
    end = "<|endoftext|>"
    (talk,) = render(tokenizer, Row("x:1", messages=[user, bot, user, bot]))
    assert talk.title == "x:1" and talk.pieces == [
        Segment("prompt", HEAD),
        Segment("trained", f"a{end}"),
        Segment("masked", f"\n{HEAD}"),
        Segment("trained", f"a{end}"),
        Segment("masked", "\n"),
    ]
    pair = render(tokenizer, Row("x:2", prompt="say a:", completion="a", rejected="b"))
    assert [(one.title, one.pieces) for one in pair] == [
        (f"x:2, {name}", [Segment("prompt", "say a:"), Segment("trained", f"{text}{end}")])
        for name, text in (("chosen", "a"), ("rejected", "b"))
    ]
    (steps,) = render(tokenizer, Row("x:3", prompt="say a:", steps=("a", "b"), labels=(1.0, 0.0)))
    assert steps.pieces == [Segment("prompt", "say a:"), Segment("trained", "a\nb\n")]
    (asked,) = render(tokenizer, Row("x:4", prompt=[user]))
    assert [piece.kind for piece in asked.pieces] == ["prompt", "sampled"] and asked.pieces[0].text == HEAD
    (long,) = render(tokenizer, Row("x:5", prompt="a" * 9000, completion="b"))
    assert len(long.pieces[0].text) < 2100 and " … " in long.pieces[0].text


def test_steps_that_a_template_cannot_say_are_left_out_when_asked(chat: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = "{% if 'b' in messages[0]['content'] %}{{ raise_exception('no b') }}{% endif %}" + CHATML
    rows = [Row(f"x:{text}", [{"role": "user", "content": text}], steps=("a",), labels=(1.0,)) for text in "aba"]
    told: list[str] = []
    encoder = Encoder(tokenizer, partial(pairs.encode_steps, tokenizer))
    made, _ = encode_rows(rows, encoder, Data(bad_rows="skip"), lambda kind, text, **more: told.append(kind))
    assert len(made) == 2 and told == ["rows_refused"]
    with pytest.raises(UserError, match=r"x:b: .*no b.*--bad-rows skip"):
        encode_rows(rows, encoder, Data())


@pytest.mark.parametrize(("count", "asked", "held"), [(30, None, 3), (9, None, 0), (700, None, 64), (30, 29, 29), (30, 0, 0)])
def test_an_environments_few_tasks_are_trained_on(count: int, asked: int | None, held: int, chat: Path) -> None:
    """A tenth is held out where no number is given, and at most 64, as of a dataset."""
    train, kept, told = rows_of_environment(chat, count, asked)
    assert kept == [f"task {i}" for i in range(held)] and train == [f"task {i}" for i in range(held, count)]
    assert told == (
        [f"{held} of {count} rows, the environment's first, are held out; --eval-prompts sets their number."] if held else []
    )


def test_an_environment_of_which_all_is_held_out_is_refused(chat: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot hold out 64 of 30 rows; lower eval_prompts"):
        rows_of_environment(chat, 30, 64)


def rows_of_environment(chat: Path, count: int, asked: int | None) -> tuple[list[Any], list[Any], list[str]]:
    """The prompts that are trained on, those that are held out, and what is said of these."""
    from types import SimpleNamespace

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat)
    factory: Any = SimpleNamespace(rows=lambda wanted, seed: [{"prompt": f"task {i}"} for i in range(min(count, wanted))])
    config, told = OnlineConfig(evaluation=Evaluation(eval_prompts=asked)), list[str]()

    def hear(kind: str, text: str, **more: Any) -> None:
        told.extend([text] if kind == "held_out" else [])

    parts = conversation.read_episode_rows(config, Episodes(InProcess(factory)), tokenizer, hear)
    train, kept = ([row.plain_prompt for row in part] for part in parts)
    return train, kept, told


def test_dirty_rows_end_no_run_and_are_named(job: Path, tmp_path: Path, capsys: Any, rewards_here: None) -> None:
    """Of 40 rows 5 have no label, which are dropped before the first step, and 3 one that the reward can't read."""
    table = tmp_path / "t.csv"
    labels = [""] * 5 + ["{"] * 3 + ["{}"] * 32
    table.write_text("prompt;label\n" + "".join(f"say {'abcde'[i % 5]}:;{label}\n" for i, label in enumerate(labels)))
    config = online_config(job, tmp_path / "run", max_steps=8, save_steps=8)
    config = replace(config, data=Data(dataset=str(table)), reward=(has_label,), evaluation=Evaluation(eval_prompts=0))
    done = online.run(config)
    said = "5 rows are dropped for an empty column 'label', which the reward needs: t.csv:2, t.csv:3, t.csv:4, t.csv:5, t.csv:6."
    assert said in capsys.readouterr().err
    rows = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    faults = [row["unscored"] for row in rows]
    assert len(rows) == 8 and 0 < sum(faults) <= 12 and {n % 4 for n in faults} == {0}
    state = json.loads(next(done.folder.glob("checkpoints/*/state.json")).read_text())
    assert state["unscored"] == [[n, 16] for n in faults]
    with pytest.raises(RewardError, match=r"rows t\.csv:[789]\b.*JSONDecodeError.*\(tiny_rewards\.py, line"):
        online.run(replace(config, max_unscored=0.0, run=replace(config.run, output_dir=str(tmp_path / "strict"))))


def test_a_long_text_is_displayed_by_its_first_and_last_thousand_characters() -> None:
    tokenizer = tiny.tokenizer(["a b"], 270)
    texts = ["a" * 2000, "a" * 1000 + "c" + "b" * 1000]
    found = [render(tokenizer, Row("a:1", prompt=text))[0].pieces[0].text for text in texts]
    assert found == [texts[0], f"{'a' * 1000} … {'b' * 1000}"]
