"""Chat templates that TRL ships, and the comparison of trained turns with transformers' own rendering of them."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from psigrad.language.data import templates
from psigrad.language.data.dataset_rows import Row, validate
from psigrad.language.models import tiny

SPECIAL = re.compile(
    r"<\|[\w▁ ]+\|>|<｜[^<>]+｜>|<\|(?:tool|tool_call|tool_response|turn|channel)>"
    r"|<(?:tool|tool_call|tool_response|turn|channel)\|>"
    r"|<(?:start|end)_of_turn>|<end_of_utterance>|</s>|\[/?INST\]|\[gMASK\]|<sop>|<\|\"\|>"
)
"""Special tokens as the released tokenizers have them; tags such as <think> and <tool_call> are plain text there."""
# Words of the test conversations; none is part of another, and no template has them.
SAID, MORE, THOUGHT, RULE, ANSWER, LAST = "Ngorongoro", "Kilimanjaro", "Tanganyika", "Serengeti", "Usambara", "Ruwenzori"
CITY, PLACE, OTHER, SUN, RAIN, IDEA, PLAN = "get_weather", "Dodoma", "Arusha", "Zambezi", "Okavango", "Limpopo", "Rufiji"
EMPTY = re.compile(r"\s*(<think>)?\s*</think>\s*|\s*<channel\|>")
CLOSE = re.compile(r"\n?(</think>\n{0,2}|<channel\|>)?")
"""The end of a thought as psigrad writes it where the template drops thoughts."""


def user(content: str) -> dict[str, Any]:
    """A user's turn."""
    return {"role": "user", "content": content}


def bot(content: str, **more: Any) -> dict[str, Any]:
    """An assistant's turn."""
    return {"role": "assistant", "content": content, **more}


def call(place: str, number: int = 1) -> dict[str, Any]:
    """Return a call of the tool."""
    return {"id": f"c{number}", "type": "function", "function": {"name": CITY, "arguments": {"city": place}}}


def heard(content: str, number: int = 1) -> dict[str, Any]:
    """Return the tool's answer to a call."""
    return {"role": "tool", "tool_call_id": f"c{number}", "name": CITY, "content": content}


CALL = call(PLACE)
TOOL = {
    "type": "function",
    "function": {
        "name": CITY,
        "description": RULE,
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": MORE}}, "required": ["city"]},
    },
}


def folder() -> Path:
    """Where TRL has its templates."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "chat_templates"


def names() -> list[str]:
    """The released templates; TRL's own patches of them are not among them."""
    return sorted(path.stem for path in folder().glob("*.jinja") if not path.stem.endswith("_training"))


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with the template's special tokens."""
    text = (folder() / f"{name}.jinja").read_text(encoding="utf-8")
    made = tiny.tokenizer(["the cat sat on the mat", "user assistant system"], 300)
    made.add_special_tokens({"bos_token": "<|bos|>", "additional_special_tokens": sorted(set(SPECIAL.findall(text)))})
    made.chat_template = text
    return made


