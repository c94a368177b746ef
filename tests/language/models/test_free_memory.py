"""The memory that there is, and what of it is for activations."""

from __future__ import annotations

from psigrad.language.models import free_memory
from psigrad.language.models.free_memory import ADAPTER, WHOLE, share_for_activations


def test_a_quarter_of_the_memory_beside_the_model_is_for_activations(tmp_path, monkeypatch):
    monkeypatch.setattr(free_memory, "available_memory", lambda: 9 * 10**9)
    assert share_for_activations("", WHOLE) == 2.2
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10**9)
    assert share_for_activations(str(tmp_path), ADAPTER) == 2.0 and share_for_activations(str(tmp_path), WHOLE) == 0.2
    monkeypatch.setattr(free_memory, "available_memory", lambda: 10**9)
    assert share_for_activations(str(tmp_path), WHOLE) == 0.0
