"""TRL's values, by its own trainers on their real data preparation, losses and updates."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import torch
import trl

from museum import exhibit, worlds
from museum.adapters import training

NOT_APPLICABLE = dict.fromkeys(exhibit.names_of("museum.control"), "it trains language models alone")
_ALIKE: dict[str, Any] = {**training.ALIKE, "bf16": False, "gradient_checkpointing": False}
Rows = list[dict[str, Any]]


def _sft(model: Any, rows: Rows, tokenizer: Any = None, peft_config: Any = None, **settings: Any) -> Any:
    args = trl.SFTConfig(**{"output_dir": training.folder(), **_ALIKE, **settings})
    data, words = datasets.Dataset.from_list(rows), tokenizer or worlds.words()
    given = {"train_dataset": data, "eval_dataset": data, "processing_class": words, "peft_config": peft_config}
    try:
        return trl.SFTTrainer(model, args, **given)
    except ValueError as error:
        raise exhibit.Refusal(str(error).split(". ")[0]) from error


def _labelled(model: Any, rows: Any, **settings: Any) -> Any:
    return _sft(model, training.labelled(rows), **settings)


_LORA = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
accumulated_tokens = partial(training.accumulated_tokens, _labelled)
evaluation_loss = partial(training.evaluation_loss, _labelled)
bfloat16_updates = partial(training.bfloat16_updates, _labelled)
resumed_run = partial(training.resumed_run, partial(_labelled, peft_config=_LORA), model=lambda: worlds.random_model("llama"))


class _Recorder(trl.GRPOTrainer):
    """A GRPO trainer on given completions. It keeps its batches and the gradients of the head."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        self.batches.append(inputs)
        self.gradients.append(torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)[0])
        return loss


def _grpo(x: SimpleNamespace, model: Any = None, **settings: Any) -> Any:
    """Return a trainer whose completions and rewards are those of `x`. Call `train` on it."""
    completions = getattr(x, "completions", [[worlds.A], [worlds.B]])
    rewards, count = getattr(x, "rewards", [0.0] * len(completions)), len(completions)

    def reward(**columns: Any) -> Any:
        return rewards

    def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": [[worlds.A]] * count, "completion_ids": completions, "logprobs": None}

    sizes = {"per_device_train_batch_size": count, "num_generations": count, "max_steps": 1, "max_completion_length": 2}
    given = {"output_dir": training.folder(), **_ALIKE, **sizes, "learning_rate": 0.0, "scale_rewards": "none", **settings}
    data, network = datasets.Dataset.from_list([{"prompt": "a"}] * 8), model or worlds.unigram()
    args, words = trl.GRPOConfig(**given), worlds.words()
    trainer = _Recorder(network, reward, args, train_dataset=data, processing_class=words, rollout_func=rollout)
    trainer.batches, trainer.gradients = [], []
    return trainer


def token_normaliser(x: SimpleNamespace) -> list[float]:
    trainer = _grpo(x, per_device_train_batch_size=4, num_generations=2, steps_per_generation=2, max_steps=2)
    trainer.train()
    return [worlds.logit_gradient(sum(trainer.gradients))[worlds.A]]


def unscored_reward(x: SimpleNamespace, scale: str = "none") -> list[float]:
    trainer = _grpo(x, scale_rewards=scale)
    trainer.train()
    return list(trainer._logs["advantages"])


equal_rewards = partial(unscored_reward, scale="group")


def _log_probs(trainer: Any, prompts: list[list[int]], completion: list[int]) -> Any:
    gaps = [max(map(len, prompts)) - len(p) for p in prompts]
    ids = torch.tensor([[worlds.PAD] * gap + p + completion for gap, p in zip(gaps, prompts, strict=True)])
    mask = torch.tensor([[int(place >= gap) for place in range(ids.shape[1])] for gap in gaps])
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, len(completion))[0][0].detach()


def temperature(x: SimpleNamespace) -> list[float]:
    return _log_probs(_grpo(x, temperature=x.temperature), [x.prompt], x.completion).tolist()  # type: ignore[no-any-return]


