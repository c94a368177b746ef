"""Encoding rows as token ids and loss masks, and decoding tokens to text for readers and verifiers.

Text decoded from tokens is never encoded again for training (contract 1 of docs/architecture.md). The context in which a turn
is trained equals, token for token, the one in which it would be sampled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data.chat import dialect
from psigrad.language.data.chat.messages import Message
from psigrad.language.data.chat.rendering import check_embedded, reject_placeholder, row_error, without_panic
from psigrad.language.data.chat.turns import (
    OPEN,
    Context,
    Conversation,
    check_rendered,
    contexts,
    render_between,
    stop_tokens,
    turn_form,
)
from psigrad.language.data.dataset_rows import Row
from psigrad.language.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = tuple[str, str, bool]
"""A part of a text, encoded by `encode_after`: (the text before it that affects its tokens, the part, True if it is trained)."""
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

Turns end with the tokenizer's own EOS (`<|im_end|>` in models made for ChatML). A sampler that stops at EOS thus stops at the
end of a turn, and no token needs to be added.
"""


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: Row, *, strict: bool = True) -> list[int]:
    """Return the token ids that a completion of this row continues. For messages, they include the generation prompt.

    As in TRL, the template gets the row's columns `tools` (a list, or JSON text of one) and `chat_template_kwargs`. With `strict`
    False, the template may drop fields such as `name`.
    """
    if row.prompt is None:
        raise UserError(f"{row.source} has no prompt; a row of the form prompt-only or prompt-completion was expected.")
    if isinstance(row.prompt, str):
        reject_placeholder(tokenizer, row, row.prompt)
        ids = _encode(tokenizer, row.prompt, special=True)
        if ids and ids[-1] == tokenizer.eos_token_id and not row.prompt.endswith(str(tokenizer.eos_token)):
            raise UserError(
                f"The tokenizer ends the prompt of {row.source} with its EOS token, after which nothing can follow; "
                "set tokenizer.add_eos_token = False."
            )
    else:
        conversation = Conversation(tokenizer, row)
        text = conversation.prompt(row.prompt)
        check_rendered(conversation, row.prompt, dict.fromkeys(range(len(row.prompt)), text), set(), every_field=strict)
        ids = _encode(tokenizer, text)
    if not ids:
        raise row_error(row, "prompt", "has no tokens; write some text, or give the tokenizer a BOS token")
    return ids


def examples(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int = 0, *, empty_thinking: bool = False) -> list[Example]:
    """Return ids and loss masks of one row for supervised fine-tuning, each cut at `max_length` tokens (0: never).

    - plain prompt-completion: prompt, completion, EOS; loss on the completion and its EOS;
    - plain text: text, EOS; loss on all but the first token;
    - conversational prompt-completion: loss on the assistant turns of the completion;
    - messages: loss on every assistant turn, except a turn that has 0 in its field `weight`, `train` or `loss_mask`.

    An assistant turn includes the token that ends it. An empty thought that the template adds has a loss only with
    `empty_thinking`. If the template rewrites earlier turns, a row gives several examples: each turn in the context in which it
    is sampled.
    """
    if isinstance(row.completion, str):
        made = [_plain(tokenizer, row, row.completion)]
    elif row.completion or row.messages:
        conversation, found = _render(tokenizer, row, empty_thinking)
        stops = _stops_of(conversation)
        made = [_conversation(conversation, pieces, stops) for pieces in found]
    else:
        raise UserError(f"{row.source} has no completion to train on; give a row of the form prompt-completion or messages.")
    cut = []
    for ids, mask in made:
        mask[:1] = [False] * len(mask[:1])
        truncated = 0 < max_length < len(ids)
        cut.append(Example(ids[:max_length], mask[:max_length], True) if truncated else Example(ids, mask, False))
    return cut


