"""What runs in each of vLLM's workers: a transfer engine that takes weights from a file, and their reading back.

vLLM imports this module by name (`worker_extension_cls`), in each of its processes and before it loads the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from psigrad_extras.vllm.vllm_engine import BACKEND, Readback


class WeightUpdates:
    """What vLLM's workers are given besides their own methods; there is one for each device."""

    model_runner: Any

    def psigrad_choose(self, path: str, changed: list[str], transposed: list[str]) -> None:
        """See `Readback.choose`."""
        config = self.model_runner.model_config.hf_text_config
        self._psigrad = Readback(self.model_runner.model, bool(getattr(config, "tie_word_embeddings", False)))
        self._psigrad.choose(read(path), changed, transposed)

    def psigrad_compare(self, path: str, transposed: list[str]) -> tuple[list[str], list[str]]:
        """(weights that it does not compute with, parameters that can't be compared)."""
        sent = read(path)
        return self._psigrad.wrong(sent, transposed), self._psigrad.unknown(sent, transposed)


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """The two sides agree on nothing beforehand."""


@dataclass
class InFile(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the weights are."""

    path: str


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Weights under a checkpoint's names and in its shapes, from a file that trainer and engine both see."""

    init_info_cls, update_info_cls = Nothing, InFile

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """See vLLM."""

    def start_weight_update(self) -> None:
        """See vLLM."""
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See vLLM, whose own waits for an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: InFile) -> None:
        """See vLLM."""
        with torch.device(self.device):
            self.model.load_weights((name, weight.to(self.device)) for name, weight in read(update_info.path).items())

    def finish_weight_update(self) -> None:
        """See vLLM."""
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_head(self.model)

    def shutdown(self) -> None:
        """See vLLM."""


def read(path: str) -> dict[str, Tensor]:
    """The weights in a file, on its own pages."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def repack_head(model: Any) -> None:
    """Pack a tied head again. On CPUs vLLM multiplies by packed copies of the matrices, and its reload forgets the one of a head
    that is the embedding: log-probs were off by about 1.
    """
    if hasattr(model, "lm_head"):
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
