"""One torch thread for every test: the fork of a process whose torch has threads running would hang."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
