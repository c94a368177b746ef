"""From rows to token ids and loss masks, and back to text for people and verifiers.

Text is encoded here, once; what was encoded or sampled stays as ids (contract 1). The context in which a turn is trained is,
token for token, the one in which it would be sampled: tokens never merge across the start of an assistant's turn.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psigrad.errors import UserError
from psigrad.language.data.chat import dialect
from psigrad.language.data.chat.messages import Message
from psigrad.language.data.chat.rendering import check_known, refuse
from psigrad.language.data.chat.turns import OPEN, Context, Talk, between, check_shown, contexts, stop_tokens
from psigrad.language.data.dataset_rows import Row
from psigrad.language.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = tuple[str, str, bool]
"""What stands before a text and bears on its tokens, the text, and whether it is trained."""
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + eos_token -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""ChatML for tokenizers without a template: `tokenizer.chat_template = CHATML`.

Turns end with the tokenizer's own EOS (`<|im_end|>` in models made for ChatML), so a sampler that stops at EOS stops at the end
of a turn, and no token needs to be added.
"""


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[int]:
    """The token ids that a completion of this row continues.

    Plain: the tokenizer's encoding with its default special tokens. Conversational: the chat template with the generation
    prompt, and the row's `tools` (list, or JSON text of one) and `chat_template_kwargs` if it has these columns, as TRL does. An
    assistant's turn at the end is the beginning of the answer (prefill): its text follows the generation prompt. Raises
    `RowError` where the template leaves something of the prompt out, and where no token is left.
    """
    if row.prompt is None:
        raise UserError(f"{row.source} has no prompt; a row of the form prompt-only or prompt-completion was expected.")
    if isinstance(row.prompt, str):
        ids = _encode(tokenizer, row.prompt, special=True)
        if ids and ids[-1] == tokenizer.eos_token_id and not row.prompt.endswith(str(tokenizer.eos_token)):
            raise UserError(
                f"The tokenizer ends the prompt of {row.source} with its EOS token, after which nothing can follow; "
                "set tokenizer.add_eos_token = False."
            )
    else:
        talk = Talk(tokenizer, row)
        text = talk.prompt(row.prompt)
        check_shown(talk, row.prompt, dict.fromkeys(range(len(row.prompt)), text), set())
        ids = _encode(tokenizer, text)
    if not ids:
        raise refuse(row, "prompt", "has no tokens; give it some text, or the tokenizer a BOS token")
    return ids


def examples(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int = 0, *, empty_thinking: bool = False) -> list[Example]:
    """Ids and loss masks of one row for supervised fine-tuning, each cut at `max_length` tokens (0: never).

    - plain prompt-completion: prompt, completion, EOS; loss on the completion and its EOS;
    - plain text: text, EOS; loss on all but the first token;
    - conversational prompt-completion: loss on the assistant turns of the completion;
    - messages: loss on every assistant turn whose `weight` (`train`, `loss_mask`) is not 0.

    An assistant turn is its content and the token that ends it, not the line break that a template writes behind. A conversation
    whose template rewrites the past is several examples: each turn in the context in which it is sampled. Raises `RowError` for
    a turn without such a context, one that ends with no special token, and one of which the template leaves something out.
    """
    if isinstance(row.completion, str):
        made = [_plain(tokenizer, row, row.completion)]
    elif row.completion or row.messages:
        talk, found = _rendered(tokenizer, row, empty_thinking)
        stops = _stops_of(talk)
        made = [_conversation(talk, pieces, stops) for pieces in found]
    else:
        raise UserError(f"{row.source} has no completion to train on; give a row of the form prompt-completion or messages.")
    cut = []
    for ids, mask in made:
        mask[:1] = [False] * len(mask[:1])
        truncated = 0 < max_length < len(ids)
        cut.append(Example(ids[:max_length], mask[:max_length], True) if truncated else Example(ids, mask, False))
    return cut


