"""A model whose weights are a pickle, or none: refused in a sentence, and nothing is executed."""

from __future__ import annotations

import os
import pickle
import shutil

import pytest
import torch

from psigrad.errors import UserError
from psigrad.language.models import language_model, scalar_model


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("load", [language_model.load, scalar_model.load], ids=["language", "scalar"])
@pytest.mark.parametrize("kind", ["pickle", "torch", "text", "empty"])
def test_a_pickle_in_place_of_weights_is_one_sentence_and_is_not_executed(kind, load, job, tmp_path):
    shutil.copytree(job / "base", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    file, mark = tmp_path / "model" / "pytorch_model.bin", tmp_path / "executed"
    if kind == "pickle":
        file.write_bytes(pickle.dumps(Evil(mark)))
    elif kind == "torch":
        torch.save({"weight": Evil(mark)}, file)
    else:
        file.write_text("hello" if kind == "text" else "")
    with pytest.raises(UserError, match=r"could be loaded from .*model' \((?!\d+\))[^\n]{8,}\); give") as told:
        load(str(tmp_path / "model"))
    assert not mark.exists() and "\n" not in str(told.value)
    if kind in ("pickle", "torch"):
        assert "does not execute" in str(told.value)
