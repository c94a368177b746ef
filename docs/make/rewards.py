"""Writes what each built-in reward takes as equal into docs/rewards.md, by running them: python docs/make/rewards.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from psigrad.language.rewards import builtin
from psigrad.language.rewards.instructions import KINDS, IFEval

PAGE = Path(__file__).parents[1] / "rewards.md"
MARKS = ("<!-- examples: python docs/make/rewards.py -->\n", "<!-- end of examples -->\n")

# Of each reward a rule, then (answer, completion) that it rewards, then those that it does not.
COMPARED = {
    "exact": (
        "The completion is the answer, letter by letter, but for white space at its ends.",
        [("42", "42"), ("42", " 42\n"), ("Paris", "Paris"), ("a, b", "a, b"), ("1/2", "1/2")],
        [("42", "42."), ("42", "The answer is 42"), ("Paris", "paris"), ("a, b", "a,b"), ("1/2", "0.5")],
    ),
    "numeric": (
        r"The last number of the completion (of its last `\boxed{…}`, its last `<answer>`, or behind its last `####`, if any) "
        "is the answer. Whole numbers must be met exactly, others within `tolerance` (1e-6) of their size. Signs, currencies, "
        "thousands, powers, fractions, mixed numbers and percents are read; times and ratios are equal part by part. 50% is 50%, "
        "0.5 and 50.",
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
        "answer.",
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
SIMILAR += [("42", "43"), ("42", "24"), ("42", ""), ("", "")]
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


def section() -> str:
    """All examples."""
    lines = [line for name in COMPARED for line in compared(name)]
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
