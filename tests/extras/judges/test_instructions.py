"""IFEval's 25 kinds, each by a completion that follows, one that does not, and one that follows only when it is read loosely."""

from __future__ import annotations

import json
import sys

import pytest
from cases import repeat_for

from psigrad.cli import main
from psigrad.errors import UserError
from psigrad.language.rewards import resolve
from psigrad_extras.judges import instructions
from psigrad_extras.judges.instructions import KINDS, IFEval, loosened, sentences

SURE = "Sure, here it is:\n"
# kind: parameters, follows, does not, follows when read loosely alone
GOLDS = {
    "keywords:existence": ({"keywords": ["river", "C++"]}, "A RIVER of c++ code", "A river of C code", None),
    "keywords:frequency": ({"keyword": "sun", "frequency": 2, "relation": "less than"}, "One sun.", "sun and Sunday",
                           "The sun:\nsun\nsets"),
    "keywords:forbidden_words": ({"forbidden_words": ["sure"]}, "Surely not.", "I am sure.", SURE + "No."),
    "keywords:letter_frequency": ({"letter": "Z", "let_frequency": 2, "let_relation": "at least"}, "Zigzag", "Zip", None),
    "language:response_language": ({"language": "de"}, "Das ist ein deutscher Satz über Katzen und Hunde.",
                                   "This is a sentence about cats and dogs.", None),
    "length_constraints:number_sentences": ({"num_sentences": 3, "relation": "less than"}, "Mr. J. Fox ran. He hid!",
                                            "He ran. He hid. He won?", "Yes. Sure.\nHe ran. He hid."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo", "Sure:\n***\none\n***\ntwo"),
    "length_constraints:number_words": ({"num_words": 4, "relation": "less than"}, "It's so", "It's so so",
                                        "Of course I can:\nIt's so"),
    "length_constraints:nth_paragraph_first_word": ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
                                                    "First.\n\n\"then, we go", "First.\n\nAnd then", "First.\n\n*Then* we go"),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name], [address]", "[name]", None),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, "Bye.\n\nP. P.S. more", "Bye.\n\nP.S. more", "P.P*.S more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n  - two", "* one\n** two", "- see:\n* one\n* two"),
    "detectable_format:constrained_response": ({}, "Well. My answer is maybe.", "My answer is perhaps.", "*My* answer is no."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*one* and **two**", "*one* and ** **", None),
    "detectable_format:multiple_sections": ({"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1\na\nSECTION 2\nb",
                                            "Section 1\na\nSection 2\nb", "*SECTION* 1\na\n*SECTION* 2\nb"),
    "detectable_format:json_format": ({}, '```json\n{"a": [1]}\n```', '{"a": [1}', SURE + '{"a": [1]}'),
    "detectable_format:title": ({}, "<<On rivers>>\nThey flow.", "<On rivers>", "<*<On rivers>*>"),
    "combination:two_responses": ({}, "one\n******\ntwo", "one\n******\none", "Sure:\n******\none\n******\ntwo"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hello."}, "say hello. Hello!", "Hello!", SURE + "Say hello. Hello!"),
    "startend:end_checker": ({"end_phrase": "Is there more?"}, '"I am done. is there more?"', "Is there more? No.",
                             "Is there more?\nLet me know!"),
    "startend:quotation": ({}, ' "A river." ', 'A "river"', '*"A river."*'),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, "I DON'T.", "I am X-ray.",
                                           None),
    "change_case:english_capital": ({}, "THE RIVER FLOWS TO THE SEA.", "The river flows to the sea.",
                                    SURE + "THE RIVER FLOWS TO THE SEA."),
    "change_case:english_lowercase": ({}, "the river flows to the sea.", "the river flows to the Sea.",
                                      SURE + "the river flows to the sea."),
    "punctuation:no_comma": ({}, "Rivers flow; seas wait.", "Rivers flow, seas wait.", SURE + "Rivers flow."),
}  # fmt: skip


def scores(kind, text, **how):
    return IFEval(**how)([text], instruction_id_list=[[kind]], kwargs=[[GOLDS[kind][0]]])[0]


def test_there_are_the_25_published_kinds():
    assert len(KINDS) == 25 and set(GOLDS) == set(KINDS)


@repeat_for("kind", GOLDS)
def test_each_kind_by_hand(kind):
    _, follows, not_so, loosely = GOLDS[kind]
    assert scores(kind, follows) == scores(kind, follows, loose=True) == 1.0
    assert scores(kind, not_so) == scores(kind, not_so, loose=True) == 0.0
    if loosely is not None:
        assert (scores(kind, loosely), scores(kind, loosely, loose=True)) == (0.0, 1.0)


def test_several_instructions_and_their_share():
    row = {
        "instruction_id_list": [["punctuation:no_comma", "detectable_format:title"]] * 3,
        # as the hub has them, where every row has every parameter
        "kwargs": [[{"num_words": None}, {"keywords": None}]] * 3,
    }
    texts = ["<<A>> b", "<<A>> b, c", "b, c"]
    assert IFEval()(texts, **row) == [1.0, 0.0, 0.0]
    assert IFEval(share=True)(texts, **row) == [1.0, 0.5, 0.0]
    assert IFEval()([" "], instruction_id_list=[["punctuation:no_comma"]], kwargs=[[{}]]) == [0.0], "no answer follows nothing"
    assert IFEval()(["a"], instruction_id_list=[None], kwargs=[None]) == [None]
    assert IFEval()(
        [[{"role": "assistant", "content": "a, b"}]], instruction_id_list=[["punctuation:no_comma"]], kwargs=[[{}]]
    ) == [0.0]


def test_loosened_forms():
    assert loosened("a\n*b*\nc") == ["a\n*b*\nc", "*b*\nc", "a\n*b*", "*b*", "a\nb\nc", "b\nc", "a\nb", "b"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Dr. A. Fox paid $3.50 to e.g. Bob.", 1),
        ("She asked, \"Why?\" He left.", 2),
        ("A title\n\nA sentence without an end", 2),
        ("Wait... what?! Yes.", 3),
        ("", 0),
        ("He works for Acme Inc.", 1),
        ("私は行く。彼は来る。", 2),
    ],
)  # fmt: skip
def test_sentences_by_hand(text, count):
    assert len(sentences(text)) == count


