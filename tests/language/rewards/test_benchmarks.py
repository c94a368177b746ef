"""Rows of the shape of GSM8K, MATH and MMLU: prompts letter by letter, comparisons by hand, and what stands beside a score."""

from __future__ import annotations

import json

import pytest
import torch

from psigrad.cli import main
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.models import tiny
from psigrad.language.rewards.benchmarks import BenchmarkReward, Choice, as_prompts, read_choice
from psigrad.language.rewards.math_answers import Math

GSM = [
    {"question": "2 and 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "1,000 and {1}?", "answer": "So it is 1001.\n#### 1,001"},
]
MATH = [{"problem": "What is $x$ if $2x=3$?", "solution": r"So $x=\boxed{\frac{3}{2}}$.", "level": "Level 1", "type": "Algebra"}]
MMLU = [
    {"question": "A fruit?", "choices": ["rock", "apple"], "answer": 1, "subject": "high_school_biology"},
    {"question": "Wet?", "A": "rock", "B": "sea", "answer": "B"},
]


def rows(given):
    return [Row(f"f.jsonl:{n}", prompt="", columns=columns) for n, columns in enumerate(given, 1)]


def test_prompts_by_hand():
    (gsm,) = as_prompts("gsm8k", rows(GSM)[1:], rows(GSM)[:1])
    assert gsm.prompt == ("Question: 2 and 3?\nAnswer: 2 + 3 = <<2+3=5>>5\n#### 5\n\nQuestion: 1,000 and {1}?\nAnswer:")
    (math,) = as_prompts("math", rows(MATH), [])
    assert math.prompt == "Problem:\nWhat is $x$ if $2x=3$?\n\nSolution:"
    assert math.columns["answer"] == MATH[0]["solution"]
    first, second = as_prompts("mmlu", rows(MMLU), rows(MMLU)[:1])
    asked = "A fruit?\nA. rock\nB. apple\nAnswer:"
    head = "The following are multiple choice questions (with answers) about high school biology.\n\n"
    assert first.prompt == f"{head}{asked} B\n\n{asked}"
    assert second.prompt == f"{asked} B\n\nWet?\nA. rock\nB. sea\nAnswer:"
    assert (first.columns["answer"], second.columns["answer"]) == ("B", "B")
    (gap,) = as_prompts("mmlu", rows([{"question": "Wet?", "A": "rock", "B": "sand", "C": "", "D": "sea", "answer": "(d)"}]), [])
    assert gap.prompt == "Wet?\nA. rock\nB. sand\nD. sea\nAnswer:" and gap.columns["answer"] == "D"


@pytest.mark.parametrize(
    ("name", "columns", "said"),
    [
        ("gsm8k", {"question": "?"}, "f.jsonl:1: column 'answer' is missing in a row of the benchmark gsm8k .found: question"),
        ("mmlu", {"question": "?", "choices": ["a", "b"], "answer": 2}, "answer' is 2, which is not one of the 2 choices"),
        ("mmlu", {"question": "?", "answer": 2}, "column 'choices' is missing"),
        ("mmlu", {"question": "?", "choices": ["a", "b"], "answer": ""}, "column 'answer' is missing"),
        ("mmlu", {"question": "?", "choices": ["a", "b"], "answer": " "}, "column 'answer' is missing"),
        (
            "mmlu",
            {"question": "?", "choices": ["a", "b", "c"], "answer": "BC"},
            "answer' is 'BC', which is not one of the 3 choices",
        ),
        (
            "mmlu",
            {"question": "?", "choices": [*"abcdefghijkl"], "answer": 11},
            "answer' is 11, which is not one of the 10 choices",
        ),
        ("mmlu", {"question": "?", "A": "a", "B": "b", "D": "d", "answer": 2}, "answer' is 2, which is not one of the 3 choices"),
        ("math", {"problem": "?", "solution": " "}, "column 'solution' is missing"),
    ],
)
def test_rows_of_another_shape_are_refused_by_their_place(name, columns, said):
    with pytest.raises(UserError, match=said):
        as_prompts(name, rows([columns]), [])


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (" B\n\nNext?\nA. x\nAnswer: C", "B"),
        ("(c)", "C"),
        ("A rock is dry, so the answer is B.", "B"),
        ("The answer is not A; the answer is: **D**", "D"),
        (r"Thus \boxed{\text{C}}", "C"),
        ("Answer: B because", "B"),
        ("__B__", "B"),
        ("The answer is _C_.", "C"),
        ("I think it's wet", "I"),
        ("It is wet", ""),
        ("", ""),
    ],
)
def test_the_letter_that_is_chosen(text, letter):
    assert read_choice(text) == letter


