"""From rows to token ids and loss masks, and back to text for people and verifiers.

Text is encoded here, once; what was encoded or sampled stays as ids (contract 1). The context in which a turn is trained is,
token for token, the one in which it would be sampled: tokens never merge across the start of an assistant's turn.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Message, Row, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    """One row to train on: `ids` [T], `mask` [T] True on the tokens with loss, `truncated` if `max_length` cut its end off.

    The first token is never in the mask: nothing precedes it. After a cut the mask may be all False; leave such a row out.
    """

    ids: list[int]
    mask: list[bool]
    truncated: bool


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[int]:
    """The token ids that a completion of this row continues.

    Plain: the tokenizer's encoding with its default special tokens. Conversational: the chat template with the generation
    prompt, and the row's `tools` (list, or JSON text of one) and `chat_template_kwargs` if it has these columns, as TRL does. An
    assistant's turn at the end is the beginning of the answer (prefill): its text follows the generation prompt.
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
        ids = _encode(tokenizer, _render_prompt(tokenizer, row, row.prompt))
    if not ids:
        raise UserError(f"The prompt of {row.source} has no tokens; give a prompt with text that the tokenizer knows.")
    return ids


def ignores_tools(tokenizer: PreTrainedTokenizerBase, row: Row) -> bool:
    """Whether the row offers tools and the chat template renders the same prompt without them."""
    if not isinstance(row.prompt, list) or not _arguments(row)["tools"]:
        return False
    bare = replace(row, columns={name: value for name, value in row.columns.items() if name != "tools"})
    return _render_prompt(tokenizer, row, row.prompt) == _render_prompt(tokenizer, bare, row.prompt)


def example(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int = 0) -> Example:
    """Ids and loss mask of one row for supervised fine-tuning, cut at `max_length` tokens (0: never).

    - plain prompt-completion: prompt, completion, EOS; loss on the completion and its EOS;
    - plain text: text, EOS; loss on all but the first token;
    - conversational prompt-completion: loss on the assistant turns of the completion;
    - messages: loss on every assistant turn.

    An assistant turn is its content and the token that ends it, not the line break that a template writes behind. The turns
    are taken from the template's `{% generation %}` blocks, or else from rendering the conversation turn by turn. Raises
    UserError when the template renders a turn differently once others follow, or doesn't end turns with a special token.
    """
    if isinstance(row.completion, str):
        ids, mask = _plain(tokenizer, row, row.completion)
    elif row.completion or row.messages:
        ids, mask = _conversation(tokenizer, row)
    else:
        raise UserError(f"{row.source} has no completion to train on; give a row of the form prompt-completion or messages.")
    mask[:1] = [False] * len(mask[:1])
    truncated = 0 < max_length < len(ids)
    return Example(ids[:max_length], mask[:max_length], True) if truncated else Example(ids, mask, False)


def stop_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an assistant's turn in the chat template; a sampler must stop at it, and it is not always the EOS."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    built = example(tokenizer, Row("a test conversation", messages=turns))
    return [i for i, trained in zip(built.ids, built.mask, strict=True) if trained][-1]


