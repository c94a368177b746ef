"""Rows as people post them: each form with the row it must become, worked out by hand, and what is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from cases import repeat_for
from transformers import PreTrainedTokenizerFast

from psigrad import cli
from psigrad.cli import flags
from psigrad.compat.foreign_names import load as settings
from psigrad.config import Data, EvalConfig, OnlineConfig, SampleConfig
from psigrad.config.fields import settings_of
from psigrad.config.load import to_dict
from psigrad.config.methods import list_declarations
from psigrad.config.sections import parse_columns
from psigrad.errors import UserError
from psigrad.language.data.dataset_layouts import map_columns, to_model_rows, to_turns
from psigrad.language.data.dataset_rows import Row, RowError
from psigrad.language.data.pairs import encode_pair
from psigrad.language.data.row_cache import pack_row, unpack_row
from psigrad.language.data.sources import from_rows, read_dataset
from psigrad.language.data.templates import example, examples, prompt_ids
from psigrad.language.recipes.scorers import RewardSetup


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


TALK = [human("1?"), gpt("one"), human("2?"), gpt("two")]
OURS = [user("1?"), bot("one"), user("2?"), bot("two")]
UP = {"prompt": "Hi?", "prompt_id": "7", "messages": [user("Hi?"), bot("good")], "score_chosen": 8.0}
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}

# (form, row as posted, what the row must hold)
POSTED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("sharegpt", "sft", {"conversations": TALK}, {"messages": OURS}),
    ("sharegpt, its singular", "sft", {"conversation": OURS, "id": 3}, {"messages": OURS}),
    ("sharegpt, system", "sft", {"conversations": [{"from": "system", "value": "s"}, *TALK]}, {"messages": [system("s"), *OURS]}),
    ("sharegpt for rl", "prompt-only", {"conversations": TALK}, {"prompt": OURS[:3]}),
    ("messages for rl", "prompt-only", {"messages": OURS[:3]}, {"prompt": OURS[:3]}),
    ("messages to score", "prompt-completion", {"messages": OURS}, {"prompt": OURS[:3], "completion": OURS[3:]}),
    ("messages judged", "unpaired-preference", {"messages": OURS, "label": True}, {"prompt": OURS[:3], "completion": OURS[3:]}),
    (
        "sharegpt pair",
        "preference",
        {"conversations": TALK[:3], "chosen": gpt("two"), "rejected": gpt("three")},
        {"prompt": OURS[:3], "completion": [bot("two")], "rejected": [bot("three")]},
    ),
    ("alpaca", "sft", ALPACA, {"prompt": "Add.\n\n1 2", "completion": "3"}),
    ("alpaca without input", "sft", ALPACA | {"input": ""}, {"prompt": "Add.", "completion": "3"}),
    ("alpaca for rl", "prompt-only", ALPACA, {"prompt": "Add.\n\n1 2", "columns": ALPACA}),
    (
        "alpaca with history",
        "sft",
        ALPACA | {"history": [["a", "b"]], "completion": [bot("3")]},
        {"prompt": [user("a"), bot("b"), user("Add.\n\n1 2")], "completion": [bot("3")]},
    ),
    ("alpaca history, text", "sft", ALPACA | {"history": [["a", "b"]]}, {"completion": [bot("3")]}),
    (
        "ultrafeedback_binarized",
        "preference",
        UP | {"chosen": [user("Hi?"), bot("good")], "rejected": [user("Hi?"), bot("bad")]},
        {"prompt": [user("Hi?")], "completion": [bot("good")], "rejected": [bot("bad")]},
    ),
    (
        "the same over two turns",
        "preference",
        {"prompt": "1?", "chosen": OURS, "rejected": [*OURS[:3], bot("three")]},
        {"prompt": OURS[:3], "completion": [bot("two")], "rejected": [bot("three")]},
    ),
    (
        "prompt as text, answers as messages",
        "preference",
        {"prompt": "Hi?", "chosen": [bot("good")], "rejected": [bot("bad")]},
        {"prompt": [user("Hi?")], "completion": [bot("good")], "rejected": [bot("bad")]},
    ),
    (
        "prompt as messages, answers as text",
        "preference",
        {"prompt": [user("Hi?")], "chosen": "good", "rejected": "bad"},
        {"prompt": [user("Hi?")], "completion": [bot("good")], "rejected": [bot("bad")]},
    ),
    (
        "answers that hold a prompt of messages",
        "preference",
        {"prompt": OURS[:1], "chosen": [*OURS[:1], bot("good")], "rejected": [*OURS[:1], bot("bad")]},
        {"prompt": OURS[:1], "completion": [bot("good")], "rejected": [bot("bad")]},
    ),
    ("judged with its prompt", "unpaired-preference", {"prompt": "1?", "completion": OURS[:2], "label": 0}, {"prompt": OURS[:1]}),
    ("system beside messages", "sft", {"system": "s", "messages": OURS}, {"messages": [system("s"), *OURS]}),
    ("system said twice", "sft", {"system": "s", "messages": [system("s"), *OURS]}, {"messages": [system("s"), *OURS]}),
    ("system of orca", "prompt-only", {"system_prompt": "s", "prompt": [user("a")]}, {"prompt": [system("s"), user("a")]}),
    (
        "system of a pair without a prompt",
        "preference",
        {"system": "s", "chosen": [user("a"), bot("b")], "rejected": [user("a"), bot("c")]},
        {"prompt": [system("s"), user("a")], "completion": [bot("b")], "rejected": [bot("c")]},
    ),
    ("system beside both", "sft", {"system": "s", "prompt": "1?", "messages": OURS}, {"messages": [system("s"), *OURS]}),
    ("system is empty", "sft", {"system": "", "messages": OURS}, {"messages": OURS}),
    (
        "content parts",
        "sft",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, bot("c")]},
        {"messages": [user("ab"), bot("c")]},
    ),
    ("prefill", "prompt-only", {"prompt": [user("a"), bot("The answer is")]}, {"prompt": [user("a"), bot("The answer is")]}),
]


@repeat_for(("form", "raw", "holds"), [case[1:] for case in POSTED])
def test_a_posted_row_becomes_the_row_it_means(form: str, raw: dict[str, Any], holds: dict[str, Any]) -> None:
    before = json.dumps(raw)
    (row,) = from_rows([raw], form).rows
    assert {name: getattr(row, name) for name in holds} == holds
    assert json.dumps(raw) == before, "the caller's row stays as it is"


def test_what_was_recognised_is_said_and_counted() -> None:
    said: list[str] = []
    rows = [{"conversations": TALK}, {"conversations": TALK, "system": "s"}, {"messages": OURS}, {"messages": 3}]
    data = Data(dataset=rows, bad_rows="skip")
    read_dataset(data, "sft", rows, "", lambda kind, text, **_: said.append(text))
    assert said[:2] == ["In 2 rows conversations is read as messages.", "In 1 row system is read as the system turn."]
    assert said[2].startswith("1 malformed row is left out: 1 because column 'messages' is a number")
    quiet: list[str] = []
    read_dataset(Data(), "sft", [{"messages": OURS}], "", lambda kind, text, **_: quiet.append(text))
    assert quiet == []


def test_rows_in_trls_own_words_are_left_alone() -> None:
    row = {"prompt": "a", "completion": "b", "instruction": "c", "output": "d", "conversations": TALK, "messages": OURS}
    assert from_rows([row], "sft").rows[0].completion == "b"
    dolly = {"instruction": "a", "context": "b", "response": "c"}
    with pytest.raises(UserError, match="--columns instruction=prompt"):  # its context would vanish
        from_rows([dolly], "sft")


MATHS = {"question": "1+1?", "answer": "2", "extra": {"level": 3, "by": None}}


@pytest.mark.parametrize(
    ("columns", "made"),
    [
        ("question=prompt", {"prompt": "1+1?", "answer": "2", "extra": MATHS["extra"]}),
        ("question=prompt,answer=answer", {"prompt": "1+1?", "answer": "2", "extra": MATHS["extra"]}),
        ("question=prompt, answer=completion", {"prompt": "1+1?", "completion": "2", "extra": MATHS["extra"]}),
        ("prompt={question} Think, first.", {**MATHS, "prompt": "1+1? Think, first."}),
        (r"prompt={question}\nLevel {extra.level},answer=gold", {"prompt": "1+1?\nLevel 3", "gold": "2"}),
        (r"prompt={question} Use \boxed{{x}} {}.", {**MATHS, "prompt": r"1+1? Use \boxed{x} {}."}),
        ("extra.level=level", {**MATHS, "level": 3}),
    ],
)
def test_columns_are_renamed_and_made(columns: str, made: dict[str, Any]) -> None:
    found = map_columns(MATHS, parse_columns(columns), "x:1")
    assert {name: found[name] for name in made} == made and ("question" in found) == (not columns.startswith("question"))
    assert from_rows([MATHS | {"prompt": "p"}], "prompt-only", columns=parse_columns(columns)).rows


def test_all_that_a_mapping_names_in_vain_is_named_at_once() -> None:
    row = {"question": "q", "final_answer": "a"}
    with pytest.raises(UserError, match=r"'qestion' is named in columns but is not in the row, nor is 'level' \(found: question"):
        from_rows([row], "prompt-only", columns=parse_columns("qestion=prompt,answer={level}"))
    for form, column in (("prompt-only", "answer"), ("sft", "completion")):
        with pytest.raises(UserError, match=rf"give --columns question=prompt,final_answer={column}\.$"):
            from_rows([row], form)
        assert from_rows([row], form, columns=parse_columns(f"question=prompt,final_answer={column}")).rows
    with pytest.raises(UserError, match=r"give --columns question=prompt\.$"):
        from_rows([row | {"answer": "a"}], "prompt-only")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("qestion=prompt", ["'qestion'", "found: question, answer, extra", "did you mean 'question'"]),
        ("prompt=question", ["'prompt'", "write question=prompt"]),
        ("prompt={quest} a", ["'quest'", "found: question"]),
        ("prompt={extra}", ["'extra'", "text and numbers"]),
        ("prompt={extra.by}", ["'extra.by'", "is empty"]),
        ("extra.none=x", ["'extra.none'", "is not in the row"]),
    ],
)
def test_a_wrong_mapping_names_the_columns_that_are_there(columns: str, said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        from_rows([MATHS], "prompt-only", columns=parse_columns(columns))
    assert [part for part in ("rows:1", *said) if part not in str(caught.value)] == [], caught.value


def test_a_mapping_is_a_flag_a_file_and_python(tmp_path: Path) -> None:
    made = {"question": "prompt", "prompt2": "{question}, run.seed=3?"}
    typed = flags.parse(OnlineConfig, "grpo", ["--columns", "question=prompt,prompt2={question}, run.seed=3?", "run.seed=2"])
    assert typed.data.columns == {"question": "prompt", "prompt2": "{question}", "run.seed": "3?"} and typed.run.seed == 2
    (tmp_path / "a.yaml").write_text(f"data: {{columns: {json.dumps(made)}}}")
    assert settings(OnlineConfig, tmp_path / "a.yaml").data.columns == made
    assert settings(OnlineConfig, flags={"columns": made}).data.columns == made
    assert settings(OnlineConfig, flags={"data.columns": "a=b"}).data.columns == {"a": "b"}
    config = settings(OnlineConfig, flags={"columns": made})
    assert to_dict(config)["data"]["columns"] == made and settings(OnlineConfig, flags=to_dict(config)) == config
    (tmp_path / "flat.yaml").write_text(f"columns: {json.dumps(made)}\nlearning_rate: 1e-5\n")
    flat = settings(OnlineConfig, tmp_path / "flat.yaml")
    assert flat.data.columns == made and flat.optim.learning_rate == 1e-5
    for words in (
        ["--columns", "a=prompt", "B.c=answer"],
        ["--columns=a=prompt", "B.c=answer"],
        ["--columns", "a=prompt,B.c=answer"],
    ):
        parsed = flags.parse(OnlineConfig, "grpo", [*words, "run.seed=2", "--max-steps", "3"])
        assert parse_columns(parsed.data.columns) == {"a": "prompt", "B.c": "answer"} and parsed.run.seed == 2
    for wrong in ("question", "=prompt", "question="):
        with pytest.raises(UserError, match="expected pairs such as"):
            settings(OnlineConfig, flags={"columns": wrong})


_TYPES = re.compile("Mapping|dict")
MAPPINGS = {name for name, setting in settings_of(OnlineConfig).items() if _TYPES.search(str(setting.type)) and "." in name}


@pytest.mark.parametrize("name", sorted(MAPPINGS))
def test_every_flat_name_of_a_yaml_file_takes_a_mapping(name: str, tmp_path: Path) -> None:
    leaf, value = name.rpartition(".")[2], {"question": "prompt"}
    (tmp_path / "a.yaml").write_text(f"{leaf}: {json.dumps(value)}\n")
    (tmp_path / "b.yaml").write_text(f"{name.partition('.')[0]}: {{{leaf}: {json.dumps(value)}}}\n")
    flat, nested = (settings(OnlineConfig, tmp_path / file) for file in ("a.yaml", "b.yaml"))
    assert flat == nested != OnlineConfig()


def test_rows_are_counted_by_reason_and_an_empty_cell_is_no_missing_column(tmp_path: Path) -> None:
    """An empty message has one fate in CSV, JSON lines and Parquet, and the reason names the column of the file."""
    rows = [{"q": "", "a": "1"}, {"q": "2?", "a": None}, {"q": None, "a": "3"}, {"q": "4?", "a": "4"}]
    table = "q,a\n" + "".join(f"{row['q'] or ''},{row['a'] or ''}\n" for row in rows)
    (tmp_path / "rows.csv").write_text(table)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for name, line in (("rows.csv", 2), ("rows.jsonl", 1), ("rows.parquet", 1)):
        said: list[str] = []
        mapping = {"prompt": "Classify: {q}", "a": "completion"}
        data = Data(dataset=str(tmp_path / name), columns=mapping, bad_rows="skip")
        read = read_dataset(data, "sft", data.dataset, "train", lambda kind, text, said=said, **_: said.append(text))
        assert [(row.prompt, row.completion) for row in read.rows] == [("Classify: 4?", "4")]
        assert said == [
            f"3 malformed rows are left out: 2 because column 'q' is empty, but columns builds text from it ({name}:{line}); "
            f"1 because column 'a' is empty (null); it must be a string or a list of messages ({name}:{line + 1})."
        ]


def test_a_reward_gets_a_copied_column_and_a_renamed_one_is_gone() -> None:
    row = {"q": "2?", "a": ["2", "two"]}
    (copied,) = from_rows([row], "prompt-only", columns=parse_columns("q=prompt,answer={a}")).rows
    (renamed,) = from_rows([row], "prompt-only", columns=parse_columns("q=prompt,a=answer")).rows
    assert copied.columns == {"a": row["a"], "answer": row["a"]} and renamed.columns == {"answer": row["a"]}
    setup = RewardSetup.of(OnlineConfig(reward=("exact",), data=Data(columns="q=prompt,answer=gold")))
    (gone,) = from_rows([{"q": "2?", "answer": "2"}], "prompt-only", columns=parse_columns("q=prompt,answer=gold")).rows
    with pytest.raises(
        UserError, match=r"needs the column 'answer', but data.columns renames it to 'gold'.*write gold=\{answer\}"
    ):
        setup.judgeable([gone])


def test_every_command_that_reads_rows_takes_a_mapping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """By their settings those of every method, eval, sample, check, plan and compare; the others by mapped rows."""
    for cls in {method.settings for method in list_declarations().values()} | {OnlineConfig, EvalConfig, SampleConfig}:
        assert parse_columns(flags.parse(cls, "it", ["--columns", "question=prompt"]).data.columns) == {"question": "prompt"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "6 times 7?", "said": "42", "truth": "42", "rating": 1}) + "\n")
    mapped = ["--dataset", str(file), "--columns", "question=prompt", "said=completion", "truth=answer"]
    assert cli.main(["score", "--reward", "exact", *mapped]) == 0
    assert json.loads(capsys.readouterr().out)["reward"] == 1.0
    assert cli.main(["score", "--attack", "--reward", "exact", *mapped]) == 0
    tried = capsys.readouterr().out
    assert "as it is                     0 of 1 misjudged" in tried and "unscored" not in tried
    seen: list[Any] = []
    monkeypatch.setattr("psigrad.language.recipes.reward.score_rows", lambda *given, **more: seen.append(more["columns"]) or [])
    monkeypatch.setattr("psigrad_extras.datasets.sample.convert", lambda **given: seen.append(given["columns"]) or 1 / 0)
    assert cli.main(["score", "--model", "m", *mapped]) == 0
    with pytest.raises(ZeroDivisionError):
        cli.main(["pairs", *mapped])
    assert seen == [",".join(mapped[-3:])] * 2


def test_a_row_without_a_prompt_says_how_to_map_one() -> None:
    with pytest.raises(UserError, match=r"found: question, answer.*--columns question=prompt"):
        from_rows([{"question": "a", "answer": "b"}], "prompt-only")


def test_a_plain_prompt_is_one_user_turn_of_a_chat_model(plain_chatml: Any, bare: Any) -> None:
    row = Row("x:1", prompt="hello\n", completion="there", rejected="world", columns={"answer": 1})
    turns = to_turns(plain_chatml, row)
    said = Row("x:1", [user("hello")], [bot("there")], rejected=[bot("world")], columns={"answer": 1})
    assert turns == replace(said, plain_prompt="hello\n") and turns.dataset_prompt == "hello\n"
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert plain_chatml.decode(prompt_ids(plain_chatml, turns)) == text
    assert to_turns(plain_chatml, row, plain_prompts=True) is row and to_turns(bare, row) is row
    assert to_turns(plain_chatml, turns) is turns
    rendered = Row("x:2", prompt=text)
    assert to_turns(plain_chatml, rendered) is rendered, "it would be rendered twice"


def test_a_system_column_beside_a_plain_prompt_is_used_with_a_template_and_without(plain_chatml: Any, bare: Any) -> None:
    row = from_rows([{"system": "be brief", "prompt": "hello"}], "prompt-only").rows[0]
    assert to_turns(plain_chatml, row).prompt == [system("be brief"), user("hello")]
    assert to_turns(bare, row).prompt == "be brief\n\nhello" and to_turns(bare, row).dataset_prompt == "hello"


def test_which_way_plain_prompts_go_is_said(plain_chatml: Any, bare: Any) -> None:
    def said(tokenizer: Any, rows: list[Row], plain: bool = False) -> list[str]:
        told: list[str] = []
        to_model_rows(tokenizer, [rows, []], plain, lambda kind, text, **_: told.append(text))
        return told

    rows = [Row("x", prompt="a"), Row("x", prompt="<|im_start|>b"), Row("x", prompt=[user("c")])]
    one = "1 plain prompt is sent as a user turn of the chat template; --plain-prompts sends them unchanged."
    assert said(plain_chatml, rows) == [
        f"{one} 1 plain prompt is sent unchanged: the prompts hold special tokens, as rendered text does."
    ]
    assert said(plain_chatml, rows, plain=True) == ["2 plain prompts are sent unchanged: plain_prompts is set."]
    assert said(bare, rows) == ["2 plain prompts are sent unchanged: the tokenizer has no chat template."]
    assert said(bare, rows, plain=True) == [], "that is the only way"
    assert said(plain_chatml, rows[2:]) == []
    begun = [Row("x", prompt=[user("a"), bot("b")])]
    assert said(plain_chatml, begun) == ["1 prompt ends with an assistant's turn, which the model continues."]


@pytest.mark.parametrize("template", ["plain_chatml", "marked_chatml"])
def test_the_beginning_of_an_answer_is_continued(template: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(template)
    row = Row("x", prompt=[user("hello"), bot("the cat")], completion=[bot(" sat")])
    head = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe cat"
    assert tokenizer.decode(prompt_ids(tokenizer, row)) == head
    built = example(tokenizer, row)
    assert tokenizer.decode(built.ids) == f"{head} sat<|im_end|>\n"
    assert tokenizer.decode([i for i, trained in zip(built.ids, built.mask, strict=True) if trained]) == " sat<|im_end|>"


def test_calls_and_answers_in_sharegpts_words_are_a_tools() -> None:
    call = '{"name": "price", "arguments": {"item": "figs"}}'
    talk = [human("figs?"), {"from": "function_call", "value": call}, {"from": "observation", "value": "7"}, gpt("7")]
    (row,) = from_rows([{"conversations": talk}], "sft").rows
    assert row.messages is not None and [turn["role"] for turn in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "price", "arguments": {"item": "figs"}}
    with pytest.raises(UserError, match="function_call that is not JSON"):
        from_rows([{"conversations": [human("figs?"), {"from": "function_call", "value": "price(figs)"}]}], "sft")


def test_only_rows_that_are_read_are_counted_as_recognised() -> None:
    bad = [{"from": "narrator", "value": "Once"}, gpt("one")]
    assert from_rows([{"conversations": TALK}, {"conversations": bad}], "sft", bad_rows="skip").recognised == {
        "conversations is read as messages": 1
    }


def test_two_columns_cannot_have_one_name() -> None:
    with pytest.raises(UserError, match="The columns a, b are all renamed to prompt; rename only one of them"):
        from_rows([{"a": "1", "b": "2"}], "prompt-only", columns={"a": "prompt", "b": "prompt"})
    assert map_columns({"a": 1, "b": 2}, {"a": "b", "b": "a"}, "x:1") == {"a": 2, "b": 1}, "two may change places"


@pytest.mark.parametrize("template", ["bare", "plain_chatml"])
def test_a_row_that_was_read_for_a_model_is_not_read_again(template: str, request: pytest.FixtureRequest) -> None:
    """Reward models read rows that were read before: a system column must not be said twice."""
    tokenizer = request.getfixturevalue(template)
    once = to_turns(tokenizer, Row("x", prompt="hello", completion="the cat", columns={"system": "Be brief."}))
    assert to_turns(tokenizer, once) == once
    assert tokenizer.decode(prompt_ids(tokenizer, once)).count("Be brief.") == 1


@pytest.mark.parametrize(
    ("form", "raw", "at"),
    [
        ("sft", {"conversations": [{"from": "narrator", "value": "a"}, *TALK]}, "'conversations[0].from' is 'narrator'"),
        ("sft", {"conversations": [TALK[0], {"from": "gpt", "value": ""}]}, "'conversations[1].value' is an empty string"),
        ("prompt-only", {"messages": [{"role": "narrator", "content": "a"}, user("b")]}, "'messages[0].role' is 'narrator'"),
        ("prompt-completion", {"messages": [user("a"), bot("")]}, "'messages[1].content' is an empty string"),
        ("prompt-completion", {"messages": [user("a"), 3]}, "'messages[1]' is a number"),
        ("prompt-completion", {"messages": [3, bot("a")]}, "'messages[0]' is a number"),
        ("prompt-completion", {"messages": [bot("a")]}, "'messages' ends with the role 'assistant'"),
        ("prompt-completion", {"instruction": "", "output": "b"}, "'instruction' is an empty string"),
        ("prompt-completion", {"instruction": "a", "output": 3}, "'output' is a number"),
        ("preference", {"chosen": [user(""), bot("a")], "rejected": [user(""), bot("b")]}, "'chosen[0].content' is an empty"),
        ("preference", {"chosen": [user("a"), bot("")], "rejected": [user("a"), bot("b")]}, "'chosen[1].content' is an empty"),
        ("sft", {"prompt": [{"role": "narrator", "content": "a"}], "completion": [bot("b")]}, "'prompt[0].role' is 'narrator'"),
    ],
)
def test_a_fault_is_named_where_the_row_has_it(form: str, raw: dict[str, Any], at: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"rows:1: column {at}")):
        from_rows([raw], form)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"question": "prompt", "prompt": "{answer}"},
            r"columns makes 'prompt' twice: from 'question' and from the template '\{answer\}'",
        ),
        ("question=prompt,prompt={answer}", "columns makes 'prompt' twice"),
        ("prompt={question},prompt={answer}", "columns has 'prompt' twice"),
    ],
)
def test_one_column_is_made_in_one_way(given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        map_columns({"question": "1?", "answer": "2"}, parse_columns(given), "rows:1")


def test_a_template_may_change_a_column_in_place() -> None:
    assert map_columns({"prompt": "1?"}, parse_columns("prompt={prompt} Think."), "rows:1") == {"prompt": "1? Think."}


MOODY = {"from": "gpt", "value": "two", "mood": "gay"}


@pytest.mark.parametrize(
    ("form", "raw", "at"),
    [
        ("sft", {"conversations": [*TALK, TALK[0], MOODY]}, "conversations[5].mood"),
        ("sft", {"system": "Be brief.", "conversations": [*TALK, TALK[0], MOODY]}, "conversations[5].mood"),
        ("prompt-completion", {"conversations": [*TALK, TALK[0], MOODY]}, "conversations[5].mood"),
        ("prompt-completion", {"conversations": [{**TALK[0], "mood": "gay"}, TALK[1]]}, "conversations[0].mood"),
        (
            "preference",
            {"chosen": [user("a"), bot("b")], "rejected": [user("a"), {**bot("c"), "mood": "gay"}]},
            "rejected[1].mood",
        ),
        (
            "preference",
            {"prompt": [user("a")], "chosen": [{**bot("c"), "mood": "gay"}], "rejected": [bot("b")]},
            "chosen[0].mood",
        ),
        ("sft", {"messages": [user("a"), {**bot("b"), "mood": "gay"}]}, "messages[1].mood"),
    ],
)
def test_so_is_what_the_chat_template_refuses_later(
    form: str, raw: dict[str, Any], at: str, plain_chatml: PreTrainedTokenizerFast
) -> None:
    (row,) = from_rows([raw], form).rows
    assert unpack_row(pack_row(row)[0], []).raw_paths == row.raw_paths, "rows that are kept know it too"
    with pytest.raises(RowError, match=re.escape(f"rows:1: column '{at}' is dropped by the chat template")):
        encode_pair(plain_chatml, row) if form == "preference" else examples(plain_chatml, row)


def test_a_value_that_vanishes_is_called_what_the_file_calls_it(build: Callable[..., PreTrainedTokenizerFast]) -> None:
    deaf = (
        "{% for m in messages %}{{ '<|im_start|>' + ('' if 'cat' in m['content'] else m['content']) + '<|im_end|>' }}{% endfor %}"
    )
    deaf += "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    (row,) = from_rows([{"conversations": [TALK[0], gpt("the cat")]}], "sft").rows
    with pytest.raises(RowError, match=re.escape("rows:1: column 'conversations[1].value' is dropped")):
        examples(build(deaf), row)
