"""Write the table of docs/chat_templates.md: psigrad's outcome on every chat template that TRL ships, compared with transformers'
own rendering.

python docs/make/chat_templates.py
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.language.data import templates
from psigrad.language.data.chat import rendering
from psigrad.language.episodes import tools
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import Episodes, play
from psigrad.language.rollout.types import Completion, Sampler, SamplingParams

sys.path.append(str(Path(__file__).parent))
from filled import fill
from template_cases import (
    ANSWER,
    CALL,
    CITY,
    EMPTY,
    IDEA,
    LAST,
    MORE,
    OTHER,
    PLACE,
    PLAN,
    RAIN,
    RULE,
    SAID,
    SPECIAL,
    SUN,
    THOUGHT,
    TOOL,
    Case,
    bot,
    call,
    heard,
    names,
    same_context,
    tagged_turn,
    tokenizer_of,
    user,
)

PAGE = Path(__file__).parents[1] / "chat_templates.md"


def one_turn(case: Case) -> None:
    """The answer is trained, in the context in which it is sampled, and ends with the token that sampling stops at."""
    ((context, trained),) = case.turns(messages=[user(SAID), bot(ANSWER)])
    assert SAID in context and ANSWER in trained and ANSWER not in context and SAID not in trained
    case.agree([user(SAID), bot(ANSWER)])
    assert EMPTY.match(trained) is None


def two_turns(case: Case) -> None:
    """Both answers are trained once, each in the context in which it is sampled."""
    talk = [user(SAID), bot(ANSWER), user(MORE), bot(LAST)]
    (first, second) = case.turns(messages=talk)
    assert ANSWER in first[1] and LAST in second[1] and LAST not in first[1] and ANSWER not in second[1]
    case.agree(talk)


def thinking(case: Case) -> None:
    """What was thought is trained before the answer, in both turns, and as well where it stands in <think> tags."""
    talk = [user(SAID), bot(ANSWER, reasoning_content=THOUGHT), user(MORE), bot(LAST, reasoning_content=RULE)]
    first, second = case.turns(messages=talk)
    for (context, trained), thought, said in ((first, THOUGHT, ANSWER), (second, RULE, LAST)):
        assert trained.count(thought) == 1 and trained.index(thought) < trained.index(said) and thought not in context
    assert first[0] == case.asked(talk[:1]) and second[0] == case.asked(talk[:3])
    case.agree(talk)
    tagged = [*map(tagged_turn, talk[1::2])]
    assert case.turns(messages=[talk[0], tagged[0], talk[2], tagged[1]]) == [first, second]


def _instructed(case: Case, role: str) -> None:
    messages = [{"role": role, "content": RULE}, user(SAID)]
    text = case.prompt(messages)
    assert text == case.asked(messages)
    assert text.count(RULE) == 1 and text.index(RULE) < text.index(SAID)


def system(case: Case) -> None:
    """A system prompt is read before the user's turn."""
    _instructed(case, "system")


def developer(case: Case) -> None:
    """So is a developer's."""
    _instructed(case, "developer")


def offered(case: Case) -> None:
    """The model reads name, description and argument of a tool."""
    text = case.prompt([user(SAID)], tools=[TOOL])
    assert text == case.asked([user(SAID)], tools=[TOOL])
    assert all(word in text for word in (SAID, CITY, RULE, "city"))


def answers(case: Case) -> None:
    """A call is trained, the tool's answer is not, and the answer to that is."""
    messages = [user(SAID), bot("", tool_calls=[CALL]), heard(RULE), bot(LAST)]
    case.agree(messages, tools=[TOOL])
    called, last = case.turns(messages=messages, tools=[TOOL])
    assert CITY in called[1] and called[1].count(PLACE) == 1 and RULE not in called[1]
    assert called[1].rstrip() in last[0], "the call is trained as the template writes it before the answer"
    assert PLACE in last[0] and RULE in last[0].partition(PLACE)[2] and LAST in last[1] and RULE not in last[1]


class Dropped(Exception):
    """psigrad refuses what transformers' rendering drops, or what it raises on."""


def _with_calls(case: Case, *messages: dict[str, Any]) -> None:
    try:
        case.agree(list(messages), tools=[TOOL])
    except UserError:
        if case.drops(list(messages), tools=[TOOL]):
            raise Dropped from None
        raise


def two_rounds(case: Case) -> None:
    """A call, its answer, another call, its answer, and the last words, behind a system prompt."""
    rounds = [bot("", tool_calls=[CALL]), heard(SUN), bot("", tool_calls=[call(OTHER)]), heard(RAIN), bot(LAST)]
    case.agree([{"role": "system", "content": "Be brief."}, user(SAID), *rounds], tools=[TOOL])


def two_calls(case: Case) -> None:
    """Two calls in one turn, with arguments that the question has, and their answers."""
    asked = user(f"{SAID} {PLACE} {OTHER}")
    _with_calls(case, asked, bot("", tool_calls=[CALL, call(OTHER, 2)]), heard(SUN), heard(RAIN, 2), bot(LAST))


