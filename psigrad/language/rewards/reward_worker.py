"""The service of a reward worker: it calls the reward functions and encodes their results as JSON."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from psigrad.errors import kind_of, nearest
from psigrad.language import images
from psigrad.language.rewards.golds import blank
from psigrad.language.rollout.scoring import FailedTest, Failure, Preparable, SelfLimited, Unscored, transcript_of, turns_of
from psigrad.processes.workers.child import message_of, reason_for
from psigrad.processes.workers.shipping import Packed, unpack


class Malformed(ValueError):
    """An error for a return value that is not a reward."""


# One function's result for one sample: a number, None (not applicable), a Failure (the policy's fault) or Unscored (not the
# policy's fault).
Part = float | None | Failure | Unscored


def service(payload: Sequence[tuple[str, Packed]]) -> Callable[[Any], Iterator[Any]]:
    """Return the function that answers a worker's requests, for reward functions given as (name, packed function).

    A request is a list of (function indices, samples). The answers are yielded one by one in the same order. All calls of `async`
    functions in a request run concurrently, since such functions wait for a server.
    """
    functions = [(name, unpack(packed)) for name, packed in payload]
    for _, function in functions:
        if isinstance(function, Preparable):
            function.prepare()

    def answer(message: Any) -> Iterator[Any]:
        # copies, so that one function's changes to its lists do not reach another
        jobs = [(*functions[which], images.open_columns(copy.deepcopy(samples))) for asked, samples in message for which in asked]
        with _together(jobs) as begun:
            for name, function, samples in begun:
                if isinstance(function, SelfLimited):
                    yield from _while_alive(name, function, samples)
                else:
                    yield encode(ask(name, function, samples))

    return answer


def is_async(function: Any) -> bool:
    """Return True if a function, or a callable object, is `async`."""
    return any(map(inspect.iscoroutinefunction, (function, getattr(type(function), "__call__", None))))  # noqa: B004


@contextlib.contextmanager
def _together(jobs: Sequence[tuple[str, Any, dict[str, Any]]]) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """Yield the jobs (name, function, samples), with all calls of `async` functions already started on an event loop.

    The function of a started job waits for its result. Meanwhile the other calls continue.
    """
    if not any(is_async(function) for _, function, _ in jobs):
        yield list(jobs)
        return
    import asyncio  # takes a third of a worker's start-up, and few rewards need it

    def begin(name: str, function: Any, samples: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
        with contextlib.suppress(Malformed):  # the call itself raises it later
            if is_async(function):
                task = loop.create_task(held(function(**_select_arguments(name, function, samples))))
                return name, functools.wraps(function)(lambda **given: finished(task)), samples
        return name, function, samples

    async def held(begun: Any) -> Any:
        try:
            return await begun, None
        except BaseException as error:  # SystemExit would end the loop, and affect other functions
            return None, error

    def finished(task: Any) -> Any:
        value, error = loop.run_until_complete(task)
        if error is not None:
            raise error
        return value

    loop = asyncio.new_event_loop()
    with contextlib.closing(loop):
        yield [begin(*job) for job in jobs]
        loop.run_until_complete(loop.shutdown_asyncgens())


def _while_alive(*arguments: Any) -> Iterator[Any]:
    """Call a function in a thread. Yield None as a sign of life until it returns, then yield its answer.

    This is for functions with their own time limits, such as `code`, whose time depends on the number of tests.
    """
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, *arguments)
        while not wait([asked], timeout=0.2).done:
            yield None
        yield encode(asked.result())


def encode(answer: list[Part] | Unscored) -> Any:
    """Return an answer in a form that JSON can represent: a reason, or for each sample a number, null, or [kind, text]."""
    if isinstance(answer, Unscored):
        return answer.reason
    return [
        part
        if part is None or isinstance(part, float)
        else [type(part).__name__, part.reason if isinstance(part, Unscored) else str(part)]
        for part in answer
    ]


def ask(name: str, function: Callable[..., Any], samples: dict[str, Any]) -> list[Part] | Unscored:
    """Return the results of `function` for each sample, or the reason why it has none.

    Any exception, SystemExit included, is such a reason; only Ctrl-C passes. In a call on one sample whose row has an empty value
    in a column that the function needs, an exception means that the function does not apply (None).
    """
    try:
        return call(name, function, samples)
    except KeyboardInterrupt:
        raise
    except Malformed as error:
        return Unscored(str(error))
    except BaseException as error:
        if len(samples["completions"]) == 1 and any(blank(*samples[c]) for c in needed_columns(function) if c in samples):
            return [None]
        return Unscored(reason_for(name, error))


def call(name: str, function: Callable[..., Any], samples: dict[str, Any]) -> list[Part]:
    """Return the results of `function` for each sample.

    `samples` has prompts, completions, completion_ids, the columns, and the other names of `Samples.arguments`, as equally long
    lists. Raise whatever the function raises, and `Malformed` if it returns no list. A `Failure` raised for a single sample is
    the sample's result. Raised for several, it does not identify the sample, so it is raised again.
    """
    count = len(samples["completions"])
    try:
        returned = function(**_select_arguments(name, function, samples))
        if inspect.isawaitable(returned):
            returned = finish(returned)
    except Failure as failure:
        if count > 1:
            raise
        return [Failure(message_of(failure))]
    tolist = getattr(returned, "tolist", None)  # arrays and tensors, without importing either library
    values = tolist() if callable(tolist) else returned
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence):
        raise Malformed(f"{name} returned {kind_of(returned)}; expected a list with one number or None per completion")
    if len(values) != count:
        # No exception: the pool would then call the function sample by sample, which could give a sample another one's reward.
        return [Unscored(f"{name} returned {len(values)} rewards for {count} completions")] * count
    return [_part_of(name, value) for value in values]


def finish(returned: Any) -> Any:
    """Return the result of an awaitable."""
    import asyncio  # takes a third of a worker's start-up, and few rewards need it

    async def result() -> Any:
        return await returned

    return asyncio.run(result())


def name_texts(function: Callable[..., Any], samples: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the arguments of every function, the extra arguments that a function may request by name).

    The extra arguments are three texts of each completion: its last turn, the policy's turns, and the transcript. Further ones
    are the policy's own tokens, and the opening tag of reasoning if the prompt ends with it. psigrad's own functions receive the
    policy's last turn and tokens as the completion: the text of an environment or a tool must earn no reward. Functions with
    `whole_conversation` receive the whole conversation.
    """
    given = dict(samples)
    completions, ids = given["completions"], given["completion_ids"]
    turns = given.pop("policy_turns", None) or [turns_of(completion) for completion in completions]
    own = given.pop("policy_ids", ids)
    last = [(each or [""])[-1] for each in turns]
    besides = {
        "last_turns": last,
        "policy_texts": ["\n".join(each) for each in turns],
        "transcripts": [transcript_of(completion) for completion in completions],
        "policy_ids": own,
        "opened_thoughts": given.pop("opened_thoughts", None) or [""] * len(completions),
    }
    module = getattr(function, "__module__", None) or type(function).__module__
    if module.startswith(("psigrad.", "psigrad_extras.judges.")) and not getattr(function, "whole_conversation", False):
        said = [
            x if isinstance(c, str) else [{"role": "assistant", "content": x}] for c, x in zip(completions, last, strict=True)
        ]
        given |= {"completions": said, "completion_ids": own}
    return given, besides


