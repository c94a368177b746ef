"""Models that are prepared once and copied: to prepare a small model, which probes it, takes longer than most tests of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from psigrad.language.models.language_model import LanguageModel

_kept: dict[Hashable, tuple[LanguageModel, Tensor]] = {}


def prepared(key: Hashable, make: Callable[[], LanguageModel]) -> LanguageModel:
    """What `make()` gives, to the last bit, and torch's random numbers go on as behind it."""
    if key not in _kept:
        _kept[key] = make(), torch.get_rng_state()
    model, numbers = _kept[key]
    torch.set_rng_state(numbers)
    copy = model.frozen_copy()
    copy.network.requires_grad_(True)
    return copy