@pytest.mark.parametrize(
    ("ids", "kwargs", "said"),
    [
        (["punctuation:no_commas"], [{}], "no instruction 'punctuation:no_commas'.*did you mean 'punctuation:no_comma'"),
        (["punctuation:no_comma"], [{}, {}], "1 entries and kwargs has 2"),
        (["length_constraints:number_words"], [{"num_words": 5}], "parameters num_words; expected num_words, relation"),
        (["length_constraints:number_words"], [{"num_words": 5, "relation": "about"}], "relation 'about'; expected 'less than'"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": "two"}], "num_bullets 'two'; expected a whole number"),
        (["keywords:existence"], [{"keywords": "river"}], "keywords 'river'; expected a list of words"),
        (["startend:end_checker"], [{"end_phrase": " "}], "end_phrase ' '; expected a text"),
        (["punctuation:no_comma"], [{"num_words": 5}], "parameters num_words; expected none"),
    ],
)
def test_what_cannot_be_verified_is_refused(ids, kwargs, said):
    with pytest.raises(UserError, match=said):
        IFEval().check_row({"instruction_id_list": ids, "kwargs": kwargs})


def test_without_the_library_a_language_is_refused_and_all_else_is_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    instructions._identify.cache_clear()
    IFEval().check_row({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]})
    with pytest.raises(UserError, match="pip install 'py3langid>="):
        IFEval().check_row({"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]})
    instructions._identify.cache_clear()


def test_an_unknown_kind_is_refused_by_its_row_before_anything_is_sampled(job, tmp_path, capsys):
    rows = [{"key": 1, "prompt": "say a", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
            {"key": 2, "prompt": "say b", "instruction_id_list": ["punctuation:none"], "kwargs": [{}]}]  # fmt: skip
    file = tmp_path / "ifeval.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["eval", "--model", str(job / "base"), "--dataset", str(file), "--reward", "ifeval", "--max-completion-length", "4"]
    assert main(asked) == 2
    assert "ifeval.jsonl:2: ifeval: there is no instruction 'punctuation:none'" in capsys.readouterr().err
    file.write_text(json.dumps(rows[0]) + "\n")
    assert main(asked) == 0
    assert "ifeval" in capsys.readouterr().out


def test_it_is_a_built_in_with_parameters():
    spec = resolve({"reward": "ifeval", "loose": True, "share": True})
    assert (spec.name, spec.function) == ("ifeval", IFEval(loose=True, share=True))