def _select_arguments(name: str, function: Callable[..., Any], samples: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function takes (all if it has **kwargs). Raise `Malformed` if a required one is missing."""
    samples, besides = name_texts(function, samples)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return samples
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    samples |= {p.name: besides[p.name] for p in named if p.name in besides}
    if missing := [p.name for p in named if p.default is p.empty and p.name not in samples]:
        if missing[0] in _TRAINERS:
            raise Malformed(
                f"{name} needs {missing[0]!r}, which TRL's trainer passes and psigrad does not, since rewards run in separate "
                "processes; use only completions and columns"
            )
        columns = ", ".join(column for column in samples if column not in (*_ALWAYS, *besides)) or "only prompts"
        needed = f"column{'s' * (len(missing) > 1)} {' and '.join(map(repr, missing))}"
        raise Malformed(
            f"{name} needs the {needed}, which the dataset does not have (found: {columns}{nearest(missing[0], samples)})"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return samples
    return {p.name: samples[p.name] for p in parameters if p.name in samples}


# The arguments of every reward function, besides the columns.
_ALWAYS = ("prompts", "completions", "completion_ids")
# Further arguments that TRL's trainer passes.
_TRAINERS = ("trainer_state", "log_extra", "log_metric", "environments")
_TEXTS = ("last_turns", "policy_texts", "transcripts", "policy_ids", "opened_thoughts")
GIVEN = frozenset((*_ALWAYS, *_TRAINERS, *_TEXTS))
"""Arguments of reward functions that are not columns."""


def needed_columns(function: Callable[..., Any]) -> list[str]:
    """Return the columns that a reward function requires: its parameters without a default, except the images."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty]
    return [name for name in named if name not in (*GIVEN, *images.COLUMNS)]


def _part_of(name: str, value: Any) -> Part:
    """Convert one value of a function's list to a plain Python object, which any process can load."""
    if isinstance(value, Failure):
        return Failure(message_of(value))
    if isinstance(value, FailedTest):
        return Failure(value.reason)  # its value is 0, and the records hold the reason
    if isinstance(value, Unscored):
        return Unscored(f"{name}: {value.reason}")
    kind = kind_of(value)
    item = getattr(value, "item", None)  # a scalar of numpy or torch
    if callable(item):
        try:
            value = item()
        except (RuntimeError, TypeError, ValueError):
            return Unscored(f"{name} returned {kind} for one completion; expected a number or None")
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        return Unscored(f"{name} returned {kind} for one completion; expected a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return Unscored(f"{name} returned {number} for one completion; expected a finite number or None")
    return number