def encode_ahead(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, empty_thinking: bool = False) -> None:
    """Render the conversations among `rows`, and encode in one call what `examples` will ask for of them, where the tokenizer is
    `fixed`: what it needs leaves the processor's caches while a template runs.
    """
    known, texts = dialect.specials_of(tokenizer), dict[str, None]()
    if known.begun is None or known.cuts is None or not _is_plain(known.backend):
        return
    for row in rows:
        if row.messages or isinstance(row.completion, list):
            with contextlib.suppress(UserError):  # it is raised again when the row's turn comes
                known.talks[id(row)] = found = _rendered(tokenizer, row, empty_thinking)
                texts.update((_encodable(before + text), None) for pieces in found[1] for before, text, _ in pieces)
    made = known.backend.encode_batch_fast([*texts], add_special_tokens=False)
    known.ahead.update(zip(texts, (one.ids for one in made), strict=True))


def _rendered(tokenizer: PreTrainedTokenizerBase, row: Row, empty_thinking: bool) -> tuple[Talk, list[list[Piece]]]:
    """A conversation and the pieces of its contexts, those made ahead if they are there."""
    made: tuple[Talk, list[list[Piece]]] | None = dialect.specials_of(tokenizer).talks.pop(id(row), None)
    if made is None or made[0].row is not row:
        talk = Talk(tokenizer, row)
        found = contexts(talk, empty_thinking=empty_thinking)
        made = talk, [[(_last_cut(tokenizer, before), text, trained) for before, text, trained in _pieces(one)] for one in found]
    return made


def example(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int = 0) -> Example:
    """The one example of a row (`examples`); of several the last, whose context is the whole conversation as it is then read."""
    return examples(tokenizer, row, max_length)[-1]


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, row: Row | None = None) -> tuple[int, ...]:
    """The tokens that end an assistant's turn in the chat template; a sampler must stop at them, and they are not always the EOS.

    A turn that calls a tool may have an end of its own, which counts where the row offers tools. The EOS where the template shows
    no end.
    """
    return _stops_of(Talk(tokenizer, row or Row("a test conversation")))


def _stops_of(talk: Talk) -> tuple[int, ...]:
    found: Any = talk.tokenizer.convert_tokens_to_ids(stop_tokens(talk)) or [talk.tokenizer.eos_token_id]
    return tuple(token for token in found if token is not None)


