"""Measures the peak memory of the process, and the size of weights and KV caches."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from yggdrasil.engine.assembly import Assembly


@dataclass(frozen=True)
class MemoryUse:
    """Memory in MB (10^6 bytes).

    ``imports`` is the resident memory before a model is loaded, and ``peak`` the peak above it. On a GPU ``imports`` is
    0 and ``peak`` is the most device memory that PyTorch allocated.
    """

    imports: float
    peak: float
    weights: float
    caches: float

    @property
    def ratio(self) -> float:
        """Peak memory above the imports divided by the size of weights and caches."""
        return self.peak / (self.weights + self.caches)


def resident_mb() -> float:
    """Return this process's resident memory in MB; its peak if the system does not report it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_mb()
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024 / 1e6


def peak_mb() -> float:
    """Return this process's peak memory in MB; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def memory_use(assembly: Assembly, imports_mb: float) -> MemoryUse:
    """Return the memory that a decoder has taken so far, in MB; on a GPU the device's, with ``imports`` 0.

    Args:
        assembly: target, drafter and their caches.
        imports_mb: resident memory in MB before any model was loaded.
    """
    runners = [runner for runner in (assembly.target, assembly.drafter) if runner is not None]
    weights = sum(_unique_mb(runner.weights) for runner in runners)
    caches = sum(_unique_mb(runner.cache.tensors()) for runner in runners)
    if assembly.target.loaded.device.type == "cuda":
        return MemoryUse(0.0, torch.cuda.max_memory_allocated() / 1e6, weights, caches)
    return MemoryUse(imports_mb, peak_mb() - imports_mb, weights, caches)


def _unique_mb(tensors: list[Tensor]) -> float:
    """Return the total size of ``tensors`` in MB; tensors that begin at the same address count once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()) / 1e6
