"""Writes what each built-in reward takes as equal into docs/rewards.md, by running them: python docs/make/rewards.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from psigrad.language.rewards import builtin
from psigrad.language.rewards.code import same_output
from psigrad.language.rewards.code_asserts import take_apart
from psigrad_extras.connect.endpoint import NoAnswerError
from psigrad_extras.judges.instructions import KINDS, IFEval
from psigrad_extras.judges.rubric import score_in

PAGE = Path(__file__).parents[1] / "rewards.md"
MARKS = ("<!-- examples: python docs/make/rewards.py -->\n", "<!-- end of examples -->\n")

# Of each reward a rule, then (answer, completion) that it rewards, then those that it does not.
COMPARED = {
    "exact": (
        "The completion is an accepted answer, letter by letter, but for white space at its ends.",
        [("42", "42"), ("42", " 42\n"), ("Paris", "Paris"), ("a, b", "a, b"), ("1/2", "1/2")],
        [("42", "42."), ("42", "The answer is 42"), ("Paris", "paris"), ("a, b", "a,b"), ("1/2", "0.5")],
    ),
    "numeric": (
        r"The last number of the completion (of its last `\boxed{…}`, its last `<answer>`, or behind its last `####`, if any) "
        "is the answer. Whole numbers must be met exactly, others within `tolerance` (1e-6) of their size. Signs, currencies, "
        "thousands, powers, fractions, mixed numbers and percents are read; times and ratios are equal part by part. 50% is 50%, "
        "0.5 and 50. Marks of Markdown around it (`**72**`, `_72_`) are no part of it.",
        [
            ("42", "So he has 42 apples."),
            ("1234567", "1,234,567"),
            ("-5", "-$5"),
            (r"\frac{1}{2}", "0.5"),
            ("1.5", "1 1/2"),
            ("10^6", "1000000"),
            ("50%", "0.5"),
            ("12:30", "at 12:30"),
            ("5", r"\boxed{5}, as 2 + 3 = 5; it took 1 step"),
            ("1/3", "0.3333333"),
        ],
        [
            ("7006652", "7006653"),
            ("-5", "$5"),
            ("1/2", "3/2"),
            ("1/2", "1 1/2"),
            ("6", "10^6"),
            ("50%", "5%"),
            ("12:30", "1:30"),
            ("3", r"2\sqrt{3}"),
            ("1/3", "0.333"),
            ("5", "5, or perhaps 6"),
        ],
    ),
    "math": (
        r"The completion's answer is its last `\boxed{…}`, what stands behind `####`, in its last `<answer>`, behind “the "
        "answer is”, its last LaTeX between marks, or its last line. Numbers are compared as by `numeric`, words as words, all "
        "else by math-verify: two expressions are equal where their difference is 0, decimals to six places. The order of a list "
        "or set does not count, that of a pair does. A unit may be left out, and counts where both name one.",
        [
            (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
            ("1, 2, 3", "The roots are 3, 2 and 1."),
            (r"(0,1]", r"The answer is $x \in (0,1]$."),
            ("x^2+2x+1", r"\boxed{(x+1)^2}"),
            (r"1{,}000", "1000"),
            (r"5\text{ cm}", "5 centimetres"),
            (r"\text{Monday}", "It is Monday."),
            ("B", "(B) Paris"),
            ("x=5", "5"),
            (r"2\pi", "2π"),
        ],
        [
            (r"2\sqrt{3}", r"\boxed{2}"),
            ("1, 2, 3", r"\boxed{1, 2}"),
            (r"(0,1]", "[0,1]"),
            ("x^2+2x+1", "x^2+1"),
            (r"1{,}000", "1"),
            (r"5\text{ cm}", "5 km"),
            (r"\text{Monday}", "It is not Monday."),
            ("B", "A, B, C, D"),
            ("x=5", r"\boxed{y=5}"),
            ("(1,2)", r"\boxed{(2,1)}"),
        ],
    ),
    "format": (
        "One block of thinking, then one answer, with none of these tags inside and only white space around them. It reads no "
        "answer. Where the chat template opens the thought itself (DeepSeek-R1, Qwen3.5), its `<think>` is read before the "
        "completion; a `pattern` of your own is held against the completion alone.",
        [
            ("", "<think>2 + 2</think><answer>4</answer>"),
            ("", "<think>2 + 2</think>\n\n<answer>4</answer>\n"),
            ("", "<think>first\nthen</think> <answer>4</answer>"),
            ("", "<think></think><answer></answer>"),
            ("", "<think>x < 3</think><answer><b>4</b></answer>"),
        ],
        [
            ("", "<answer>4</answer>"),
            ("", "<think>a</think> so <answer>4</answer>"),
            ("", "<think>a</think><think>b</think><answer>4</answer>"),
            ("", "<think>a</think><answer>4</answer><answer>5</answer>"),
            ("", "<think>a <answer>3</answer></think><answer>4</answer>"),
        ],
    ),
    "choice": (
        "The letter that the completion chooses: its first line if that is a letter, else the last one in a `\\boxed{…}` or "
        "behind “answer is”, else the one that it begins with. The answer is a letter, or the number of a choice from 0.",
        [
            ("B", "B"),
            ("1", " (b)"),
            ("C", "A rock is dry, so the answer is C."),
            ("D", r"Thus \boxed{\text{D}}"),
            ("A", "Answer: A, the rock"),
        ],
        [("B", "A"), ("1", "C"), ("C", "It is wet."), ("D", "The answer is D? No, the answer is A."), ("A", "")],
    ),
}
# Of each kind of instruction its parameters, a completion that follows it, and one that does not.
INSTRUCTIONS = {
    "keywords:existence": ({"keywords": ["river"]}, "A RIVER", "A lake"),
    "keywords:frequency": ({"keyword": "sun", "frequency": 2, "relation": "at least"}, "sun and Sunday", "sun"),
    "keywords:forbidden_words": ({"forbidden_words": ["sure"]}, "Surely not.", "I am sure."),
    "keywords:letter_frequency": ({"letter": "z", "let_frequency": 2, "let_relation": "less than"}, "Zip", "Zigzag"),
    "language:response_language": ({"language": "de"}, "", ""),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, "He ran. Mr. Fox hid.", "Mr. Fox ran."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, "two words", "these three words"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, "First.\n\nThen, a", "First.\n\nAnd then"),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name], [address]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye.\n\nP.S. more", "Bye."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n- two", "1. one\n2. two"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*one* and **two**", "*one*"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2}, "Section 1\na\nSection 2\nb", "Section 1\na"),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<On rivers>>", "# On rivers"),
    "combination:two_responses": ({}, "one\n******\ntwo", "one\n******\none"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hello."}, "Say hello. Hello!", "Hello!"),
    "startend:end_checker": ({"end_phrase": "Is there more?"}, "Done. Is there more?", "Is there more? No."),
    "startend:quotation": ({}, '"A river."', 'A "river".'),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, "I SAY so", "I say so"),
    "change_case:english_capital": ({}, "", ""),
    "change_case:english_lowercase": ({}, "", ""),
    "punctuation:no_comma": ({}, "Rivers; seas.", "Rivers, seas."),
}  # fmt: skip
REFUSED = {
    "numeric": [r"2\sqrt{3}", "1, 2, 3", "x = 5", "5 apples", "12,34"],
    "math": ["2x +", "1 2 3", "5 if n is even", "???", "9^{9^{9}}"],
}
SIMILAR = [("kitten", text) for text in ("kitten", "kitten ", "sitten", "sitting", "Kitten", "The answer is kitten")]
SIMILAR += [("42", "43"), ("42", "24"), ("42", "")]
# Of `code`: a test, a value of f(7) that passes it, and one that does not; then what a program should print, and the same.
TESTED = [
    ("assert f(7) == 49", 49, 48),
    ("assert f(7) == 49", 49.0, "49"),
    ("assert f(7) == 0.3", 0.1 + 0.2, 0.301),
    ("assert f(7) == [1, 2]", [1, 2], (1, 2)),
    ("assert f(7) == {1, 2}", {2, 1}, [1, 2]),
    ("assert f(7) == {'a': [0.5]}", {"a": [0.5]}, {"a": [0.5], "b": 0}),
    ("assert f(7) is True", True, 1),
    ("assert f(7) is None", None, 0),
    ("assert sorted(f(7)) == [1, 2]", [2, 1], [2, 1, 1]),
    ("assert abs(f(7) - 0.5) < 0.01", 0.505, 0.52),
]
PRINTED = [
    ("49", "49\n", "49.0.0"),
    ("1 2 3", "1 2 3  \n", "1\n2\n3"),
    ("1\n2", "1 \n2\n", "1\n\n2"),
    ("0.333333", "0.3333331", "0.33"),
    ("2.50", "2.5", "2.51"),
    ("1e-7", "0.0000001", "0.1"),
    ("1000000.0", "1000000", "1000003"),
    ("7006652", "7006652", "7006653"),
    ("Yes", "Yes", "yes"),
    ("case 1: 0.5", "case 1: 0.50", "Case 1: 0.5"),
]
# Of `rubric`: replies of a judge behind an endpoint, and the score of 5 that is read; None: the completion stays unscored.
REPLIES = [
    ("Clear and right. Score: 4", 4.0),
    ("Score: 0", 0.0),
    ("**Score:** 3", 3.0),
    ("score = 2.5", 2.5),
    ("Score: 2? No: it is right after all. Score: 5", 5.0),
    ("SCORE 1.", 1.0),
    ("Score: 4/5", 4.0),
    ("Score: 9", None),
    ("I would give it four out of five.", None),
    ("4", None),
]
# Of `reasoning_gym`: (task, answer, metadata) and completions; its scorers give part marks in ways of their own.
GYM = [
    ("spell_backward", "sun", {}, ("sun", "SUN", "snu", "The answer is sun")),
    ("gcd", "3", {}, ("3", "3.", "The answer is 3", "4")),
    ("chain_sum", "42", {}, ("42", "42.0", "The answer is 42", "43")),
    ("calendar_arithmetic", "Yes", {"task": "is_leap_year"}, ("Yes", "yes", "Yes.", "No")),
    ("countdown", "6*7", {"numbers": [6, 7], "target": 42}, ("7*6", "6 * 7", "42", "6*6")),
]
LENGTHS = (0, 1, 64, 128, 192, 193, 200, 224, 255, 256)


def code(text: str) -> str:
    """Text as code in a cell of a table."""
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    return f"`{shown}`" if shown.strip() else f"“{shown}”"


def score(name: str, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
    """What the reward gives to (answer, completion)."""
    found: list[float | None] = builtin.NAMES[name](completions=[c for _, c in pairs], answer=[a for a, _ in pairs])
    return found


def compared(name: str) -> list[str]:
    """The section of a reward that says right or wrong. Raises where it says anything else than is expected."""
    rule, right, wrong = COMPARED[name]
    assert score(name, right) == [1.0] * len(right) and score(name, wrong) == [0.0] * len(wrong), name
    lines = [f"**`{name}`.** {rule}\n", "| answer | rewarded | | answer | not rewarded |", "|---|---|---|---|---|"]
    lines += [f"| {code(a)} | {code(b)} | | {code(c)} | {code(d)} |" for (a, b), (c, d) in zip(right, wrong, strict=True)]
    if name == "format":
        lines = [line if i < 1 else f"|{'|'.join(line.split('|')[2:4])}|{line.split('|')[5]}|" for i, line in enumerate(lines)]
    if name in REFUSED:
        assert score(name, [(gold, gold) for gold in REFUSED[name]]) == [None] * len(REFUSED[name]), name
        lines.append(f"\nAnswers that are refused, as no whole answer for it: {', '.join(map(code, REFUSED[name]))}.")
    return [*lines, ""]


def passes(test: str, value: object) -> bool:
    """Whether a test of `code` passes where the program's f(7) is this value."""
    try:
        return bool(take_apart(test)[0][0].judge(value))
    except (TypeError, ValueError, LookupError):  # a value of the wrong kind
        return False


