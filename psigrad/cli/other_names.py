"""Names of settings in TRL, Stable-Baselines3 and verl: those that mean the same are taken, the others are answered with ours."""

from __future__ import annotations

from collections.abc import Sequence

from psigrad.errors import UserError

# The same setting under another name.
SAME = {
    "--model-name-or-path": "--model",
    "--dataset-name": "--dataset",
    "--reward-funcs": "--reward",
    "--lr": "--learning-rate",
    "--lora-r": "--lora-rank",
    "--eval-dataset-name": "--eval-dataset",
}
# Another setting, or one that counts otherwise: what to write.
_BATCH = "a batch counts over all devices here: prompts_per_step × num_generations completions, or batch_size rows"
INSTEAD = {
    "--beta": "the weight of the KL term is algorithm.kl.coefficient=0.04, and of a preference loss loss.beta=0.1",
    "--epsilon": "the clip is algorithm.surrogate.low=0.2 algorithm.surrogate.high=0.2",
    "--epsilon-high": "the upper clip is algorithm.surrogate.high=0.28",
    "--loss-type": "the method is the command (psigrad dapo, psigrad dr_grpo), and a loss is loss=NAME",
    "--scale-rewards": "the standardisation is part of Ψ: algorithm.psi=group_mean leaves the standard deviation out",
    "--per-device-train-batch-size": _BATCH + "; memory is bounded by micro_batch_tokens",
    "--per-device-eval-batch-size": "evaluation packs by sampling.max_decode_batch",
    "--gradient-accumulation-steps": _BATCH + "; micro_batch_tokens says how much is computed at once",
    "--train-batch-size": _BATCH,
    "--num-train-epochs": "steps are counted, not epochs: leave max_steps out for one pass over the data, or give --max-steps",
    "--total-epochs": "steps are counted, not epochs: leave max_steps out for one pass over the data, or give --max-steps",
    "--bf16": "the type of the weights is --dtype bfloat16",
    "--fp16": "the type of the weights is --dtype bfloat16 or float32",
    "--torch-dtype": "the type of the weights is --dtype",
    "--use-vllm": "vLLM is asked for by --sampler vllm",
    "--use-peft": "an adapter is asked for by --lora-rank 16",
    "--load-in-4bit": "there are no quantised weights; --lora-rank 16 --dtype bfloat16 takes the least memory",
    "--run-name": "the run is named by its folder: --output-dir runs/NAME",
    "--logging-dir": "everything is in the run's folder: --output-dir",
    "--eval-strategy": "evaluation is asked for by --eval-steps",
    "--save-strategy": "checkpoints are asked for by --save-steps and --save-minutes",
    "--optim": "the optimiser is AdamW",
    "--resume-from-checkpoint": "the same command goes on from its newest checkpoint",
    "--n-epochs": "passes over a batch are --num-iterations",
    "--rollout-n": "completions of a prompt are --num-generations",
    "--max-prompt-tokens": "the longest prompt is --max-prompt-length",
    "--max-new-tokens": "the longest completion is --max-completion-length",
    "--vllm-mode": "vLLM runs in the trainer's process or in samplers of a cluster (--cluster)",
}


def ours(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """The arguments with flags as we write them: hyphens for underscores, our names for those that mean the same.

    `known` are our flags. Raises `UserError` for a name that means something else here.
    """
    found = []
    for text in arguments:
        flag, sign, value = text.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-") if flag not in known else flag
            flag = SAME.get(flag, flag) if flag not in known and SAME.get(flag) in known else flag
            if flag not in known and flag in INSTEAD:
                raise UserError(f"There is no flag {text.partition('=')[0]}: {INSTEAD[flag]}.")
        found.append(f"{flag}{sign}{value}")
    return found
