"""Log-probs and gradients of models that several processes compute together."""

from __future__ import annotations

from pathlib import Path

from rank_gradients import CASES, gradient
from safetensors.torch import save_file

from psigrad.processes.parallel.world import World

MESHED = {name: CASES[name] for name in ("dapo", "dapo recomputed", "ppo shared", "sft", "dpo", "kto", "reward", "lora")}


def main(world: World, folder: str, out: str, names: str) -> None:
    """Write `out`-<case>.safetensors for the cases named."""
    for name in names.split(","):
        found = gradient(MESHED[name], Path(folder), world)
        if world.rank == 0:
            save_file({key: x.contiguous() for key, x in found.items()}, f"{out}-{name.replace(' ', '_')}.safetensors")
