"""torch, imported by the first thing that needs it: help and settings read the methods, and torch takes longer than both.

`from psigrad.objective.lazy_torch import Tensor, torch` stands for `import torch` wherever a method is declared. Nothing is put
into `sys.modules`, so whoever imports torch, before or after, gets it as ever.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _LazyTorch(ModuleType):
    """What stands for torch until an attribute of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        torch = importlib.import_module("torch")
        # from now on the modules of ours that hold this have torch itself: no call goes through here again
        for module in [module for path, module in list(sys.modules.items()) if path.startswith("psigrad.")]:
            if vars(module).get("torch") is self:
                vars(module)["torch"] = torch
        return getattr(torch, name)


if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    torch = _LazyTorch("torch")
    Tensor = Any  # annotations are never evaluated, and isinstance takes torch.Tensor
