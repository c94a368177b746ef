"""The kernels' tests on a second tier of processor. `make test-tiers` runs more of them, on every tier."""

from __future__ import annotations

import subprocess

import pytest
import tiers

from psigrad.errors import UserError
from psigrad.kernels import build, processor

FLAGS = f"flags : sse2 {' '.join(words for _, words in processor.LEVELS['x86_64'].values())}"


@pytest.mark.needs("compiler")
def test_the_kernels_of_a_lower_tier_pass_their_core_tests():
    tier = tiers.lower_tier()
    done = tiers.run(tier, tiers.CORE, "-k", "not gpu", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and " passed" in done.stdout, f"{tier}:\n{done.stdout[-8000:]}"


@pytest.mark.parametrize("level", processor.LEVELS["x86_64"])
def test_a_forced_level_hides_what_only_the_levels_above_it_have(level, monkeypatch):
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processor.Path, "read_text", lambda path: FLAGS)
    monkeypatch.setattr(processor, "_described", processor._described.__wrapped__)
    names = list(processor.LEVELS["x86_64"])
    monkeypatch.delenv(processor.SWITCH, raising=False)
    assert processor.levels() == names and build._flags() == build.FLAGS
    monkeypatch.setenv(processor.SWITCH, level)
    assert processor.levels() == names[names.index(level) :]
    march = processor.LEVELS["x86_64"][level][0].split()
    assert list(build._flags()[: len(march)]) == march and "-march=native" not in build._flags()
    assert processor._has("sse2") and processor._has("avx2") and processor.fast_bfloat16() is (level == names[0])


def test_a_level_that_the_processor_lacks_is_refused(monkeypatch):
    monkeypatch.setenv(processor.SWITCH, "x86-64-v9")
    with pytest.raises(UserError, match="PSIGRAD_NATIVE is x86-64-v9, which this processor lacks; use one of 0, "):
        build.library.__wrapped__()