def thoughts_with_calls(case: Case) -> None:
    """A thought before the call, and one before the last words."""
    called = bot("", reasoning_content=IDEA, tool_calls=[CALL])
    _with_calls(case, user(SAID), called, heard(SUN), bot(LAST, reasoning_content=PLAN))


def words_beside_a_call(case: Case) -> None:
    """Words to the user in the turn that calls, which the question has too."""
    _with_calls(case, user(f"{SAID} {ANSWER}"), bot(ANSWER, tool_calls=[CALL]), heard(SUN), bot(LAST))


def environment(case: Case) -> None:
    """What an environment says stands behind the turn that was sampled as the template writes it there."""
    row = case.row("prompt-only", prompt=[user(SAID)])
    said = case.text(templates.observation_ids(case.tokenizer, row, MORE))
    whole = case.asked([user(SAID), bot(ANSWER), user(MORE)])
    before = whole.removesuffix(said)
    assert before != whole and MORE in said and ANSWER in before and MORE not in before
    ((_, trained),) = case.turns(messages=[user(SAID), bot(ANSWER)])
    ends, wanted = (SPECIAL.findall(text.partition(ANSWER)[2]) for text in (before, trained))
    assert len(ends) == len(wanted) > 0 and before.endswith(ends[-1]), before[-40:]


class Reciting(Sampler):
    """Says one turn after the other, and keeps what it reads before each."""

    def __init__(self, turns: list[tuple[int, ...]]) -> None:
        self.turns, self.read = iter(turns), list[tuple[int, ...]]()

    def steps(self, requests: Any, params: Any, cache: Any = None) -> Any:
        """See `Sampler`."""
        for place, request in enumerate(requests):
            self.read.append(request.prompt_ids)
            ids = next(self.turns)
            yield [(place, [Completion(ids, (0.0,) * len(ids), (0.0,) * len(ids), "stop", 0)])]


class Scripted:
    """An environment that says what stands between the turns of a conversation."""

    def __init__(self, answers: list[list[dict[str, Any]]]) -> None:
        self.answers = iter(answers)

    def reset(self, row: Any) -> None:
        """Nothing to say."""

    def step(self, text: str) -> tuple[Any, float, bool]:
        """What was said to this turn."""
        said = next(self.answers, None)
        return said or "", 0.0, said is None


def _talks() -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    called, answer = bot("", tool_calls=[CALL]), heard(RULE)
    thought = {"reasoning_content": THOUGHT}
    return [
        ([user(SAID), bot(ANSWER), user(MORE), bot(LAST), user("go on"), bot("the mat")], {}),
        ([user(SAID), bot(ANSWER, **thought), user(MORE), bot(LAST, **thought), user("go on"), bot("the mat", **thought)], {}),
        ([user(SAID), called, answer, called, answer, bot(LAST), user(MORE), bot("the mat")], {"tools": [TOOL]}),
        ([user(SAID), {**called, **thought}, answer, bot(LAST, **thought), user(MORE), bot(ANSWER)], {"tools": [TOOL]}),
    ]


def _recited(case: Case, messages: list[dict[str, Any]], **columns: Any) -> list[tuple[tuple[int, ...], ...]]:
    """Of every assistant's turn what it is trained behind, what an episode reads that says it, and what a server reads."""
    trained = case.spans(messages=messages, **columns)
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    row = case.row("prompt-only", prompt=messages[: places[0]], **columns)
    answers = [messages[one + 1 : other] for one, other in itertools.pairwise(places)]
    sampler = Reciting([turn for _, turn in trained])
    form = tools.call_form_of(case.tokenizer, **columns.get("chat_template_kwargs", {}))
    play(
        Episodes(InProcess(lambda: Scripted(answers)), form=form),
        sampler,
        [(0, tuple(templates.prompt_ids(case.tokenizer, row)), row)],
        SamplingParams(64, stop_token_ids=templates.stop_token_ids(case.tokenizer, row)),
        num_generations=1,
        seed_of=lambda i, k: 0,
        tokenizer=case.tokenizer,
        version=0,
        max_length=4096,
    )
    served = [case.row("prompt-only", prompt=messages[:place], **columns) for place in places]
    asked = [tuple(templates.prompt_ids(case.tokenizer, one)) for one in served]
    return list(zip([context for context, _ in trained], sampler.read, asked, strict=True))


