"""IFEval beside its authors: the examples of their tests, and the published answers of GPT-4 with the published accuracies.

Source: google-research/instruction_following_eval (Apache-2.0): instructions_test.py, data/input_data.jsonl and
data/input_response_data_gpt4_20231107_145030.jsonl. The examples here are those of the 25 kinds whose text is short.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cases import repeat_for

from psigrad_extras.judges.instructions import KINDS, IFEval

LESS, LEAST = "less than", "at least"
BULLETS = (
    "\n  Check that inline asterisk (*), *, will not be counted.\n    * This is a bullet point.\n    * Another.\n    . dot is not"
)
MARKED = "\n  Numerical methods:\n  *Finite difference methods\n  *Finite element methods*\n  *Boundary element methods\n"
TWO = "This is response 1.\n  ******\n  This is response {}.\n  "
SECTIONS = "SECTION 1\n  [content of section 1]\n  SECTION 2\n  [content of section 2]"
REPEATED = {"prompt_to_repeat": "Write a CL description."}
LONG = "\n  Wow.\n\n  I can't believe it.\n\n  {} than three? No way!\n\n  I am living proof.\n\n  Haha, you go that right."
# kind, parameters, text, whether it follows
PUBLISHED = [
    ("language:response_language", {"language": "en"}, "The response is English", True),
    ("language:response_language", {"language": "en"}, "Today we visit the Louvre", True),
    ("length_constraints:number_sentences", {"num_sentences": 4, "relation": LESS}, "xx,x. xx,x! xx/x. x{x}x?", False),
    ("length_constraints:number_sentences", {"num_sentences": 5, "relation": LESS}, "xxxx. xx,x! xxxx. x(x)x?", True),
    ("length_constraints:number_sentences", {"num_sentences": 4, "relation": LEAST}, "xxxx. xx,x! xx|x. x&x x?", True),
    ("length_constraints:number_sentences", {"num_sentences": 5, "relation": LEAST}, "xx-x. xx,x! xx}x. x,xx?", False),
    ("detectable_content:number_placeholders", {"num_placeholders": 5}, "[Name]\n[Email]\n[Phone]\n[Address]\n[Website]\n", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 7}, "My [adjective] [noun] is [adjective] [noun]. I [verb]",
     False),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, BULLETS, True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "\n  One\n  ***\n  Two\n  ***\n  * only one bullet\n", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}, "\n  Three:\n  - I am.\n  - I am it.\n  -I am still.", True),
    ("detectable_format:constrained_response", {}, "\n My answer is no.\n", True),
    ("detectable_format:constrained_response", {}, "\n  My answer is no. I am still under development.", True),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "type:*hello*, you would type: **hello** ", True),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, MARKED, False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 4},
     "*two different* highlighted *sections in the same*\n line. **This is also true** for **double highlights.**", True),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 3},
     SECTIONS.replace("SECTION", "Section"), False),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}, SECTIONS, True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "\n  one\n  ***\n  two\n  ***\n  three", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "\n   ***\n  one\n   ***\n  two\n   ***\n  three", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "\n  one\n  ***\n  two\n  ***\n  three\n  ***", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "\n  one\n  ***\n  two\n  ***\n  ***", False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a point. (not starting a new line) P.S. I hope", True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "also be one.\n  p.p.s what if all were lower case?", True),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "are mysterious.\n  P. S. Sometimes there are spaces", True),
    ("detectable_content:postscript", {"postscript_marker": "PS:"}, "things.\n\n  P.S. I hope this is it.", False),
    ("keywords:existence", {"keywords": ["romantic", "river", "Mona Lisa"]}, "The romantic river, where the Mona Lisa is", True),
    ("keywords:existence", {"keywords": ["romantic", "river", "Mona Lisa"]}, "known for its romantic river cruises", False),
    ("keywords:frequency", {"keyword": "  keyword ", "frequency": 4, "relation": LESS}, "keyword, Keyword, KEYWORD", True),
    ("keywords:frequency", {"keyword": "  keyword ", "frequency": 3, "relation": LEAST}, "keyword, Keyword, KEYWORD", True),
    ("keywords:frequency", {"keyword": "KEYWORD", "frequency": 4, "relation": LEAST}, "*keyword\n *Keyword\n *KEYWORD", False),
    ("length_constraints:number_words", {"num_words": 8, "relation": LESS}, "d3sCRi7 lArge lAnguagE M0del w1tH 20 w0RdS.", True),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "I"},
     "\n  paragraph 1\n\n  I paragraph 2\n\n  paragraph 3", True),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "I"},
     "\n  paragraph 1\n\n  I paragraph 2", False),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 5, "nth_paragraph": 5, "first_word": "haha"},
     LONG.format("Really more"), True),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 5, "nth_paragraph": 3, "first_word": "Really"},
     LONG.format('"Really?! more'), True),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 5, "nth_paragraph": 3, "first_word": "Really"},
     LONG.format("Rea!lly more"), False),
    ("keywords:forbidden_words", {"forbidden_words": ["HOUSE", "POWER", "BECOME"]}, "Nazis came to power", False),
    ("keywords:forbidden_words", {"forbidden_words": ["GENE", "TRANSFORM"]}, "Generative Pre-trained Transformer", True),
    ("combination:two_responses", {}, TWO.format(2), True),
    ("combination:two_responses", {}, TWO.format(1), False),
    ("combination:two_responses", {}, TWO.format(2) + "******\n  This is response 3.", False),
    ("combination:two_responses", {}, "\n  ******\n  Response 1.\n  ******\n  ******\n  Response 2.\n  ******\n", False),
    ("combination:two_responses", {}, "\n  ******\n  Response 1\n  ******\n  Response 2\n  ******\n", True),
    ("combination:repeat_prompt", REPEATED, "Write a CL description. Hi, Le and TJ, please\n  check this out.", True),
    ("combination:repeat_prompt", REPEATED, "Hi, Le and TJ. Write a CL description. Thanks.\n  ", False),
    ("startend:end_checker", {"end_phrase": "\n  Any more questions?\n  "}, "\n  The answer is 7. Any more questions?\n  ", True),
    ("startend:end_checker", {"end_phrase": "\n  This is the end.\n  "}, "I am required to say that this is the end.\n  ", True),
    ("startend:end_checker", {"end_phrase": "\n  This will fail.\n  "}, "\n  This will fail. Paris is cool.\n  ", False),
    ("detectable_format:title", {}, "\n  <<Song of Joy>>\n  La la la. Happy song.\n  ", True),
    ("detectable_format:title", {}, "\n  Is it fine for title to be at the end?\n  <<This is the title>>\n  ", True),
    ("detectable_format:title", {}, "\n  << >>\n  There is no title.\n  ", False),
    ("detectable_format:title", {}, "\n  <<This is not a title.\n  This is a paragraph.>>\n  ", False),
    ("keywords:letter_frequency", {"letter": "T", "let_frequency": 4, "let_relation": LEAST}, "There is the T. Four T's.", True),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 4, "let_relation": LESS}, "asdfghjkl!!aA", True),
    ("keywords:letter_frequency", {"letter": "p", "let_frequency": 4, "let_relation": LEAST}, "asdfghjkl!!aA", False),
    ("change_case:english_capital", {}, "THIS IS AN ENGLISH SENTENCE. EVERY LETTER IS CAPITALIZED!!! AMAZING.", True),
    ("change_case:english_capital", {}, "Every Word Is Capitalized.", False),
    ("change_case:english_lowercase", {}, "every letter is lowercase.", True),
    ("change_case:english_lowercase", {}, "Almost every letter is lowercase.", False),
    ("punctuation:no_comma", {}, "Every sentence is short. There is no need for a comma.", True),
    ("punctuation:no_comma", {}, "Since the start of time, people have always found a way to punctuate.", False),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": LEAST},
     "HERE there are THREE FUlly CAPITAL words.", True),
    ("change_case:capital_word_frequency", {"capital_frequency": 5, "capital_relation": LESS},
     "THERE are Four FULLY CAPITAL WORDS. Many Others Are Only Partially So.", True),
    ("change_case:capital_word_frequency", {"capital_frequency": 4, "capital_relation": LESS},
     "THERE are Four FULLY CAPITAL WORDS. Many Others Are Only Partially So.", False),
    ("startend:quotation", {}, '\n  "This entire message is wrapped in double quotation marks."\n  ', True),
    ("startend:quotation", {}, '\n  "This message is wrapped in double quotation marks." But not everything.\n  ', False),
]  # fmt: skip


@repeat_for(("kind", "parameters", "text", "follows"), PUBLISHED)
def test_the_authors_examples(kind, parameters, text, follows):
    assert IFEval()([text], instruction_id_list=[[kind]], kwargs=[[parameters]]) == [float(follows)]


def test_the_examples_are_of_every_kind_but_one():
    assert set(KINDS) - {case[0] for case in PUBLISHED} == {"detectable_format:json_format"}, "which has none in their tests"


PAPER = {(False, False): 0.7689, (False, True): 0.8357, (True, False): 0.7930, (True, True): 0.8537}
"""Accuracies of GPT-4 in table 3 of the paper: by (loose, of single instructions). Its checker draws a letter where a row asks
for one that is none, and tells languages and sentences by other libraries: 5 of 832 verdicts differ here."""
FILES = Path(os.environ.get("PSIGRAD_IFEVAL", "nowhere"))


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (FILES / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
@pytest.mark.needs("ifeval")
@pytest.mark.parametrize(("loose", "single"), PAPER)
def test_gpt_4_has_the_published_accuracies(loose, single):
    said = {row["prompt"]: row["response"] for row in rows_of("input_response_data_gpt4_20231107_145030.jsonl")}
    rows = [row for row in rows_of("input_data.jsonl") if row["prompt"] in said]
    assert len(rows) >= 530
    found = IFEval(loose=loose, share=single)([said[row["prompt"]] for row in rows], **{
        name: [row[name] for row in rows] for name in ("instruction_id_list", "kwargs")
    })  # fmt: skip
    counts = [len(row["instruction_id_list"]) if single else 1 for row in rows]
    right = sum(value * count for value, count in zip(found, counts, strict=True) if value is not None)
    assert right / sum(counts) == pytest.approx(PAPER[loose, single], abs=0.015)
