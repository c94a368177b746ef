"""Training and evaluation mode, dropout and gradient checkpointing of transformers' modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def dropouts_of(hf: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """List the dropout probabilities of a model: (module, attribute, value)."""
    return [
        (module, name, value)
        for module in hf.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout)))
    ]


def switch_dropout_off(hf: PreTrainedModel) -> None:
    """Set all dropout to 0, and evaluation mode. The model's outputs in that mode stay the same."""
    for module, name, _ in dropouts_of(hf):
        setattr(module, name, 0.0)
    hf.eval()


def set_mode(network: nn.Module, training: bool) -> None:
    """Set training or evaluation mode. Routers stay in evaluation mode, where they draw no noise.

    Setting their jitter to 0 would be wrong: in evaluation mode PhiMoE's jitter is a threshold for choosing experts.
    """
    network.train(training)
    for module in network.modules() if training else ():
        if any("jitter" in name for name in vars(module)):
            module.training = False


def recompute_activations(hf: PreTrainedModel) -> None:
    """Enable gradient checkpointing. transformers recomputes only in training mode, which changes no result."""
    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
