"""Import torch on first use, because the import takes seconds.

Modules needed for help texts or settings use `from psigrad.objective.lazy_torch import Tensor, torch`, not `import torch`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _LazyTorch(ModuleType):
    """A placeholder for torch that imports it at the first attribute access."""

    def __getattr__(self, name: str) -> Any:
        torch = importlib.import_module("torch")
        # Replace the placeholder in every psigrad module that holds it, so that later calls bypass this method.
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
