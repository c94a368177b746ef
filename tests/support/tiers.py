"""Runs the kernels' tests as on other processors: `make test-tiers`.

    python tests/support/tiers.py [x86-64-v3 x86-64-v4 … 0]       0: without kernels, by PyTorch alone

By default on every tier that this processor can stand in for; it names those that it cannot. An emulator computes AMX's tiles.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import machine

from psigrad.kernels import processor

ROOT = Path(__file__).parents[2]
AMX, NONE = "x86-64-v4-amx", "0"

_MODELS = "tests/language/models"
CORE = (
    "tests/kernels/test_products.py",
    *(f"{_MODELS}/test_{name}.py" for name in ("same_bits", "coded_linear")),
    *("tests/optim/test_low_memory.py", "tests/control/test_networks.py"),
)
"""What `make test` runs on a second tier."""
KERNELS = (
    *(
        "tests/kernels",
        "tests/optim",
        _MODELS,
        "tests/control/test_networks.py",
        "tests/extras/test_gguf_base.py",
        "tests/extras/connect/test_export_codes.py",
    ),
    *(f"tests/language/rollout/test_{name}.py" for name in ("distribution", "embedded", "dialogue")),
    *(f"tests/language/training/test_{name}.py" for name in ("kept_activations", "critic")),
)
"""What `make test-tiers` runs on each tier."""
EMULATED = (
    "tests/kernels/test_products.py",
    *(f"{_MODELS}/test_{name}.py" for name in ("stepped", "same_bits", "packed_weights", "coded_linear")),
)
"""What runs by emulated instructions, which take a hundred times as long."""

_LIBRARIES = {
    "x86-64-v4-amx": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "x86-64-v4-bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "x86-64-v4": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "x86-64-v3": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}
"""The variables that restrict PyTorch's own kernels to a tier, in a new process."""


def run(tier: str, tests: Sequence[str], *options: str, **given: object) -> subprocess.CompletedProcess[str]:
    """Run tests in a process that sees a processor of this tier."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", processor.SWITCH))}
    if tier == AMX and AMX not in processor.levels():
        options = (*options, "-p", "amx")
        environment |= {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"}
    else:
        environment |= {processor.SWITCH: tier, **_LIBRARIES.get(tier, {})}
    if tier == NONE:  # the tests of the kernels are left out on purpose
        environment |= {"CI": "", "PSIGRAD_TEST_EVERYTHING": "0"}
    command = (sys.executable, "-m", "pytest", "--quiet", *options, *tests)
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, check=False, **given)  # type: ignore[call-overload]


def lower_tier() -> str:
    """Return the lowest tier below this processor's own."""
    return processor.levels()[-1] if len(processor.levels()) > 1 else NONE


def main(asked: list[str]) -> int:
    """Return 1 if the tests fail on any tier."""
    possible, status = [*processor.levels(), NONE], {}
    if AMX not in possible and machine.lack("tiles") is None:
        possible.append(AMX)
    for tier in asked or possible:
        if tier not in possible:
            sys.exit(f"{tier} is none of the tiers that this processor can stand in for: {', '.join(possible)}")
        emulated = tier == AMX and AMX not in processor.levels()
        print(f"{tier}{' (emulated)' if emulated else ''}:", flush=True)
        split = () if emulated else ("--workers", "auto")
        status[tier] = run(tier, EMULATED if emulated else KERNELS, *split).returncode
    lacking = [tier for tier in processor.LEVELS.get(platform.machine(), {}) if tier not in possible]
    print("; ".join(f"{tier} {'failed' if code else 'passed'}" for tier, code in status.items()))
    if not asked and lacking:
        print(f"Not tested, because this processor lacks them: {', '.join(lacking)}")
    return int(any(status.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