def encode_batch(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, empty_thinking: bool = False) -> None:
    """Render the conversations among `rows`, and encode in one call all texts that later calls of `examples` will need.

    Do nothing outside a `dialect.cache_specials` block.
    """
    known, texts = dialect.specials_of(tokenizer), dict[str, None]()
    if known.prefix_ids is None or known.cuts is None or not _is_plain(known.backend):
        return
    for row in rows:
        if row.messages or isinstance(row.completion, list):
            with contextlib.suppress(UserError):  # the error is raised again when the row is encoded
                known.conversations[id(row)] = found = _render(tokenizer, row, empty_thinking)
                all_of = [_escape_surrogates(before + text) for pieces in found[1] for before, text, _ in pieces]
                texts.update((text, None) for text in all_of if not images.MARK.search(text))
    # One call is faster: rendering between two encodings evicts the encoder's data from the CPU's caches.
    with contextlib.suppress(UserError):  # likewise
        made = without_panic(partial(known.backend.encode_batch_fast, add_special_tokens=False), [*texts])
        known.encoded.update(zip(texts, (one.ids for one in made), strict=True))


def _render(tokenizer: PreTrainedTokenizerBase, row: Row, empty_thinking: bool) -> tuple[Conversation, list[list[Piece]]]:
    """Return (the row's conversation, the `Piece`s of each of its contexts): those that `encode_batch` made, or new ones."""
    made: tuple[Conversation, list[list[Piece]]] | None = dialect.specials_of(tokenizer).conversations.pop(id(row), None)
    if made is None or made[0].row is not row:
        conversation = Conversation(tokenizer, row)
        found = contexts(conversation, empty_thinking=empty_thinking)
        made = (
            conversation,
            [[(_last_cut(tokenizer, before), text, trained) for before, text, trained in _pieces(one)] for one in found],
        )
    return made


def example(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int = 0) -> Example:
    """Return the last of the row's `examples`, the one with the last turn, cut at `max_length` tokens (0: never)."""
    return examples(tokenizer, row, max_length)[-1]


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, row: Row | None = None) -> tuple[int, ...]:
    """Return the ids of the tokens that end an assistant turn and, if the row offers tools, a turn that calls a tool.

    A sampler must stop at them. They are not always the EOS.
    """
    return _stops_of(Conversation(tokenizer, row or Row("a test conversation")))


def _stops_of(conversation: Conversation) -> tuple[int, ...]:
    found: Any = conversation.tokenizer.convert_tokens_to_ids(stop_tokens(conversation)) or [conversation.tokenizer.eos_token_id]
    return tuple(token for token in found if token is not None)