def left_padding(x: SimpleNamespace) -> list[float]:
    trainer = _grpo(SimpleNamespace(), worlds.random_model("gpt2"))
    batch, alone = (_log_probs(trainer, prompts, x.completion) for prompts in (x.prompts, x.prompts[:1]))
    return [float((batch - alone).abs().max())]


def kl_gradient(x: SimpleNamespace) -> list[float]:
    saved, ones = training.folder(), torch.ones(8, 1, dtype=torch.long)
    worlds.unigram(uniform=True).save_pretrained(saved)  # TRL loads the reference from this folder
    trainer = _grpo(SimpleNamespace(), saved, beta=1.0, loss_type="grpo")
    inputs = {"prompt_ids": ones * x.prompt[0], "prompt_mask": ones, "completion_ids": torch.arange(8)[:, None]}
    inputs |= {"completion_mask": ones, "advantages": torch.zeros(8), "ref_per_token_logps": torch.tensor(x.reference)[:, None]}
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, inputs)
    gradient = worlds.logit_gradient(trainer.gradients[0])
    return [gradient[v] for v in x.at]


def reward_at_end(x: SimpleNamespace) -> list[float]:
    prompt, chosen, rejected = (" ".join(worlds.WORDS[i] for i in ids) for ids in (x.prompt, x.chosen, x.rejected))
    rows, tokenizer = [{"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}], worlds.words(None, pad="<eos>")
    args, data = trl.RewardConfig(output_dir=training.folder(), **_ALIKE), datasets.Dataset.from_list(rows)
    trainer = trl.RewardTrainer(worlds.unigram("score"), args, train_dataset=data, processing_class=tokenizer)
    return [float(trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader()))).detach())]


def eos_as_padding(x: SimpleNamespace) -> list[float]:
    trainer = _sft(worlds.unigram(), [{"text": text} for text in x.texts], worlds.words(pad="<eos>"))
    return [int((trainer.data_collator(list(trainer.train_dataset))["labels"] == worlds.EOS).sum())]


def _row(x: SimpleNamespace, **settings: Any) -> Any:
    return _sft(worlds.unigram(), [{"messages": x.turns}], worlds.words(x.template, adds_bos=True), **settings).train_dataset[0]


def assistant_mask(x: SimpleNamespace) -> list[float]:
    return [sum(label in x.users for label in _row(x, assistant_only_loss=True)["labels"])]


def unmarked_template(x: SimpleNamespace) -> list[float]:
    return [sum(label != -100 for label in _row(x, assistant_only_loss=True)["labels"])]


def doubled_bos(x: SimpleNamespace) -> list[float]:
    return [_row(x)["input_ids"].count(worlds.BOS)]


def merged_boundary(x: SimpleNamespace) -> list[float]:
    row = _sft(worlds.unigram(), [{"prompt": x.prompt, "completion": x.completion}], worlds.merging()).train_dataset[0]
    return [sum(a != b for a, b in zip(row["input_ids"], x.context, strict=False))]


def second_end_token(x: SimpleNamespace) -> list[float]:
    model = worlds.unigram()
    model.generation_config.eos_token_id = x.ends
    trainer = _grpo(x, model, mask_truncated_completions=True)
    trainer.train()
    ids, kept = (trainer.batches[0][name].tolist() for name in ("completion_ids", "completion_mask"))
    return [sum(kept[ids.index(row)]) for row in x.completions]


def _packed(model: Any, texts: list[list[int]]) -> Any:
    rows = [{"input_ids": ids, "labels": ids} for ids in texts]
    trainer = _sft(model, rows, packing=True, max_length=8, eval_packing=False)
    return trainer.model, trainer.data_collator(list(trainer.train_dataset))


def packed_attention(x: SimpleNamespace) -> list[float]:
    return training.leak(*_packed(worlds.random_model(x.kind), [x.first, x.second]), x)


packed_state = packed_attention


def packed_targets(x: SimpleNamespace) -> list[float]:
    return [int((_packed(worlds.unigram(), x.texts)[1]["labels"][:, 1:] != -100).sum())]