def observation_ids(tokenizer: PreTrainedTokenizerBase, row: Row, observation: str | list[Message]) -> list[int]:
    """What an environment's answer adds behind an assistant's turn that has ended: tokens of it, up to the next turn's start.

    Plain: the text. Conversational: what the chat template writes between the end of an assistant's turn and the generation
    prompt; it is found on a conversation of two words, since templates may rewrite real turns (thinking, for one).
    """
    if isinstance(row.prompt, str):
        text = observation if isinstance(observation, str) else "\n".join(str(m.get("content", "")) for m in observation)
        return _encode(tokenizer, text) if text else []
    said = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    talk: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    end = str(tokenizer.convert_ids_to_tokens(stop_token_id(tokenizer)))
    before, after = _render(tokenizer, row, talk), _render(tokenizer, row, [*talk, *said], generation_prompt=True)
    cut = before.rindex(end) + len(end)
    if not after.startswith(before[:cut]):
        raise UserError(f"The chat template renders a turn of {row.source} differently once an answer follows; use another.")
    return _encode(tokenizer, after[cut:])


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """Text for people, rewards and tools. It is never encoded again.

    The tokenizer's named tokens (BOS, EOS, padding, …) and the end of a turn are left out. Other special tokens are the policy's
    words, as <think>, <answer> and <tool_call> are in some vocabularies, and stay.
    """
    hidden = _unsaid_ids(tokenizer, str(tokenizer.chat_template), *tokenizer.special_tokens_map.values())
    text = tokenizer.decode([i for i in ids if i not in hidden], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def prompt_for_reward(row: Row) -> Any:
    """The prompt as the dataset has it, which reward functions, environments and people are shown."""
    return row.prompt if row.plain_prompt is None else row.plain_prompt


@functools.lru_cache(maxsize=8)
def _unsaid_ids(tokenizer: PreTrainedTokenizerBase, template: str, *named: str) -> frozenset[int]:
    """`template` and `named` are the tokenizer's own; a cache that did not know them would outlive a change of theirs."""
    ids = {tokenizer.convert_tokens_to_ids(token) for token in named}
    with contextlib.suppress(UserError):  # no template, or one that does not end turns
        ids.add(stop_token_id(tokenizer))
    return frozenset(i for i in ids if isinstance(i, int))


def completion_for_reward(row: Row, text: str) -> str | list[Message]:
    """A completion as reward functions get it from TRL: text, or one assistant message where the prompt is conversational."""
    return text if isinstance(prompt_for_reward(row), str) else [{"role": "assistant", "content": text}]


def _encodable(text: str) -> str:
    r"""Spell out lone surrogates (`\ud800`): they have no UTF-8 form and make tokenizers raise."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    # verbose=False: `max_length` is our affair, the tokenizer's warning about its model's limit is not.
    return list(tokenizer(_encodable(text), add_special_tokens=special, verbose=False)["input_ids"])


def encode_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """The ids of `text` as they are behind `before`, where no token merges across the boundary; else those of `text` alone.

    Encoding `text` alone is not enough: SentencePiece tokenizers put a space before it.
    """
    base, joint = _encode(tokenizer, before), _encode(tokenizer, before + text)
    return joint[len(base) :] if joint[: len(base)] == base else _encode(tokenizer, text)


def _plain(tokenizer: PreTrainedTokenizerBase, row: Row, completion: str) -> tuple[list[int], list[bool]]:
    if tokenizer.eos_token_id is None:
        raise UserError("The tokenizer has no EOS token, so a model could never learn to stop; set tokenizer.eos_token.")
    if row.prompt is None:
        prompt, ids = [], _encode(tokenizer, completion, special=True)
    else:
        prompt, ids = prompt_ids(tokenizer, row), encode_after(tokenizer, str(row.prompt), completion)
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return prompt + ids, [False] * len(prompt) + [True] * len(ids)


def _conversation(tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[list[int], list[bool]]:
    text, spans = _assistant_spans(tokenizer, row)
    ids: list[int] = []
    runs: list[Span] = []
    before, at = "", 0
    for start, end in [*spans, (len(text), len(text))]:
        for cut, trained in ((start, False), (end, True)):
            piece = text[at:cut]
            new = encode_after(tokenizer, before, piece) if piece else []
            runs += [(len(ids), len(ids) + len(new))] if trained and piece else []
            ids += new
            before, at = piece or before, cut
    mask = [False] * len(ids)
    for turn, (first, last) in enumerate(runs, 1):
        last = _end_of_turn(tokenizer, row, ids, first, last, turn)
        mask[first:last] = [True] * (last - first)
    return ids, mask


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, row: Row, ids: list[int], first: int, last: int, turn: int) -> int:
    """One past the special token that ends a turn: in the span, or just behind it if a template leaves it out (trl#5988)."""
    added = tokenizer.added_tokens_decoder

    def ends(i: int) -> bool:
        return ids[i] in added and added[ids[i]].special

    def blank(i: int) -> bool:
        return not ends(i) and not str(tokenizer.decode([ids[i]])).strip()

    inner, outer = last, last
    while inner > first and blank(inner - 1):
        inner -= 1
    if inner > first and ends(inner - 1):
        return inner
    while outer < len(ids) and blank(outer):
        outer += 1
    if outer < len(ids) and ends(outer):
        return outer + 1
    raise UserError(
        f"The chat template doesn't end assistant turn {turn} of {row.source} with a special token of the tokenizer, so the "
        "model could never learn to stop; write {{ eos_token }} after the content in the template, or add the special token."
    )


def _assistant_spans(tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[str, list[Span]]:
    """The rendered conversation and the character spans of the assistant turns to train on, in order."""
    prompt = row.prompt if isinstance(row.prompt, list) else []
    answer = list(row.completion) if prompt and isinstance(row.completion, list) else []
    first = len(prompt)  # the first message that is trained on
    if answer and prompt[-1]["role"] == "assistant":
        first -= 1
        answer[0] = {**answer[0], "content": prompt[-1]["content"] + answer[0].get("content", "")}
    messages = row.messages or [*prompt[:first], *answer]
    template = _template(tokenizer, row)
    text = _render(tokenizer, row, messages)
    for i, message in enumerate(messages[first:], first + 1):
        # The last part only: templates may rewrite thinking. One made for content parts drops plain strings without a word.
        if message["role"] == "assistant" and message.get("content", "").split("</think>")[-1].strip() not in text:
            raise UserError(f"The chat template leaves out the content of message {i} in {row.source}; use one for plain text.")
    head = _render_prompt(tokenizer, row, prompt) if prompt else ""
    if not text.startswith(head):
        raise _not_preserving(row, "the prompt", "once the completion follows")
    if _GENERATION.search(template):
        spans = _spans_by_blocks(tokenizer, row, messages, template, text)
    else:
        spans = _spans_by_prefixes(tokenizer, row, messages, text, first)
    if prompt:
        spans = [span for span in spans if span[1] > len(head)]
        # The policy continues the prompt from its very end, wherever the template's first block starts.
        spans[:1] = [(len(head), end) for _, end in spans[:1]]
    if not spans:
        raise UserError(f"The chat template shows no assistant turn of {row.source} to train on; check its generation blocks.")
    return text, spans


def _spans_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, row: Row, messages: list[Message], text: str, first: int
) -> list[Span]:
    """A turn lies between the rendering of what precedes it, generation prompt included, and the rendering up to it."""
    spans = []
    for i in range(first, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        before, upto = _render(tokenizer, row, messages[:i], generation_prompt=True), _render(tokenizer, row, messages[: i + 1])
        if not text.startswith(upto):
            raise _not_preserving(row, f"message {i + 1} (assistant)", "once later messages follow (it may drop thinking)")
        if not upto.startswith(before):
            raise _not_preserving(row, f"the generation prompt of message {i + 1} (assistant)", "when the message is there")
        spans.append((len(before), len(upto)))
    return spans


def _not_preserving(row: Row, what: str, when: str) -> UserError:
    return UserError(
        f"The chat template is not prefix-preserving: in {row.source} it renders {what} differently {when}, so the model would "
        "train on a context that it never sees; use a template that keeps earlier text as it was or has {% generation %} blocks, "
        "or give one prompt-completion row per turn."
    )


def _arguments(row: Row) -> dict[str, Any]:
    tools = row.columns.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    extra = row.columns.get("chat_template_kwargs") or {}
    # Parquet fills absent keys of an object with null; a list of no tools makes Llama's template write its tool preamble.
    return {**{key: value for key, value in extra.items() if value is not None}, "tools": tools or None}


def _template(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    arguments = _arguments(row)
    try:
        return tokenizer.get_chat_template(arguments.get("chat_template"), arguments["tools"])
    except ValueError:
        raise UserError(
            f"{row.source} is a conversation and the tokenizer has no chat template; set tokenizer.chat_template or "
            "put a template into the model's folder as chat_template.jinja (psigrad.language.data.templates.CHATML is a simple "
            "one), or give prompts and completions as plain strings."
        ) from None


def _render_prompt(tokenizer: PreTrainedTokenizerBase, row: Row, prompt: list[Message]) -> str:
    """What the model continues: the generation prompt, and behind it the assistant's turn that the prompt ends with."""
    begun = prompt[-1] if prompt[-1]["role"] == "assistant" else None
    text = _render(tokenizer, row, prompt[:-1] if begun else prompt, generation_prompt=True)
    return text + str(begun["content"]) if begun else text


def _render(tokenizer: PreTrainedTokenizerBase, row: Row, messages: list[Message], *, generation_prompt: bool = False) -> str:
    _template(tokenizer, row)
    arguments = {**_arguments(row), "tokenize": False, "add_generation_prompt": generation_prompt}
    try:
        return str(tokenizer.apply_chat_template(messages, **arguments))
    except Exception as error:  # a template is a program: it can raise anything
        raise _refusal(row, error) from error


def _spans_by_blocks(
    tokenizer: PreTrainedTokenizerBase, row: Row, messages: list[Message], template: str, text: str
) -> list[Span]:
    """The spans of the template's generation blocks, less what the generation prompt has said (TRL's Qwen2.5 starts inside it).

    `apply_chat_template(return_assistant_tokens_mask=True)` is not used: it lets tokens merge across the start of a turn, and
    where a tokenizer trims offsets it loses every turn after one that starts with a space.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments = {**tokenizer.special_tokens_map, **_arguments(row), "chat_template": template, "add_generation_prompt": False}
    try:
        rendered: Any = render_jinja_template([messages], return_assistant_tokens_mask=True, **arguments)
    except Exception as error:  # a template is a program: it can raise anything
        raise _refusal(row, error) from error
    before = messages[: max(i for i, message in enumerate(messages) if message["role"] == "assistant")]
    bare, prompted = _render(tokenizer, row, before), _render(tokenizer, row, before, generation_prompt=True)
    header = prompted[len(bare) :] if prompted.startswith(bare) else ""
    spans = []
    for start, end in rendered[1][0]:
        at = text.rfind(header, 0, start + len(header))  # the last that starts no later than the block
        start = max(start, at + len(header)) if header and at >= 0 else start
        spans += [(start, end)] if start < end else []
    return spans


def _refusal(row: Row, error: Exception) -> UserError:
    reason = f"{type(error).__name__}: {show(str(error), 200)}"
    return UserError(f"The chat template can't render {row.source} ({reason}); mend the row or the template.")