def said_otherwise(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[str]:
    """What of a row its chat template has no words for, and how it is said instead."""
    prompt = row.prompt if isinstance(row.prompt, list) else []
    messages = row.messages or [*prompt, *(row.completion if isinstance(row.completion, list) else [])]
    if not messages:
        return []
    talk = Talk(tokenizer, row)
    return dialect.said_otherwise(messages, talk.arguments["tools"], talk.dialect)


def observation_ids(tokenizer: PreTrainedTokenizerBase, row: Row, observation: str | list[Message]) -> list[int]:
    """What an environment's answer adds behind an assistant's turn that has ended: tokens of it, up to the next turn's start.

    Plain: the text. Conversational: what the chat template writes between the end of an assistant's turn and the generation
    prompt.
    """
    if isinstance(row.prompt, str):
        text = observation if isinstance(observation, str) else "\n".join(str(m.get("content", "")) for m in observation)
        return _encode(tokenizer, text) if text else []
    said = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    end, text = between(Talk(tokenizer, row), said)
    return encode_after(tokenizer, end, text)


@dataclass(frozen=True)
class Reading:
    """What the policy reads before a turn: its `text`, and the `ids` behind what it has read, or, `anew`, all of them."""

    text: str
    ids: list[int]
    anew: bool


def read_on(tokenizer: PreTrainedTokenizerBase, row: Row, messages: list[Message], known: str) -> Reading:
    """What the policy reads when it goes on with a conversation of which it has `known`.

    It is what the chat template renders for sampling, as a server would of the messages. Where that goes on from what is known,
    tokens stay as they were sampled; a template that rewrites the past (Qwen3 drops what was thought) is read anew. Raises
    `UserError` where the template cannot say them.
    """
    text = Talk(tokenizer, row).prompt(messages)
    if text.startswith(known):
        return Reading(text, encode_after(tokenizer, known, text[len(known) :]), False)
    return Reading(text, _encode(tokenizer, text), True)


def words_of(tokenizer: PreTrainedTokenizerBase, before: int, ids: Iterable[int]) -> str:
    """The text of tokens behind the token `before`, special tokens included."""
    kept, whole = (tokenizer.decode(some, clean_up_tokenization_spaces=False) for some in ([before], [before, *ids]))
    return str(whole)[len(kept) :]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """Text for people, rewards and tools. It is never encoded again.

    The tokenizer's named tokens (BOS, EOS, padding, …) and the end of a turn are left out. Other special tokens are the policy's
    words, as <think>, <answer> and <tool_call> are in some vocabularies, and stay.
    """
    hidden = _unsaid_ids(tokenizer, str(tokenizer.chat_template), *tokenizer.special_tokens_map.values())
    text = tokenizer.decode([i for i in ids if i not in hidden], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def opened_thought(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str:
    """The tag of a thought that a prompt ends in, as <think> before every answer of DeepSeek-R1; empty where there is none."""
    found = OPEN.search(str(tokenizer.decode([*prompt_ids[-16:]], clean_up_tokenization_spaces=False)))
    return found.group() if found else ""


@functools.lru_cache(maxsize=8)
def _unsaid_ids(tokenizer: PreTrainedTokenizerBase, template: str, *named: str) -> frozenset[int]:
    """`template` and `named` are the tokenizer's own; a cache that did not know them would outlive a change of theirs."""
    ids = {tokenizer.convert_tokens_to_ids(token) for token in named}
    with contextlib.suppress(UserError):  # no template, or one that does not end turns
        talk = Talk(tokenizer, Row("a test conversation"))
        ends = talk.special.findall(talk.dialect.turn_end)  # Cohere ends the answer, and then the turn
        ids |= {*_stops_of(talk), *(tokenizer.convert_tokens_to_ids(end) for end in ends)}
    return frozenset(i for i in ids if isinstance(i, int))


def completion_for_reward(row: Row, text: str) -> str | list[Message]:
    """A completion as reward functions get it from TRL: text, or one assistant message where the prompt is conversational."""
    return text if isinstance(row.dataset_prompt, str) else [{"role": "assistant", "content": text}]


def _encodable(text: str) -> str:
    r"""Spell out lone surrogates (`\ud800`): they have no UTF-8 form and make tokenizers raise."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    # verbose=False: `max_length` is our affair, the tokenizer's warning about its model's limit is not.
    text, known = _encodable(text), dialect.specials_of(tokenizer)
    if special or not _is_plain(known.backend):
        ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    elif (ahead := known.ahead.get(text)) is not None:
        ids = ahead.copy()
    else:
        ids = known.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    # text that was rendered before has its BOS, and the tokenizer puts another before it
    check_known(tokenizer, ids)
    doubled = special and tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if doubled and not text.startswith(2 * str(tokenizer.bos_token)) else ids


def _is_plain(backend: Any) -> bool:
    """Whether a text's tokens are what the tokenizer behind transformers' makes of it, and nothing else."""
    return backend is not None and not (backend.truncation or backend.padding or backend.encode_special_tokens)


_NONE: list[int] = []
_BEGUN = 64  # texts behind which others are encoded; nearly always the same few, such as the start of an assistant's turn


def encode_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """The ids of `text` as they are behind `before`, where no token merges across the boundary; else those of `text` alone.

    Encoding `text` alone is not enough: SentencePiece tokenizers put a space before it.
    """
    before = _last_cut(tokenizer, before)
    known = dialect.specials_of(tokenizer).begun
    if known is None:
        base = _encode(tokenizer, before)
    elif (base := known.get(before, _NONE)) is _NONE:
        if len(known) >= _BEGUN:
            known.clear()
        base = known[before] = _encode(tokenizer, before)
    joint = _encode(tokenizer, before + text)
    return joint[len(base) :] if joint[: len(base)] == base else _encode(tokenizer, text)


def _last_cut(tokenizer: PreTrainedTokenizerBase, before: str) -> str:
    """What of a text bears on the tokens behind it. Tokenizers cut a text at its added tokens before anything else: what stands
    before the last one changes nothing.
    """
    cuts = dialect.specials_of(tokenizer).cuts
    return before[max((match.start() for match in cuts.finditer(before)), default=0) :] if cuts is not None else before


def _plain(tokenizer: PreTrainedTokenizerBase, row: Row, completion: str) -> tuple[list[int], list[bool]]:
    if tokenizer.eos_token_id is None:
        raise UserError("The tokenizer has no EOS token, so a model could never learn to stop; set tokenizer.eos_token.")
    if row.prompt is None:
        prompt, ids = [], _encode(tokenizer, completion, special=True)
    else:
        prompt, ids = prompt_ids(tokenizer, row), encode_after(tokenizer, str(row.prompt), completion)
    # text that was rendered before has its end of turn, with a line break behind it that nobody samples
    end = _trim(tokenizer, ids, 0, len(ids))
    if not end or not _ends_text(tokenizer, ids[end - 1]):
        ids, end = [*ids, tokenizer.eos_token_id], len(ids) + 1
    return prompt + ids, [False] * len(prompt) + [True] * end + [False] * (len(ids) - end)


def _ends_text(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether a text has an end of its own: a special token, but not a closing tag, as </answer> is in some vocabularies."""
    is_tag = token != tokenizer.eos_token_id and str(tokenizer.convert_ids_to_tokens(token)).startswith(("</", "[/"))
    return token in dialect.specials_of(tokenizer).ids and not is_tag


def _conversation(talk: Talk, pieces: Sequence[Piece], stops: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    tokenizer, row = talk.tokenizer, talk.row
    ids: list[int] = []
    runs: list[tuple[int, int]] = []
    for before, piece, trained in pieces:
        new = encode_after(tokenizer, before, piece)
        runs += [(len(ids), len(ids) + len(new))] if trained else []
        ids += new
    mask = [False] * len(ids)
    for turn, (first, last) in enumerate(runs, 1):
        last = _end_of_turn(tokenizer, row, ids, first, last, turn, stops)
        mask[first:last] = [True] * (last - first)
    return ids, mask


def _pieces(context: Context) -> Iterator[Piece]:
    """A context in pieces that are encoded one by one."""
    before, at = "", 0
    for start, end in [*context.spans, (len(context.text), len(context.text))]:
        for cut, trained in ((start, False), (end, True)):
            if piece := context.text[at:cut]:
                yield before, piece, trained
                before = piece
            at = cut


def _is_blank(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether a token is white space."""
    return token not in dialect.specials_of(tokenizer).ids and not str(tokenizer.decode([token])).strip()


def _trim(tokenizer: PreTrainedTokenizerBase, ids: list[int], first: int, last: int) -> int:
    """`last` less the white space before it."""
    while last > first and _is_blank(tokenizer, ids[last - 1]):
        last -= 1
    return last


def _end_of_turn(
    tokenizer: PreTrainedTokenizerBase, row: Row, ids: list[int], first: int, last: int, turn: int, stops: tuple[int, ...]
) -> int:
    """One past the special token that ends a turn: in the span, or just behind it if a template leaves it out (trl#5988). What a
    template writes behind it at the very end (Phi-3: the EOS) nobody samples.
    """
    special = dialect.specials_of(tokenizer).ids
    inner = outer = _trim(tokenizer, ids, first, last)
    while inner > first and ids[inner - 1] in special and ids[inner - 1] not in stops:
        inner = _trim(tokenizer, ids, first, inner - 1)
    if inner > first and ids[inner - 1] in stops:
        return inner
    behind = last
    while behind < len(ids) and _is_blank(tokenizer, ids[behind]):
        behind += 1
    next_one = ids[behind] if behind < len(ids) else -1
    if next_one not in stops and outer > first and ids[outer - 1] in special:
        return outer
    if next_one in special:
        return behind + 1
    raise refuse(
        row,
        "",
        f"the chat template doesn't end assistant turn {turn} with a special token of the tokenizer, so the "
        "model could never learn to stop; write {{ eos_token }} after the content in the template, or add the special token",
    )