class Case:
    """One template under test. Every check raises AssertionError where something is wrong and nobody was told."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def row(self, form: str = "sft", **columns: Any) -> Row:
        """A checked row."""
        return validate(columns, form, "t.jsonl:1")

    def prompt(self, messages: list[dict[str, Any]], **columns: Any) -> str:
        """What is sampled from, as text."""
        return self.text(templates.prompt_ids(self.tokenizer, self.row("prompt-only", prompt=messages, **columns)))

    def rendered(
        self, messages: list[dict[str, Any]], *, sampled: bool = False, tagged: bool = True, **columns: Any
    ) -> str | None:
        """Return transformers' own rendering, or None if it raises or drops something.

        Thoughts, and the words of the assistant's earlier turns, may be dropped: templates do that on purpose. A template without
        words for thoughts gets them in its content if `tagged`.
        """
        if tagged and self.thoughts_in_content:
            messages = [tagged_turn(m) if m.get("reasoning_content") else m for m in messages]
        said = [m["content"] for m in messages if m["role"] != "assistant" or m is messages[-1]]
        said += [tool["function"]["name"] for tool in columns.get("tools", ())]
        said += [word for m in messages for one in m.get("tool_calls", ()) for word in _words_of(one)]
        given = {"tools": columns.get("tools"), **columns.get("chat_template_kwargs", {})}
        for form in (messages, _in_parts(messages)):
            with contextlib.suppress(Exception):  # a template is a program: it can raise anything
                text = str(self.tokenizer.apply_chat_template(form, tokenize=False, add_generation_prompt=sampled, **given))
                if all(text.count(word) >= count for word, count in Counter(" ".join(said).split()).items()):
                    return text
        return None

    @cached_property
    def thoughts_in_content(self) -> bool:
        """True if the template shows no `reasoning_content` and keeps <think> tags of the past; Gemma 4 takes those for words."""
        if "<|channel>thought" in self.tokenizer.chat_template:
            return False
        turn, texts = bot(ANSWER, reasoning_content=THOUGHT), []
        for said in (turn, tagged_turn(turn)):
            for talk in ([user(SAID), said], _in_parts([user(SAID), said])):
                with contextlib.suppress(Exception):
                    texts.append(self.tokenizer.apply_chat_template(talk, tokenize=False))
                    if ANSWER in texts[-1]:
                        break
        return THOUGHT not in texts[0] and THOUGHT in texts[-1]

    def asked(self, messages: list[dict[str, Any]], **columns: Any) -> str:
        """Return the text that the next turn is sampled from: transformers' own, or psigrad's where transformers has none."""
        made = self.rendered(messages, sampled=True, **columns)
        return self.prompt(messages, **columns) if made is None else made

    def agree(self, messages: list[dict[str, Any]], **columns: Any) -> None:
        """Check every trained turn, and its context, against transformers' rendering."""
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i, (context, trained) in zip(places, self.turns(messages=messages, **columns), strict=True):
            same_context(context, self.asked(messages[:i], **columns))
            last, followed = (self.rendered([*messages, user(SUN)][: i + n], **columns) for n in (1, 2))
            _same_turn(messages[i], context, trained, last, followed)
            others = " ".join(
                messages[n]["content"] for n in places if n != i and messages[n]["content"] != messages[i]["content"]
            )
            assert not any(word in trained for word in others.split()), (trained, others)

    def drops(self, messages: list[dict[str, Any]], **columns: Any) -> bool:
        """Return True if transformers raises on a turn of the assistant, or drops a part of it, such as its thought."""
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                text = self.rendered(messages[: i + 1], tagged=False, **columns)
                if text is None or message.get("reasoning_content", "") not in text:
                    return True
        return False

    def text(self, ids: Any) -> str:
        """Ids as text, special tokens shown."""
        return str(self.tokenizer.decode(list(ids)))

    def spans(self, **columns: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(all before, what is trained) for every trained run of tokens."""
        found = []
        for made in templates.examples(self.tokenizer, self.row(**columns)):
            edges = [i for i in range(1, len(made.ids)) if made.mask[i] != made.mask[i - 1]]
            edges += [len(made.ids)] if len(edges) % 2 else []
            pairs = zip(edges[::2], edges[1::2], strict=True)
            found += [(tuple(made.ids[:start]), tuple(made.ids[start:end])) for start, end in pairs]
        return found

    def turns(self, **columns: Any) -> list[tuple[str, str]]:
        """The same as text."""
        return [(self.text(before), self.text(trained)) for before, trained in self.spans(**columns)]


def same_context(context: str, sampled: str) -> None:
    """A turn's context is what is sampled from, up to an empty thought."""
    opened = re.sub(r"(<think>|<\|channel>thought)\s*$", lambda found: "" if found[1] == "<think>" else found[0], sampled)
    rest = context.removeprefix(opened)
    assert context == sampled or (context.startswith(opened) and EMPTY.fullmatch(rest)), (context[-90:], sampled[-90:])


def _same_turn(said: dict[str, Any], context: str, trained: str, last: str | None, followed: str | None) -> None:
    """Check a trained turn against transformers' rendering with the turn `last`, and `followed` by the next message."""
    thought, whole = said.get("reasoning_content", ""), context + trained
    words = [thought, said["content"], *(word for one in said.get("tool_calls", ()) for word in _words_of(one))]
    assert all(word in trained for word in words), (words, trained)
    if last is None:  # psigrad's own words: the thought comes first
        assert not thought or trained.index(thought) < min(trained.index(word) for word in words[1:] if word)
    elif last.startswith(whole):
        assert not SPECIAL.sub("", last[len(whole) :]).strip(), last[len(whole) :]
    elif whole.startswith(last.rstrip()):  # the next turn's token ends this one
        end = whole[len(last.rstrip()) :].strip()
        assert SPECIAL.fullmatch(end) and followed is not None and end in followed.rpartition(said["content"] or words[-1])[2], (
            end
        )
    else:  # the template writes the turn otherwise in its own context, or without its thought
        _, _, behind = trained.rpartition(thought if thought and thought not in last else "\0")
        behind = behind[CLOSE.match(behind).end() :] if behind != trained else trained  # type: ignore[union-attr]
        assert last.rstrip().endswith(behind.rstrip()), (last[-90:], behind)


def tagged_turn(said: dict[str, Any]) -> dict[str, Any]:
    """Return a turn with its thought in <think> tags in the content."""
    rest = {name: value for name, value in said.items() if name != "reasoning_content"}
    return {**rest, "content": f"<think>\n{said['reasoning_content']}\n</think>\n\n{said['content']}"}


def _in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with their contents as lists of parts."""
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def _words_of(one: dict[str, Any]) -> list[str]:
    return [one["function"]["name"], *one["function"]["arguments"].values()]
