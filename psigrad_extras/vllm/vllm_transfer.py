"""The code that runs in each of vLLM's workers: a transfer engine for files and broadcasts, and the readback of weights.

vLLM imports this module by name (`worker_extension_cls`) in each of its processes, before it loads the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter, packed_ipc_consumer
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from psigrad_extras.vllm import broadcast
from psigrad_extras.vllm.vllm_engine import BACKEND
from psigrad_extras.vllm.vllm_readback import Readback, scaling_of, wrong_in_adapter


class WeightUpdates:
    """Methods that are added to vLLM's workers. Each device has one worker."""

    model_runner: Any
    parallel_config: Any
    weight_transfer_engine: Any
    _psigrad: Any = None
    _importer: Any = None

    def psigrad_join(self, meeting: tuple[Any, ...]) -> None:
        """Join the broadcast group of the trainer and the engine's processes."""
        at = broadcast.Meeting(*meeting)
        device = self.weight_transfer_engine.device if at.kind == "nccl" else torch.device("cpu")
        self.weight_transfer_engine.group = broadcast.join(at, 1 + self.parallel_config.rank, device)

    def psigrad_choose(self, bucket: dict[str, Any], changed: list[str], transposed: list[str]) -> None:
        """Choose what is compared after an update, given a bucket of the new weights. See `Readback.choose`."""
        self._readback().choose(self._read(bucket), changed, transposed)

    def psigrad_compare(self, bucket: dict[str, Any], transposed: list[str]) -> None:
        """Compare the model's weights with a bucket of those sent. See `Readback.compare`."""
        self._readback().compare(self._read(bucket), transposed)

    def psigrad_compare_adapter(self, folder: str, number: int) -> None:
        """Compare the loaded adapter with the one in `folder`. See `wrong_in_adapter`."""
        manager, place = self.model_runner.lora_manager._adapter_manager, Path(folder)
        scaling = scaling_of(json.loads((place / "adapter_config.json").read_text()))
        sent, slot = read(str(place / "adapter_model.safetensors")), manager.lora_index_to_id.index(number)
        self._psigrad = wrong_in_adapter(manager.modules, slot, sent, scaling, manager.packed_modules_mapping), []

    def psigrad_found(self) -> tuple[list[str], list[str]]:
        """Return (weights that differ from those sent, parameters that can't be compared), found since the last call."""
        held, self._psigrad = self._psigrad, None
        found: tuple[list[str], list[str]] = held.found() if isinstance(held, Readback) else held or ([], [])
        return found

    def _readback(self) -> Readback:
        if self._psigrad is None:
            config = self.model_runner.model_config.hf_text_config
            tied, pack = bool(getattr(config, "tie_word_embeddings", False)), pack_experts if current_platform.is_cpu() else None
            self._psigrad = Readback(self.model_runner.model, tied, pack)
        found: Readback = self._psigrad
        return found

    def _read(self, bucket: dict[str, Any]) -> dict[str, Tensor]:
        """Return the weights of a bucket from a file, a broadcast, or GPU memory."""
        if "ipc_handles" not in bucket:
            found: dict[str, Tensor] = self.weight_transfer_engine.weights_of(WeightBucket(**bucket))
            return found
        names = ("ipc_handles", "names", "shapes", "dtype_names", "tensor_sizes")
        handles, *what = (bucket[name] for name in names)
        self._importer = self._importer or PackedBufferImporter()
        return dict(packed_ipc_consumer(handles, *what, torch.accelerator.current_device_index(), self._importer))


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """An empty init info, since the two sides need not agree on anything before a transfer."""


@dataclass
class WeightBucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The location of a bucket's weights: a file or, without one, the next broadcast, with these `contents`."""

    path: str = ""
    contents: dict[str, Any] | None = None


class BucketTransfer(WeightTransferEngine):  # type: ignore[misc]
    """A transfer of weights under a checkpoint's names and shapes, from a shared file or from the trainer."""

    init_info_cls, update_info_cls = Nothing, WeightBucket
    group: broadcast.BroadcastGroup | None = None

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing; vLLM requires the method."""

    def start_weight_update(self) -> None:
        """Prepare the model's layers for loading. vLLM calls this at the start of an update."""
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights of a bucket. vLLM's own method would wait for an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightBucket) -> None:
        """Load the weights of a bucket into the model."""
        weights = self.weights_of(update_info)
        with torch.device(self.device):
            self.model.load_weights((name, weight.to(self.device)) for name, weight in weights.items())

    def weights_of(self, bucket: WeightBucket) -> dict[str, Tensor]:
        """Return the weights of a bucket, read from its file or received by broadcast."""
        if bucket.path:
            return read(bucket.path)
        contents = broadcast.Contents(**(bucket.contents or {}))
        assert self.group is not None, "the worker has joined no group"
        return broadcast.unpack(contents, self.group.receive(contents.size))

    def finish_weight_update(self) -> None:
        """Finish loading, and on CPUs pack the weights for the kernels. vLLM calls this at the end of an update."""
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_head(self.model)
            for module in self.model.modules():
                if experts := _experts_of(module):
                    experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the broadcast group. vLLM calls this at its end."""
        if self.group is not None:
            self.group.end()


def read(path: str) -> dict[str, Tensor]:
    """Return the weights in a file, memory-mapped."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def repack_head(model: Any) -> None:
    """Pack a tied head again, after an update on a CPU.

    There, vLLM multiplies by packed copies of the matrices. Its reload does not repack a head that is the embedding, and without
    this, log-probs were wrong by about 1.
    """
    if hasattr(model, "lm_head"):
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


def _experts_of(module: Any) -> Any:
    """Return the CPU kernel of a layer's experts, or None. vLLM packs the experts at the start, but not on a reload."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return kernel.fused_experts if kernel is not None and hasattr(module, "w13_weight") else None


def pack_experts(module: Any, matrices: Tensor) -> Tensor:
    """Return matrices [experts, rows, columns] packed as the layer stores them on a CPU."""
    packed: Tensor = cpu_prepack_moe_weight(matrices, _experts_of(module).isa)
    return packed


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketTransfer)