def episode(case: Case) -> None:
    """An episode that says what a demonstration says reads, before every turn, what a server would, token for token: the context
    in which the turn is trained; with thinking on and off, over turns, with thoughts and with tools.
    """
    text, told = str(case.tokenizer.chat_template), 0
    ways = [{}, {"enable_thinking": True}, {"enable_thinking": False}] if "enable_thinking" in text else [{}]
    for (talk, columns), kwargs in itertools.product(_talks(), ways):
        try:
            found = _recited(case, talk, **columns, **({"chat_template_kwargs": kwargs} if kwargs else {}))
        except UserError:
            continue
        told += 1
        places = [i for i, message in enumerate(talk) if message["role"] == "assistant"]
        for place, (trained, read, served) in zip(places, found, strict=True):
            assert read == served, (case.text(read)[-90:], case.text(served)[-90:])
            assert case.text(read) == case.asked(talk[:place], **columns, chat_template_kwargs=kwargs), case.text(read)[-90:]
            if trained != read:  # an empty thought is context
                same_context(case.text(trained), case.text(read))
    if not told:
        raise UserError("Nothing can be said.")


def parsed(case: Case) -> None:
    """The call that a row teaches is read as that call."""
    ((_, trained),) = case.turns(messages=[user(SAID), bot("", tool_calls=[CALL])], tools=[TOOL])
    ids = case.tokenizer(trained, add_special_tokens=False)["input_ids"]
    read = tools.call_form_of(case.tokenizer).read(templates.decode(case.tokenizer, ids), {CITY: {"city": {"type": "string"}}})
    assert [(call.name, call.arguments) for call in read] == [(CITY, {"city": PLACE})], read


def stop(case: Case) -> None:
    """What ends an answer, and a call, is among the tokens that sampling stops at, and the last that is trained."""
    row = case.row("prompt-only", prompt=[user(SAID)], tools=[TOOL])
    stops = [case.text([token]) for token in templates.stop_token_ids(case.tokenizer, row)]
    for said in (bot(ANSWER), bot("", tool_calls=[CALL])):
        ((_, trained),) = case.turns(messages=[user(SAID), said], tools=[TOOL])
        assert trained.endswith(tuple(stops)) and trained not in stops, (trained[-40:], stops)


def generation_prompt(case: Case) -> None:
    """The prompt opens the assistant's turn: what is trained behind it has no role in it."""
    text = case.prompt([user(SAID)])
    ((_, trained),) = case.turns(messages=[user(SAID), bot(ANSWER)])
    said = user(SAID)
    if SAID not in case.tokenizer.apply_chat_template([said], tokenize=False):
        said["content"] = [{"type": "text", "text": SAID}]
    assert text == case.tokenizer.apply_chat_template([said], add_generation_prompt=True, tokenize=False)
    assert not text.endswith(str(case.tokenizer.eos_token))
    assert re.search(r"assistant|model|chatbot", trained.partition(ANSWER)[0].split("<|channel|>")[0], re.I) is None, trained


def printed_date(case: Case) -> None:
    """The date is that of the run, whatever the clock says."""
    rendering.set_render_settings(case.tokenizer, {}, date(1999, 12, 31))
    text = case.prompt([user(SAID)])
    today = date.today()
    for form in ("%Y-%m-%d", "%d %b %Y"):
        assert today.strftime(form) not in text
    if rendering.reads_clock(case.tokenizer):
        assert "1999-12-31" in text or "31 Dec 1999" in text


COLUMNS: dict[str, Callable[[Case], None]] = {
    "one turn": one_turn,
    "two turns": two_turns,
    "thinking": thinking,
    "system": system,
    "developer": developer,
    "tools": offered,
    "tool answers": answers,
    "two rounds": two_rounds,
    "two calls": two_calls,
    "thoughts with calls": thoughts_with_calls,
    "words beside a call": words_beside_a_call,
    "environment turn": environment,
    "episode": episode,
    "call parsed": parsed,
    "stop token": stop,
    "generation prompt": generation_prompt,
    "date": printed_date,
}

OUTCOMES = ("dropped", "refused", "wrong")


def outcome(name: str, column: str) -> str:
    """Return yes; dropped, where transformers drops what psigrad refuses; refused; or wrong, where psigrad raises no error."""
    case = Case(tokenizer_of(name))
    try:
        COLUMNS[column](case)
    except UserError:
        return "refused"
    except Dropped:
        return "dropped"
    except (AssertionError, ValueError, IndexError, KeyError):
        return "wrong"
    return "yes"


def table() -> str:
    """The templates that are right in every column, and for the others the columns that are not."""
    found = {name: {column: outcome(name, column) for column in COLUMNS} for name in names()}
    right = [f"`{name}`" for name, cells in found.items() if set(cells.values()) == {"yes"}]
    lines = [
        f"{len(right)} of {len(found)} pass all {len(COLUMNS)} checks: {', '.join(right)}.",
        "",
        "The others:",
        "",
    ]
    lines += [f"| template | {' | '.join(OUTCOMES)} |", "|---" * (len(OUTCOMES) + 1) + "|"]
    for name, cells in found.items():
        by = [", ".join(column for column, cell in cells.items() if cell == one) or "–" for one in OUTCOMES]
        lines += [] if set(by) == {"–"} else [f"| `{name}` | {' | '.join(by)} |"]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with its table."""
    return fill(text, table=table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
