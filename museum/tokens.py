"""Exhibits of tokens, templates, masks and packing."""

from __future__ import annotations

from types import SimpleNamespace

from museum.exhibit import Case, exhibit
from museum.worlds import EOS, A, B, C, D

_USER, _ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
MARKED = "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <eos>{% endgeneration %} {% else %}{{ m['content'] }} {% endif %}{% endfor %}"  # fmt: skip  # noqa: E501


@exhibit("huggingface/transformers#23530", "huggingface/trl#1623", "huggingface/trl#3091")
def eos_as_padding() -> Case:
    """With <eos> as the padding token, the end of every text is masked as padding, and the model never learns to stop.

    Texts "a b <eos>" and "a <eos>" in one batch: each <eos> that ends a text is a target, so 2. A mask made by comparing tokens
    with the padding token leaves 0.
    """
    return Case(SimpleNamespace(texts=["a b", "a"]), (2.0,), (0.0,))


@exhibit("huggingface/transformers#47325")
def assistant_mask() -> Case:
    """If an assistant's turn ends with a space, all later tokens become targets, including the user's words.

    Turns: user "a", assistant "b", user "a c d", assistant "b". The tokenizer drops spaces, and the template's block for the
    assistant's turn ends with one. No token of the user is trained on: 0. The faulty mask covers the later turn's 3.
    """
    turns = [_USER, _ASSISTANT, {"role": "user", "content": "a c d"}, _ASSISTANT]
    template = MARKED.replace(" <eos>{% endgeneration %} ", " <eos> {% endgeneration %}")
    return Case(SimpleNamespace(turns=turns, template=template, users=(A, C, D)), (0.0,), (3.0,))


@exhibit("marin-community/marin#7237", "huggingface/trl#4201")
def unmarked_template() -> Case:
    """A chat template that does not mark the assistant's turns leaves no target: the run trains on nothing.

    Turns: user "a", assistant "b", with a template that writes their words and <eos>. "b" and the <eos> after it are targets: 2.
    A mask that is read from the template's generation blocks has none: 0.
    """
    template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return Case(SimpleNamespace(turns=[_USER, _ASSISTANT], template=template), (2.0,), (0.0,))


@exhibit("huggingface/trl#3328", "huggingface/trl#1400")
def doubled_bos() -> Case:
    """The template writes <bos>, and the tokenizer adds a second one.

    "<bos> a b <eos>" begins with one <bos>, as in generation: 1. Tokenised as plain text it has 2.
    """
    template = "<bos> " + MARKED
    return Case(SimpleNamespace(turns=[_USER, _ASSISTANT], template=template), (1.0,), (2.0,))


@exhibit("pytorch/torchtitan#4504", "areal-project/AReaL#1427")
def merged_boundary() -> Case:
    """The last token of the prompt merges with the completion, so training sees a context that generation never has.

    The tokenizer merges "b" and "c". Generation continues the prompt "ab", which is the tokens a, b. A row "ab" + "c" must have
    this context: 0 of its first two tokens differ. Tokenised as one text, "abc" is a, bc: 1 differs.
    """
    return Case(SimpleNamespace(prompt="ab", completion="c", context=[A, B]), (0.0,), (1.0,))


@exhibit("huggingface/trl#7039")
def second_end_token() -> Case:
    """A completion that ends with the second of a model's end tokens counts as cut by the length limit.

    The model stops at <eos> and at d. Of completions of at most 2 tokens, "a <eos>" and "a d" ended, and "a b" was cut. With cut
    completions masked, 2 + 2 + 0 tokens are trained on: 2, 2, 0. With one end token known: 2, 0, 0.
    """
    return Case(SimpleNamespace(completions=[[A, EOS], [A, D], [A, B]], ends=[EOS, D], limit=2), (2.0, 2.0, 0.0), (2.0, 0.0, 0.0))


def _leak(kind: str) -> Case:
    """Return the case of two texts in one row of a random model, with the difference that a leak would make."""
    import torch

    from museum.worlds import random_model

    x, model = SimpleNamespace(first=[A, B, C, D], second=[B, A, A, D], kind=kind), random_model(kind)
    alone, joined = (torch.log_softmax(model(torch.tensor([ids])).logits, -1)[0, -4:] for ids in (x.second, x.first + x.second))
    found = (alone - joined)[:3].gather(1, torch.tensor(x.second[1:])[:, None]).abs().max()
    return Case(x, (0.0,), (float(found.detach()),))


@exhibit("huggingface/transformers#46634", "huggingface/trl#3067")
def packed_attention() -> Case:
    """Texts packed into one row attend to each other.

    The log-probs of a text do not depend on its neighbours. The value is the largest difference between the log-probs of the
    second text in the row and alone: 0. The faulty value is that of both read as one text.
    """
    return _leak("llama")


@exhibit("huggingface/transformers#44717", "NVIDIA-NeMo/Automodel#2147")
def packed_state() -> Case:
    """The recurrent state of a linear-attention layer continues from one packed text into the next.

    As in packed-attention, with a layer of gated delta rule and its short convolution before the attention: 0.
    """
    return _leak("qwen3_next")


@exhibit("huggingface/transformers#31629", "huggingface/trl#3692")
def packed_targets() -> Case:
    """In a packed row, the last token of one text is trained to predict the first of the next.

    "a b c d" has 3 targets and "b a" has 1, since nothing precedes a text's first token: 4. One text of 6 tokens has 5.
    """
    return Case(SimpleNamespace(texts=[[A, B, C, D], [B, A]]), (4.0,), (5.0,))
