"""What of a multimodal model stands outside its language model, and which of it learns."""

from __future__ import annotations

import pytest
from transformers import AutoModelForImageTextToText

from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.towers import (
    check_names,
    freeze_towers,
    layers_of,
    lora_exclusion,
    read_tensor,
    text_half,
    towers_of,
)


def test_names_stay_frozen_unless_their_last_part_is_given():
    names = ["model.vision_model", "model.connector"]
    assert check_names(names, []) == names and check_names(names, ["connector"]) == names[:1]
    with pytest.raises(UserError, match=r"has 'model\.connector'; expected .*: vision_model, connector\."):
        check_names(names, ["model.connector"])


def test_a_model_is_its_text_half_and_its_towers(tmp_path):
    tiny.save_vision_model(["say a: b"], tmp_path, pixels=16, patch=8)
    network = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert towers_of(network) == ["model.vision_model", "model.connector"]
    assert text_half(network) is network.model.text_model and layers_of(network) == [*network.model.text_model.layers]
    freeze_towers(network, ["connector"])
    frozen = {name.split(".")[1] for name, p in network.named_parameters() if not p.requires_grad}
    assert frozen == {"vision_model"} and lora_exclusion(network, ["connector"]) == r"(model\.vision_model)(\..*)?"
    assert read_tensor(str(tmp_path), "model.connector.modality_projection.proj.weight").shape == (64, 64)
    plain = tiny.model("qwen3", 64, hidden=16, layers=1, heads=2)
    assert towers_of(plain) == [] and text_half(plain) is plain.model and lora_exclusion(plain) is None