def tested() -> list[str]:
    """The section of `code`: values and printed text. Raises where it says anything else than is expected."""
    assert all(passes(test, right) and not passes(test, wrong) for test, right, wrong in TESTED)
    assert all(same_output(right, text) and not same_output(wrong, text) for text, right, wrong in PRINTED)
    lines = [
        "**`code`.** Every test passes. Of asserts the program computes what is called; the value is judged outside: numbers "
        "that are not whole within 1e-6 of their size, lists, tuples and sets as themselves.\n",
        "| test | f(7) passes | f(7) does not |",
        "|---|---|---|",
        *(f"| {code(test)} | {code(repr(right))} | {code(repr(wrong))} |" for test, right, wrong in TESTED),
        "\nOf what is printed, white space at the ends of lines and of the text does not count.\n",
        "| expected | printed, passes | printed, does not |",
        "|---|---|---|",
        *(f"| {code(text)} | {code(right)} | {code(wrong)} |" for text, right, wrong in PRINTED),
    ]
    return [*lines, ""]


def judged(reply: str) -> float | None:
    """What `rubric` reads in a reply."""
    try:
        return score_in(reply, 5)
    except NoAnswerError:
        return None


def by_judges() -> list[str]:
    """The sections of `rubric` and `reasoning_gym`."""
    assert [judged(reply) for reply, _ in REPLIES] == [score for _, score in REPLIES]
    lines = [
        "**`rubric`.** A judge behind an endpoint ends its reply with the score, here of 5, and the reward is its share. A reply "
        "without one is asked for again, and then leaves the completion unscored. A local judge is asked for a number alone.\n",
        "| reply | reward |",
        "|---|---|",
        *(f"| {code(reply)} | {'unscored' if score is None else f'{score / 5:.4g}'} |" for reply, score in REPLIES),
        "\n**`reasoning_gym`.** The scorer of the row's task, which gives part marks in a way of its own: look at it before you "
        "train on it.\n",
        "| task | answer | completion | reward |",
        "|---|---|---|---|",
    ]
    for task, answer, metadata, said in GYM:
        n = len(said)
        found = builtin.reasoning_gym(completions=said, task=[task] * n, answer=[answer] * n, metadata=[metadata] * n)
        assert found[0] == 1.0 and found[-1] != 1.0, task
        lines += [
            f"| {task} | {code(answer)} | {code(c)} | {float(value or 0):.4g} |" for c, value in zip(said, found, strict=True)
        ]
    return [*lines, ""]


