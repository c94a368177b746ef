"""A CUDA device where there is none: tensors that say they are on it, and whose numbers are computed on the host.

What runs on it takes the branches that a GPU takes, with real numbers, and fails as there where a tensor of the host and one of
the device meet in an operation. It has no kernels, streams or memory of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

DEVICE = torch.device("cuda:0")
# Operations whose result the host waits for, besides copies to it.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "repeat_interleave"}


WAITED: Counter[str] = Counter()
"""How often the host waited for the device, by `file:line`: reads, and copies to it that are not from pinned memory."""


def on_wait() -> None:
    """Count where the host waits: the innermost line that is neither torch's nor this file's."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith((os.path.dirname(torch.__file__), __file__)):
        frame = frame.f_back
    WAITED[f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"] += 1


# What may read a tensor of the host beside one of the device: copies, and places.
MEETING = {"copy_", "index", "index_put", "index_put_", "_index_put_impl_"}


class OnDevice(Tensor):
    """A tensor of the device, whose numbers are in `held`. Torch takes it for one of the host: autograd there needs a GPU."""

    held: Tensor
    device, is_cuda, is_cpu = DEVICE, True, False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        shape = (held.shape, held.stride(), held.storage_offset())
        made = Tensor._make_wrapper_subclass(cls, *shape, dtype=held.dtype, requires_grad=held.requires_grad)
        made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """On the host's numbers; what comes of them is on the device."""
        name, tensors = func.overloadpacket.__name__, pytree.tree_leaves((args, kwargs))
        tensors = [x for x in tensors if isinstance(x, Tensor)]
        strangers = [x for x in tensors if not isinstance(x, OnDevice) and x.dim()]
        if strangers and name not in MEETING:
            raise RuntimeError(f"{func}: a tensor of the host, {tuple(strangers[0].shape)}, beside one of the GPU")
        if name in WAITS or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])):
            on_wait()
        if strangers:
            on_wait()
        known = {id(x.held): x for x in tensors if isinstance(x, OnDevice)}
        arguments, named = pytree.tree_map_only(OnDevice, lambda x: x.held, (args, kwargs or {}))
        if name == "histc":  # the host has it for floats alone
            arguments = (arguments[0].float(), *arguments[1:])
        out = func(*arguments, **named)
        if out is arguments[0] and not isinstance(args[0], OnDevice):
            return out
        return pytree.tree_map_only(Tensor, lambda x: known.get(id(x)) if id(x) in known else OnDevice(x), out)

    @property
    def data(self) -> Tensor:
        """Without its history."""
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: OnDevice) -> None:
        Tensor.data.__set__(self, value)
        self.held = value.held

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Here, or to the host."""
        place, rest, named = where(args, kwargs)
        moved = self if place is None or place.type == "cuda" else _Move.apply(self)
        return Tensor.to(moved, *rest, **named) if rest or named else moved

    def cpu(self, *_: Any) -> Tensor:
        return self.to("cpu")

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        on_wait()
        return self.held.tolist()

    def item(self) -> Any:
        """In inference mode torch would read the memory of this tensor, which has none."""
        on_wait()
        return self.held.item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self.item())

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def data_ptr(self) -> int:
        """No address of the host."""
        return self.held.data_ptr() | 1 << 62

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("cannot pin a tensor that is on the GPU")

    def __deepcopy__(self, memo: Any) -> OnDevice:
        made = OnDevice(self.held.clone()).requires_grad_(self.requires_grad)
        vars(made).update({name: x for name, x in vars(self).items() if name != "held"})
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held!r})"


class _Move(torch.autograd.Function):
    """From the device to the host, or there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if isinstance(x, OnDevice):
            on_wait()
            return x.held.clone()
        return OnDevice(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.held if isinstance(grad, OnDevice) else OnDevice(grad)


def where(args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, list[Any], dict[str, Any]]:
    """The device that `Tensor.to` is asked for, and what else."""
    place, rest = kwargs.get("device"), []
    for given in args:
        if isinstance(given, Tensor):
            place, rest = given.device, [*rest, given.dtype]
        elif isinstance(given, str | torch.device | int) and not isinstance(given, bool):
            place = given
        elif isinstance(given, torch.dtype):
            rest.append(given)
    named = {name: kwargs[name] for name in ("dtype", "copy") if kwargs.get(name)}
    return None if place is None else torch.device(place), rest, named


class _Mode(TorchFunctionMode):
    """Sees tensors of the host that go to the device, and those that are made there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.to or func is Tensor.cuda:
            place, rest, named = where(args[1:], kwargs)
            if not isinstance(args[0], OnDevice) and (func is Tensor.cuda or (place is not None and place.type == "cuda")):
                if not kwargs.get("non_blocking"):
                    on_wait()
                moved = _Move.apply(args[0])
                return Tensor.to(moved, *rest, **named) if rest or named else moved
        elif func is Tensor.backward:  # what is computed anew there makes tensors too
            with self:
                return torch.autograd.backward(args[0], kwargs.pop("gradient", None), **kwargs)
        elif (asked := kwargs.get("device")) is not None and torch.device(asked).type == "cuda":
            if func in (torch.tensor, torch.as_tensor):  # copies from memory that is not pinned
                on_wait()
            made = func(*args, **{**kwargs, "device": "cpu"})
            there = made if isinstance(made, OnDevice) else OnDevice(made.detach())
            return there.requires_grad_() if made.requires_grad and not there.requires_grad else there
        return func(*args, **kwargs)


def gpu_memory(monkeypatch: Any, free: int, total: int = 0, reserved: int = 0, allocated: int = 0) -> None:
    """Let torch find a GPU with so many bytes, of which it has `reserved` some and `allocated` some of these."""
    has = {"memory_reserved": reserved, "memory_allocated": allocated, "mem_get_info": (free, total)}
    for name, value in {**has, "get_device_properties": SimpleNamespace(total_memory=total)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@contextlib.contextmanager
def fake_gpu(monkeypatch: Any) -> Iterator[None]:
    """torch has a CUDA device for the length of the block."""
    for name in ("__enter__", "__exit__"):  # in inference mode a view of a tensor of the device is an error under torch 2.11
        monkeypatch.setattr(torch.inference_mode, name, getattr(torch.no_grad, name))
    properties = SimpleNamespace(total_memory=80 << 30, name="no GPU", major=9, minor=0)
    has = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (80 << 30, 80 << 30),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for name, value in has.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self, *_: self)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a weight that moves becomes another class
    try:
        with _Mode():
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