def test_comparisons_by_hand():
    assert Choice()(["B", "the answer is c", "D", "D"], answer=[1, "(C)", None, " "]) == [1.0, 1.0, None, None]
    Choice().check_row({"answer": " "})
    with pytest.raises(UserError, match="the row has no answer"):
        BenchmarkReward("mmlu", Choice(), "").check_row({"answer": " "})
    with pytest.raises(UserError, match="neither a letter nor the number"):
        Choice().check_row({"answer": "apple"})
    gsm = BenchmarkReward("gsm8k", Math(), "\n\nQuestion:")
    texts = ["It is 1001.\n#### 1001\n\nQuestion: 5 and 7?\nAnswer: 12", "1001 or 12"]
    assert gsm(texts, answer=[GSM[1]["answer"]] * 2) == [1.0, 0.0]
    assert Math()(texts[:1], answer=[GSM[1]["answer"]]) != [1.0], "the next question is what the cut is for"
    assert BenchmarkReward("math", Math(), "")([r"\boxed{1.5}"], answer=[MATH[0]["solution"]]) == [1.0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "model"
    tokenizer = tiny.tokenizer(["Question: what and where?\nAnswer: this"], 270)
    tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, max_length=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_settings_stand_beside_the_score(model, tmp_path, capsys):
    file, output = tmp_path / "gsm.jsonl", tmp_path / "out.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in GSM))
    asked = ["eval", "--model", str(model), "--dataset", str(file), "--benchmark", "gsm8k", "--num-fewshot", "1",
             "--eval-temperature", "0", "--max-completion-length", "4"]  # fmt: skip
    assert main([*asked, "--output", str(output)]) == 0
    out = capsys.readouterr().out
    for line in (r"template: Question: {question}\nAnswer:", "sent: as plain text", "extraction: math, of the text before",
                 "few-shot: 1 from the first rows of the dataset", "decoding: temperature 0 (greedy), top_p 1"):  # fmt: skip
        assert line in out, line
    assert "gsm8k/low" in out and "gsm8k/high" in out
    found = json.loads(output.read_text())
    assert found["figures"]["eval/prompts"] == 1 and found["settings"]["rows"] == 1
    assert found["completions"][0]["source"] == "gsm.jsonl:2" and "2 + 3 = <<2+3=5>>5" in found["completions"][0]["prompt"]
    assert main([*asked[:-6], "--num-fewshot", "2"]) == 2
    assert "num_fewshot is 2, but there are 2 rows" in capsys.readouterr().err


def test_mmlu_by_likelihood_takes_the_letter_that_the_model_finds_likeliest(tmp_path, capsys):
    tokenizer = tiny.tokenizer(["What is it? A. B. C. D. Answer:"], 300)
    model = tiny.model("qwen3", len(tokenizer), max_length=256)
    model.save_pretrained(tmp_path / "model")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    asked = [{"question": f"What is {n}?", "choices": ["a", "b", "c", "d"][: 2 + n % 3], "answer": n % 2} for n in range(12)]
    (tmp_path / "mmlu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    command = ["eval", "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "mmlu.jsonl"), "--benchmark", "mmlu"]
    assert main([*command, "--likelihood", "--output", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    want, model = [], model.requires_grad_(False)
    for row, prompt in zip(asked, as_prompts("mmlu", rows(asked), []), strict=True):
        logits = model(torch.tensor([tokenizer(prompt.prompt)["input_ids"]])).logits[0, -1]
        # a letter behind a space is two tokens of this tokenizer, of which the first is shared
        ids = [tokenizer(f"{prompt.prompt} {letter}")["input_ids"] for letter in "ABCD"[: len(row["choices"])]]
        scores = [float(model(torch.tensor([one])).logits[0].log_softmax(-1)[-2, one[-1]]) for one in ids]
        assert len({tuple(one[:-1]) for one in ids}) == 1 and logits.isfinite().all()
        want.append("ABCD"[scores.index(max(scores))])
    assert [one["completion"] for one in found["completions"]] == want and len(set(want)) > 1
    right = [letter == "AB"[row["answer"]] for letter, row in zip(want, asked, strict=True)]
    assert [one["score"] for one in found["completions"]] == [float(one) for one in right]
    assert found["settings"]["decoding"] == "none: the likeliest letter"
    assert main([*command, "--likelihood", "--best-of", "4"]) != 0 and "one answer per question" in capsys.readouterr().err
    # rows of one's own: with letters they are answered so too, and a row without is refused by its place
    lettered = {"prompt": "What is it?", "A": "a", "B": "b", "answer": "B"}
    own = [*command[:-3], str(tmp_path / "own.jsonl"), "--reward", "choice", "--likelihood"]
    for second, status, said in (
        (lettered, 0, ""),
        ({**lettered, "A": "", "B": None}, 2, "own.jsonl:2: column 'choices' is missing"),
    ):
        (tmp_path / "own.jsonl").write_text(json.dumps(lettered) + "\n" + json.dumps(second) + "\n")
        assert main(own) == status and said in (err := capsys.readouterr().err) and "no effect" not in err
