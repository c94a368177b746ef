"""TRL's process. It runs TRL's own trainers, and a callback waits before each optimiser step until the parent requests it.

python trl_worker.py check|steps FOLDER DTYPE THREADS DEVICE START, with the arguments of `timed.workload.serve`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image
from timed.workload import Parent, Phases, Workload, answer, read, reward, serve
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    TrainerCallback,
)


class Gate(TrainerCallback):
    """A callback that starts a step when the parent requests it."""

    def __init__(self, parent: Parent, begin: Callable[[], None], tell: Callable[[Parent], None]) -> None:
        self.parent, self.begin, self.tell = parent, begin, tell
        self.asked = True  # True for the first step, which starts with `train`
        begin()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait until the parent requests a step. Exit if it requests no more."""
        if not self.asked:
            if not self.parent.wants_a_step():
                sys.exit()
            self.begin()
        self.asked = False

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Report the finished step to the parent."""
        self.tell(self.parent)


def main(folder: Path, dtype: str, device: str, parent: Parent) -> None:
    """Send loss and gradient to the parent (`check`), or take steps."""
    work, rows = read(folder)
    work = replace(work, vllm=work.vllm and sys.argv[1] == "steps")  # the comparison of losses samples nothing
    trainer, counts = _trainer(work, folder, rows, dtype == "bfloat16", device)
    phases = Phases()
    if work.online:
        phases.around(trainer, "_generate", "sample")
        phases.around(trainer, "_compute_loss", "forward")
    else:
        phases.around(trainer, "compute_loss", "forward")
    phases.around(trainer.accelerator, "backward", "backward")

    def begin() -> None:
        phases.seconds = {}
        counts[0] = 0

    parent.ready()
    if sys.argv[1] == "check":
        parent.say(_check(work, trainer))
    elif parent.wants_a_step():
        trainer.add_callback(Gate(parent, begin, lambda parent: parent.got(counts[0], phases.seconds)))
        trainer.train()


def _settings(work: Workload, folder: Path, bf16: bool, device: str) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trl"),
        **_batches(work.prompts, work.micro_batch),
        "max_steps": 100000,
        "learning_rate": 1e-6,
        "logging_steps": 100000,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": device == "cpu",
        "bf16": bf16,
        "gradient_checkpointing": work.gradient_checkpointing,
        "disable_tqdm": True,
    }


def _batches(rows: int, at_once: int) -> dict[str, int]:
    """Return the batch settings for `rows` rows per optimiser step, `at_once` of them in a forward pass."""
    size = min(at_once or rows, rows)
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}


def _trainer(work: Workload, folder: Path, rows: list[dict[str, Any]], bf16: bool, device: str) -> tuple[Any, list[int]]:
    """Return the trainer, and a one-element list with the number of tokens in the step."""
    import trl

    counts, given = [0], dict[str, Any]()
    settings = _settings(work, folder, bf16, device)
    if work.online:

        def counted(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
            counts[0] += sum(map(len, completion_ids))
            return reward(completions)

        given["reward_funcs"] = counted
        settings |= _batches(work.prompts * work.generations, work.micro_batch)
        settings |= {
            "steps_per_generation": settings["gradient_accumulation_steps"],
            "num_generations": work.generations,
            "max_completion_length": work.completion_tokens,
            "beta": work.beta,
            "num_iterations": work.iterations,
            "temperature": 1.0,
        }
        if work.vllm:
            settings |= {"use_vllm": True, "vllm_max_model_length": work.prompt_tokens + work.completion_tokens + 1}
        if work.turns > 1:
            given["rollout_func"] = partial(_episodes, work.turns)
    elif work.kind == "dpo":
        settings["precompute_ref_log_probs"] = True
    if work.kind == "reward":
        torch.manual_seed(0)
        settings["disable_dropout"] = True
        model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    else:
        kind = torch.bfloat16 if work.half_weights else torch.float32
        coded = {"quantization_config": _codes(work), "device_map": device} if work.quantize_base else {}
        loader = AutoModelForImageTextToText if work.image else AutoModelForCausalLM
        model = loader.from_pretrained(folder / "model", dtype=kind, **coded)
        if work.image:  # psigrad freezes the tower by default
            for part in (model.model.vision_model, model.model.connector):
                part.requires_grad_(False)
    if work.lora_rank:
        import peft

        torch.manual_seed(0)  # the same adapters as in psigrad's process
        model = peft.get_peft_model(model, peft.LoraConfig(r=work.lora_rank, lora_alpha=16, target_modules="all-linear"))
    name = "Reward" if work.kind == "reward" else work.kind.upper()
    trainer = getattr(trl, f"{name}Trainer")(
        model,
        args=getattr(trl, f"{name}Config")(**settings),
        train_dataset=_dataset(work, rows),
        processing_class=(AutoProcessor if work.image else AutoTokenizer).from_pretrained(folder / "model"),
        **given,
    )
    return trainer, counts


def _dataset(work: Workload, rows: list[dict[str, Any]]) -> Dataset:
    """Return the rows. TRL wants text and images in separate columns, and adds the image parts itself."""
    if not work.image:
        return Dataset.from_list(rows)
    plain = [{**row, "prompt": [{"role": "user", "content": row["prompt"][0]["content"][1]["text"]}]} for row in rows]
    return Dataset.from_list(plain).cast_column("images", [Image()])


def _codes(work: Workload) -> BitsAndBytesConfig:
    """Return bitsandbytes' settings: an nf4 base, multiplied in bfloat16."""
    if work.quantize_base != "nf4":
        raise ValueError(f"the TRL side supports only an nf4 base, not {work.quantize_base}")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def _episodes(turns: int, prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Play episodes as TRL's tool loop does: the trainer generates each turn after the whole conversation so far."""
    asked = trainer.processing_class(text=prompts)["input_ids"]
    said: list[list[int]] = [[] for _ in prompts]
    chosen: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    for turn in range(1, 1 + turns):
        written, _ = trainer._generate_single_turn([asked[i] + said[i] for i in live], None, {}, num_generations=1)
        for i, ids in zip(live, written, strict=True):
            said[i] += ids
            chosen[i] += [1] * len(ids)
        live = [i for i in live if said[i][-1] in trainer.eos_token_ids] if turn < turns else []
        for i in live:
            heard = trainer.processing_class(text=answer(prompts[i], turn), add_special_tokens=False)["input_ids"]
            said[i] += heard
            chosen[i] += [0] * len(heard)
    return {"prompt_ids": asked, "completion_ids": said, "env_mask": chosen, "logprobs": None}


def _check(work: Workload, trainer: Any) -> dict[str, float]:
    """Return loss and gradient norm on the fixed batch (online) or on the first rows (offline)."""
    model = trainer.model
    model.train()
    if work.online:
        # set by the trainer in training; the GRPO loss is then that of the batch, however many parts it has
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation if work.kind == "grpo" else 1
        loss = trainer._compute_loss(model, _inputs(work, trainer))
    else:
        collated = trainer.data_collator([trainer.train_dataset[i] for i in range(work.prompts)])
        loss = trainer.compute_loss(model, trainer._prepare_inputs(collated), num_items_in_batch=None)
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    model.zero_grad()
    return {"loss": float(loss.detach()), "gradient": norm}


def _inputs(work: Workload, trainer: Any) -> dict[str, torch.Tensor]:
    from beside_trl import fixed_batch  # it imports psigrad's models, which must not add to TRL's start-up time

    given = fixed_batch(work)
    completions = [c for group in given["completions"] for c in group]
    prompts, pictures = [given["prompts"][i] for i, group in enumerate(given["completions"]) for _ in group], dict[str, Any]()
    if work.image:
        prompts, pictures = _pictured(trainer, [len(group) for group in given["completions"]])
    wide, long = max(map(len, prompts)), max(map(len, completions))
    inputs = {
        "prompt_ids": torch.tensor([[1] * (wide - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([c + [1] * (long - len(c)) for c in completions]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (long - len(c)) for c in completions]),
        "advantages": torch.tensor(given["advantages"]),
        "num_items_in_batch": torch.tensor(sum(map(sum, given["chosen"]))),
    }
    if work.turns > 1:
        inputs["tool_mask"] = torch.tensor([chosen + [1] * (long - len(chosen)) for chosen in given["chosen"]])
    inputs = {name: tensor.to(trainer.model.device) for name, tensor in inputs.items()}
    with torch.no_grad():
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, long, **pictures)[0]
    inputs["old_per_token_logps"] = logps - 0.05
    inputs["old_logps"] = (inputs["old_per_token_logps"] * inputs["completion_mask"]).sum(1)  # of whole completions, in RLOO
    if work.beta:
        inputs["ref_per_token_logps"] = logps.clone()  # KL is 0: only the policy term is checked
    return inputs | pictures


def _pictured(trainer: Any, counts: list[int]) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the token ids of the first prompts, each repeated `counts` times, and the images for the model."""
    from trl.data_utils import prepare_multimodal_messages

    rows = [trainer.train_dataset[i] for i, count in enumerate(counts) for _ in range(count)]
    messages = [prepare_multimodal_messages(row["prompt"], images=row["images"]) for row in rows]
    processor = trainer.processing_class
    texts = [processor.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in messages]
    made = processor(images=[row["images"] for row in rows], text=texts, padding=True, return_tensors="pt")
    ids = [own[mask.bool()].tolist() for own, mask in zip(made.pop("input_ids"), made.pop("attention_mask"), strict=True)]
    return ids, {**made, "num_images": [1] * len(rows)}


if __name__ == "__main__":
    serve(main, sys.argv[2:])
