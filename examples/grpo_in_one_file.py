"""GRPO in one file, with only torch and transformers: what psigrad computes, without its speed, checks and other methods.

    python examples/grpo_in_one_file.py MODEL PROMPTS.jsonl [STEPS]

MODEL is a folder or hub name. Each line of PROMPTS.jsonl has a "prompt" and an "answer". The reward is 1 if the completion equals
the answer, otherwise 0. `tests/language/training/test_one_file.py` checks that psigrad computes the same loss and gradient.

For one prompt with completions o_1 … o_G and their rewards r_1 … r_G (Shao et al. 2024, arXiv:2402.03300):

    A_i  = (r_i - mean r) / (std r + 1e-4)
    rho  = exp(log pi - log pi_old)                                     per token; pi_old sampled the completion
    loss = - 1/G sum_i 1/|o_i| sum_t [ min(rho A_i, clip(rho, 1 - eps, 1 + eps) A_i) - beta k3 ]
    k3   = exp(log pi_ref - log pi) - (log pi_ref - log pi) - 1         an estimate of KL(pi || pi_ref)
"""

from __future__ import annotations

import copy
import json
import random
import sys

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP_SIZE = 8
PROMPTS_PER_STEP = 8
MAX_NEW_TOKENS = 16
LEARNING_RATE = 1e-4
EPSILON = 0.2
BETA = 0.04


def advantages(rewards: Tensor) -> Tensor:
    """Return how far each reward is above its group's mean, in standard deviations of the group [G]."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def token_log_probs(model, prompt: list[int], completions: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return log pi of every completion token [G, T], and the mask of tokens that are not padding [G, T].
    The mask comes from the lengths, since padding and EOS may share an id.
    """
    lengths = torch.tensor([len(c) for c in completions])
    width = int(lengths.max())
    ids = torch.tensor([prompt + c + [0] * (width - len(c)) for c in completions])
    mask = torch.arange(width)[None] < lengths[:, None]
    attention = torch.cat([torch.ones(len(completions), len(prompt), dtype=torch.bool), mask], dim=1)
    logits = model(input_ids=ids, attention_mask=attention.long()).logits[:, len(prompt) - 1 : -1]
    log_pi = logits.float().log_softmax(-1)
    return log_pi.gather(-1, ids[:, len(prompt) :, None])[..., 0], mask


def group_loss(
    model, reference, prompt: list[int], completions: list[list[int]], rewards: Tensor, logp_old: Tensor | None = None
) -> Tensor:
    """Return the GRPO loss of a group. Without `logp_old` [G, T], the current model sampled the completions: the ratio is 1."""
    logp, mask = token_log_probs(model, prompt, completions)
    with torch.no_grad():
        logp_ref, _ = token_log_probs(reference, prompt, completions)
    ratio = torch.exp(logp - (logp.detach() if logp_old is None else logp_old))
    gain = advantages(rewards)[:, None]
    surrogate = torch.min(ratio * gain, ratio.clamp(1 - EPSILON, 1 + EPSILON) * gain)
    k3 = torch.exp(logp_ref - logp) - (logp_ref - logp) - 1
    per_token = torch.where(mask, surrogate - BETA * k3, 0.0)
    return -(per_token.sum(1) / mask.sum(1)).mean()


@torch.no_grad()
def sample(model, prompt: list[int], eos: int) -> list[list[int]]:
    """Sample GROUP_SIZE completions of a prompt, each cut after its first EOS. The EOS is kept, since the policy chose it."""
    ids = torch.tensor([prompt] * GROUP_SIZE)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    rows = out[:, len(prompt) :].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def main(path: str, prompts_file: str, steps: int) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()  # no dropout: it would make the ratio differ from 1
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    with open(prompts_file) as lines:
        rows = [json.loads(line) for line in lines]
    rng = random.Random(0)

    for step in range(1, steps + 1):
        optimizer.zero_grad()
        total, lengths = 0.0, []
        for row in rng.sample(rows, PROMPTS_PER_STEP):
            prompt = tokenizer(row["prompt"]).input_ids
            completions = sample(model, prompt, tokenizer.eos_token_id)
            texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
            rewards = torch.tensor([float(text.strip() == row["answer"]) for text in texts])
            total += float(rewards.mean()) / PROMPTS_PER_STEP
            lengths += [len(c) for c in completions]
            (group_loss(model, reference, prompt, completions, rewards) / PROMPTS_PER_STEP).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step:4d}  reward {total:.3f}  length {sum(lengths) / len(lengths):.1f}")

    model.save_pretrained("grpo_model")
    tokenizer.save_pretrained("grpo_model")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 100)