def section() -> str:
    """All examples."""
    lines = [line for name in COMPARED for line in compared(name)] + tested() + by_judges()
    lines += ["**`similarity`.** 1 − edits / length of the longer text, both without white space at their ends.\n"]
    lines += ["| answer | completion | reward |", "|---|---|---|"]
    found = zip(SIMILAR, score("similarity", SIMILAR), strict=True)
    lines += [f"| {code(a)} | {code(c)} | {value:.4g} |" for (a, c), value in found]
    lines += ["\n**`length`, `soft_overlong`.** Costs by the number of tokens, here with `max_completion_length` 256.\n"]
    lines += ["| tokens | " + " | ".join(map(str, LENGTHS)) + " |", "|---" * (len(LENGTHS) + 1) + "|"]
    for name in ("length", "soft_overlong"):
        costs = builtin.NAMES[name](completions=[""] * len(LENGTHS), completion_ids=[[0] * n for n in LENGTHS])
        lines.append(f"| `{name}` | " + " | ".join(f"{cost:.4g}" for cost in costs) + " |")
    return "\n".join([*lines, *instructions()]) + "\n"


def instructions() -> list[str]:
    """The kinds of instructions. Raises where one says anything else than is expected; languages need another package."""
    assert set(INSTRUCTIONS) == set(KINDS)
    lines = ["\n**`ifeval`.** The kinds of instructions. Those without examples tell the language by py3langid.\n"]
    lines += ["| instruction | parameters | followed | not followed |", "|---|---|---|---|"]
    for kind, (given, *texts) in INSTRUCTIONS.items():
        said = ", ".join(f"{name} {value if isinstance(value, list) else repr(value)}" for name, value in given.items())
        if any(texts):
            found = IFEval()(texts, instruction_id_list=[[kind]] * 2, kwargs=[[given]] * 2)
            assert found == [1.0, 0.0], kind
        shown = [code(text) if text else "" for text in texts]
        lines.append(f"| `{kind}` | {code(said) if said else ''} | {' | '.join(shown)} |")
    return lines


def page() -> str:
    """docs/rewards.md with the examples of today."""
    before, start, rest = PAGE.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    assert start and end, f"{PAGE} lacks the marks of its examples"
    return before + start + "\n" + section() + "\n" + end + after


if __name__ == "__main__":
    PAGE.write_text(page())
