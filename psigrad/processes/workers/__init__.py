"""Processes that run a user's code and can be killed: rewards, environments and tools. The trainer runs none of that code."""

from __future__ import annotations

from psigrad.processes.workers.shipping import ShippingError, homes, pack, unpack
from psigrad.processes.workers.worker_pool import Lost, PoolLimits, Worker, WorkerGone, WorkerPool

__all__ = ["Lost", "PoolLimits", "ShippingError", "Worker", "WorkerGone", "WorkerPool", "homes", "pack", "unpack"]
