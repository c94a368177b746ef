"""Parameters are counted from a configuration as transformers counts them."""

from __future__ import annotations

import copy

import pytest
import torch
from fused_models import CONFIGS
from transformers import AutoModelForCausalLM
from unusual_models import MAMBA, MLA

from psigrad_extras.preflight.plan.shape import count_shape


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_count_from_the_configuration_is_that_of_transformers(name, tied):
    config = copy.deepcopy(CONFIGS[name])
    config.vocab_size, config.tie_word_embeddings = 280, tied
    hf, found = AutoModelForCausalLM.from_config(config), count_shape(config)
    assert found.parameters == sum(p.numel() for p in hf.parameters())
    linear = [name for name, m in hf.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    assert [name for name, *_ in found.linears] == linear
    assert found.tied == tied


@pytest.mark.parametrize("config", [MLA, MAMBA], ids=["mla", "mamba"])
def test_parameters_of_unusual_models_are_counted(config):
    assert count_shape(config).parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