def describe_rewrites(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[str]:
    """Return a note for each feature of `row` that the chat template lacks. The note says what is written instead."""
    prompt = row.prompt if isinstance(row.prompt, list) else []
    messages = row.messages or [*prompt, *(row.completion if isinstance(row.completion, list) else [])]
    if not messages:
        return []
    conversation = Conversation(tokenizer, row)
    return dialect.describe_rewrites(messages, conversation.arguments["tools"], conversation.dialect)


def observation_ids(tokenizer: PreTrainedTokenizerBase, row: Row, observation: str | list[Message]) -> list[int]:
    """Return the tokens of an environment's answer: all those between the end of the policy's turn and its next turn."""
    if isinstance(row.prompt, str):
        text = observation if isinstance(observation, str) else "\n".join(str(m.get("content", "")) for m in observation)
        return _encode(tokenizer, text) if text else []
    said = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    end, text = render_between(Conversation(tokenizer, row), said)
    return encode_after(tokenizer, end, text)


@dataclass(frozen=True)
class Reading:
    """The policy's input for a turn: its whole `text`, and `ids`, which replace the context if `restart`, else extend it."""

    text: str
    ids: list[int]
    restart: bool


def next_reading(tokenizer: PreTrainedTokenizerBase, row: Row, messages: list[Message], context: str) -> Reading:
    """Return the input of the policy for the next turn of a conversation, given the text `context` so far."""
    text = Conversation(tokenizer, row).prompt(messages)
    if text.startswith(context):
        return Reading(text, encode_after(tokenizer, context, text[len(context) :]), False)
    return Reading(text, _encode(tokenizer, text), True)  # the template rewrites earlier turns (Qwen3 drops thoughts)


def decode_after(tokenizer: PreTrainedTokenizerBase, before: int, ids: Iterable[int]) -> str:
    """Return the text of the tokens `ids`, special tokens included, as it is when they follow the token `before`."""
    kept, whole = (images.decode(tokenizer, some, clean_up_tokenization_spaces=False) for some in ([before], [before, *ids]))
    return whole[len(kept) :]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """Return the text of tokens for readers, rewards and tools.

    The tokenizer's named tokens (BOS, EOS, padding, …) and the end of a turn are dropped. Other special tokens stay, for example
    <think> in some vocabularies.
    """
    hidden = _dropped_ids(tokenizer, str(tokenizer.chat_template), *tokenizer.special_tokens_map.values())
    said = [i for i in ids if i not in hidden]
    text = images.decode(tokenizer, said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return images.MARK.sub(r"\1", text)  # a policy that writes a mark shows no image


def special_token_remover(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    """Return a function (text, ids) -> the text of the tokens `ids` without special tokens, as transformers decodes them.

    `text` is the result of `decode`. If `ids` is empty, special tokens are removed from `text`.
    """
    special = dialect.specials_of(tokenizer).pattern

    def remove(text: str, ids: Sequence[int] = ()) -> str:
        if not ids or not special.search(text):
            return special.sub("", text)
        return images.decode(tokenizer, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return remove


def hidden_marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens that a policy writes around its thoughts and answers, such as <answer> and </answer>."""
    special, named = dialect.specials_of(tokenizer), {*tokenizer.special_tokens_map.values()}
    words = [str(word) for word in tokenizer.convert_ids_to_tokens(sorted(special.ids))]
    closing = {word for word in words if word.startswith("</") and word.replace("</", "<") in words}
    pairs = closing | {word.replace("</", "<") for word in closing}
    marks = set[str]()
    with contextlib.suppress(UserError):  # no template
        form = turn_form(Conversation(tokenizer, Row("a test conversation")), "user")
        marks = {*special.pattern.findall(form.opens + form.closes)}
    return [word for word in words if word in (pairs | marks) - named]


def opened_thought(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str:
    """Return the tag that opens a thought at the prompt's end, such as <think> for DeepSeek-R1; "" if there is none."""
    found = OPEN.search(images.decode(tokenizer, prompt_ids[-16:], clean_up_tokenization_spaces=False))
    return found.group() if found else ""


@functools.lru_cache(maxsize=8)
def _dropped_ids(tokenizer: PreTrainedTokenizerBase, template: str, *named: str) -> frozenset[int]:
    """Return the ids that `decode` drops.

    `named` are the tokenizer's named tokens. The cache key has `template` and `named`, so a change of either is noticed.
    """
    ids = {tokenizer.convert_tokens_to_ids(token) for token in named}
    with contextlib.suppress(UserError):  # no template, or one that does not end turns
        conversation = Conversation(tokenizer, Row("a test conversation"))
        ends = conversation.special.findall(conversation.dialect.turn_end)  # Cohere ends the answer, and then the turn
        ids |= {*_stops_of(conversation), *(tokenizer.convert_tokens_to_ids(end) for end in ends)}
    return frozenset(i for i in ids if isinstance(i, int))


def completion_for_reward(row: Row, text: str) -> str | list[Message]:
    """Return a completion in TRL's form for reward functions: text, or one assistant message for a conversational prompt."""
    return text if isinstance(row.dataset_prompt, str) else [{"role": "assistant", "content": text}]


def _escape_surrogates(text: str) -> str:
    r"""Escape lone surrogates (`\ud800`): they have no UTF-8 form and make tokenizers raise."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    # verbose=False suppresses the tokenizer's warning about its model's limit: psigrad checks `max_length` itself.
    text, known, image_format = _escape_surrogates(text), dialect.specials_of(tokenizer), images.image_format_of(tokenizer)
    text, pictures = images.expand_marks(text, image_format)
    if special or not _is_plain(known.backend):
        made = without_panic(lambda given: tokenizer(given, add_special_tokens=special, verbose=False), text)
        ids = list(made["input_ids"])
    elif (ahead := known.encoded.get(text)) is not None:
        ids = ahead.copy()
    else:
        ids = without_panic(partial(known.backend.encode_batch_fast, add_special_tokens=False), [text])[0].ids
    check_embedded(tokenizer, ids)
    if image_format is not None and (pictures or image_format.token_id in ids):
        ids = images.insert_image_ids(ids, pictures, image_format)
    # A plain text that a template rendered has a BOS already, and the tokenizer adds a second one.
    doubled = special and tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if doubled and not text.startswith(2 * str(tokenizer.bos_token)) else ids


def _is_plain(backend: Any) -> bool:
    """Return True if the `tokenizers` object `backend` gives the same ids as the transformers tokenizer that contains it."""
    return backend is not None and not (backend.truncation or backend.padding or backend.encode_special_tokens)


_NONE: list[int] = []
_BEGUN = 64  # The size of the cache of `encode_after`, which nearly always needs the same few texts, such as a turn's opening.


def encode_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Return the ids of `text` encoded after `before`: alone, it would get a space in front from SentencePiece."""
    before = _last_cut(tokenizer, before)
    known = dialect.specials_of(tokenizer).prefix_ids
    if known is None:
        base = _encode(tokenizer, before)
    elif (base := known.get(before, _NONE)) is _NONE:
        if len(known) >= _BEGUN:
            known.clear()
        base = known[before] = _encode(tokenizer, before)
    joint = _encode(tokenizer, before + text)
    # Alone, if a token would join the end of `before` to the start of `text`.
    return joint[len(base) :] if joint[: len(base)] == base else _encode(tokenizer, text)


def _last_cut(tokenizer: PreTrainedTokenizerBase, before: str) -> str:
    """Return the end of `before` that affects how a text after it is tokenised: the text from the last added token on."""
    cuts = dialect.specials_of(tokenizer).cuts  # tokenizers split a text at its added tokens first
    return before[max((match.start() for match in cuts.finditer(before)), default=0) :] if cuts is not None else before


def _plain(tokenizer: PreTrainedTokenizerBase, row: Row, completion: str) -> tuple[list[int], list[bool]]:
    if tokenizer.eos_token_id is None:
        raise UserError("The tokenizer has no EOS token, so a model could never learn to stop; set tokenizer.eos_token.")
    reject_placeholder(tokenizer, row, completion)
    if row.prompt is None:
        prompt, ids = [], _encode(tokenizer, completion, special=True)
    else:
        prompt, ids = prompt_ids(tokenizer, row), encode_after(tokenizer, str(row.prompt), completion)
    # A text that was rendered before ends with an end-of-turn token, and with a line break that no policy samples.
    end = _trim(tokenizer, ids, 0, len(ids))
    if not end or not _ends_text(tokenizer, ids[end - 1]):
        ids, end = [*ids, tokenizer.eos_token_id], len(ids) + 1
    return prompt + ids, [False] * len(prompt) + [True] * end + [False] * (len(ids) - end)


def _ends_text(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return True if no EOS is needed after `token`: it is the EOS, or a special token other than a closing tag (</answer>)."""
    is_tag = token != tokenizer.eos_token_id and str(tokenizer.convert_ids_to_tokens(token)).startswith(("</", "[/"))
    return token in dialect.specials_of(tokenizer).ids and not is_tag


def _conversation(conversation: Conversation, pieces: Sequence[Piece], stops: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    tokenizer, row = conversation.tokenizer, conversation.row
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
    """Yield the pieces of a context that are encoded one by one: each trained span, and the text between spans."""
    before, at = "", 0
    for start, end in [*context.spans, (len(context.text), len(context.text))]:
        for cut, trained in ((start, False), (end, True)):
            if piece := context.text[at:cut]:
                yield before, piece, trained
                before = piece
            at = cut


def _is_blank(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return True if a token is white space."""
    return token not in dialect.specials_of(tokenizer).ids and not str(tokenizer.decode([token])).strip()


def _trim(tokenizer: PreTrainedTokenizerBase, ids: list[int], first: int, last: int) -> int:
    """Return the index `last`, moved back over the white-space tokens at the end of ids[first:last]."""
    while last > first and _is_blank(tokenizer, ids[last - 1]):
        last -= 1
    return last


def _end_of_turn(
    tokenizer: PreTrainedTokenizerBase, row: Row, ids: list[int], first: int, last: int, turn: int, stops: tuple[int, ...]
) -> int:
    """Return the index after the special token that ends the turn ids[first:last]. `turn` is its number, for the error."""
    special = dialect.specials_of(tokenizer).ids
    inner = outer = _trim(tokenizer, ids, first, last)
    # A stop may come before other special tokens (Phi-3's template adds the EOS), or after the generation block (trl#5988).
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
    raise row_error(
        row,
        "",
        f"the chat template doesn't end assistant turn {turn} with a special token of the tokenizer, so the "
        "model could never learn to stop; write {{ eos_token }} after the content in the template, or add the special token",
    )
