"""transformers' values, by its models, tokenizers, collators and Trainer."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import datasets
import torch
import transformers

from museum import exhibit, worlds
from museum.adapters import training

_ONLINE = ("token_normaliser", "unscored_reward", "equal_rewards", "temperature", "kl_gradient", "second_end_token")
NOT_APPLICABLE = {
    **dict.fromkeys(_ONLINE, "it has no reinforcement learning"),
    **dict.fromkeys(exhibit.names_of("museum.control"), "it has no environments"),
    "merged_boundary": "the caller tokenises prompt and completion",
}


def _trainer(model: Any, rows: Any, **settings: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(model) if isinstance(model, str) else model
    args = transformers.TrainingArguments(**{"output_dir": training.folder(), **training.ALIKE, **settings})
    data = datasets.Dataset.from_list(training.labelled(rows))
    return transformers.Trainer(model, args, train_dataset=data, eval_dataset=data)


accumulated_tokens = partial(training.accumulated_tokens, _trainer)
evaluation_loss = partial(training.evaluation_loss, _trainer)
bfloat16_updates = partial(training.bfloat16_updates, _trainer)
resumed_run = partial(training.resumed_run, _trainer, model=partial(worlds.random_model, "gpt2"))  # which has dropout


def left_padding(x: SimpleNamespace) -> list[float]:
    model, row = worlds.random_model("gpt2"), x.prompts[0] + x.completion
    gap = max(map(len, x.prompts)) - len(x.prompts[0])
    inputs = ([[worlds.PAD] * gap + row], [[0] * gap + [1] * len(row)]), ([row], [[1] * len(row)])
    with torch.no_grad():
        both = [model(torch.tensor(i), attention_mask=torch.tensor(m)).logits[0, -len(row) :].log_softmax(-1) for i, m in inputs]
    return [float((both[0] - both[1])[:2].gather(1, torch.tensor(x.completion)[:, None]).abs().max())]


def reward_at_end(x: SimpleNamespace) -> list[float]:
    model, rows = worlds.unigram("score"), [x.prompt + answer + [worlds.EOS] for answer in (x.chosen, x.rejected)]
    model.config.pad_token_id = worlds.EOS
    batch = worlds.words(pad="<eos>").pad({"input_ids": rows}, return_tensors="pt")
    scores = model(**batch).logits[:, 0]
    return [float(-torch.nn.functional.logsigmoid(scores[0] - scores[1]).detach())]


def eos_as_padding(x: SimpleNamespace) -> list[float]:
    tokenizer = worlds.words(pad="<eos>")
    batch = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)([tokenizer(f"{text} <eos>") for text in x.texts])
    return [int((batch["labels"] == worlds.EOS).sum())]


def _rendered(x: SimpleNamespace, **more: Any) -> Any:
    return worlds.words(x.template, **more).apply_chat_template(x.turns, return_assistant_tokens_mask=True, return_dict=True)


def assistant_mask(x: SimpleNamespace) -> list[float]:
    found = _rendered(x)
    return [sum(wanted for i, wanted in zip(found["input_ids"], found["assistant_masks"], strict=True) if i in x.users)]


def unmarked_template(x: SimpleNamespace) -> list[float]:
    return [sum(_rendered(x)["assistant_masks"])]


def doubled_bos(x: SimpleNamespace) -> list[float]:
    return [_rendered(x, adds_bos=True)["input_ids"].count(worlds.BOS)]


def _packed(*texts: list[int]) -> Any:
    return transformers.DataCollatorWithFlattening()([{"input_ids": ids} for ids in texts])


def packed_attention(x: SimpleNamespace) -> list[float]:
    model = worlds.random_model(x.kind)
    model.config.use_cache = False  # as its Trainer sets it
    return training.leak(model, _packed(x.first, x.second), x)


packed_state = packed_attention


def packed_targets(x: SimpleNamespace) -> list[float]:
    return [int((_packed(*x.texts)["labels"][:, 1:] != -100).sum())]
