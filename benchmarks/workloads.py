"""The workloads on which psigrad and TRL are timed."""

from __future__ import annotations

from dataclasses import replace

from timed.workload import Workload

# This workload is about the memory of the head. Both sides save memory by gradient checkpointing, which is TRL's default.
_LARGE = Workload(
    "W3",
    "vocabulary 151,936, hidden 256, 4 layers, completions of 256 tokens: memory of the head, with gradient_checkpointing",
    layers=4,
    vocabulary=151936,
    prompts=2,
    generations=4,
    completion_tokens=256,
    gradient_checkpointing=True,
    steps=2,
)
WORKLOADS = {
    w.name: w
    for w in (
        Workload("W0", "5 M parameters, completions of at most 8 tokens: overhead shows", completion_tokens=8, steps=12),
        Workload("W1", "5 M parameters, 16 prompts x 8 completions of at most 64 tokens"),
        Workload(
            "W2",
            "20 M parameters, prompts of 512 tokens, completions of very unequal length, 1 to 256 tokens",
            hidden=448,
            layers=8,
            prompts=4,
            prompt_tokens=512,
            completion_tokens=256,
            steps=3,
        ),
        _LARGE,
        replace(_LARGE, name="W3F", says="W3 without gradient_checkpointing on either side", gradient_checkpointing=False),
        Workload("W4", "W1 with a KL to a reference and two passes over each batch", beta=0.04, iterations=2, steps=4),
        Workload("PPO", "W4 with PPO, a separate critic and the KL in the reward", "ppo", beta=0.05, iterations=2, steps=4),
        Workload("RLOO", "W1 by RLOO with a KL to a reference in the reward", "rloo", beta=0.05),
        Workload("DPO", "W1's model, 16 pairs per step, answers of 16 to 64 tokens", "dpo", steps=16),
        Workload("RM", "a reward model on the pairs of DPO", "reward", steps=16),
        Workload("SFT", "W1's model, 16 rows per step, 16 to 64 tokens", "sft", steps=16),
    )
}
