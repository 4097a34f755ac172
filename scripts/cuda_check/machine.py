"""What the machine is, and its two ceilings."""

import importlib.util
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import transformers

from cuda_check.notes import Notes

GIB = 2**30
# GB/s by the vendor's data sheets.
_NOMINAL = {"H200": 4800, "H100 PCIe": 2000, "H100 NVL": 3900, "H100": 3350, "A100": 2039, "B200": 8000}


def machine(notes: Notes, device: torch.device, *, tiny: bool) -> None:
    notes.attempt("versions", _versions)
    if device.type == "cuda":
        notes.attempt("gpu", _gpu)
    notes.attempt("triton", _triton)
    notes.attempt("copy_gb_per_s", lambda: copy_bandwidth(device, tiny=tiny))
    notes.attempt("read_gb_per_s", lambda: read_bandwidth(device, tiny=tiny))
    notes.attempt("matmul_tflop_per_s", lambda: _matmul_rate(device, tiny=tiny))


def nominal_bandwidth() -> float | None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((rate for key, rate in _NOMINAL.items() if key in name), None)


def _versions() -> dict[str, Any]:
    packages = ("triton", "gguf", "pytest", "typer", "rich", "pandas", "sklearn", "yaml")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "present": {package: importlib.util.find_spec(package) is not None for package in packages},
        "compilers": {name: shutil.which(name) for name in ("gcc", "g++", "cc", "nvcc")},
    }


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / GIB, 1),
        "free_gib": round(torch.cuda.mem_get_info()[0] / GIB, 1),
        "multiprocessors": properties.multi_processor_count,
        "nominal_gb_per_s": nominal_bandwidth(),
    }


def _triton() -> bool:
    """Whether attention is a Triton kernel here."""
    from yggdrasil import native
    from yggdrasil.native import portable

    return native.cuda_operators()["tree_attention"] is not portable.tree_attention


def copy_bandwidth(device: torch.device, *, tiny: bool) -> float:
    """GB/s of a large copy, bytes read plus bytes written."""
    source = torch.ones((1 << 16) if tiny else (1 << 31), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    ms = statistics.median(time_calls(lambda: target.copy_(source), device, 1 if tiny else 12))
    return round(2 * source.nbytes / ms / 1e6, 1)


def read_bandwidth(device: torch.device, *, tiny: bool) -> float:
    """GB/s of a large read: a sum, whose result is one number a row."""
    source = torch.ones((1 << 6, 1 << 10) if tiny else (1 << 12, 1 << 20), dtype=torch.bfloat16, device=device)
    ms = statistics.median(time_calls(lambda: source.sum(1, dtype=torch.float32), device, 1 if tiny else 12))
    return round(source.nbytes / ms / 1e6, 1)


def _matmul_rate(device: torch.device, *, tiny: bool) -> float:
    """TFLOP/s of a large bfloat16 matrix product on random data."""
    size = 64 if tiny else 8192
    a, b = (torch.randn(size, size).to(device, torch.bfloat16) for _ in range(2))
    ms = statistics.median(time_calls(lambda: a @ b, device, 1 if tiny else 12))
    return round(2 * size**3 / ms / 1e9, 3)


def time_calls(call: Callable[[], object], device: torch.device, samples: int) -> list[float]:
    """Milliseconds of each call, by the device's clock where it has one; the first two calls are left out."""
    if device.type != "cuda":
        times = []
        for _ in range(samples + 2):
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e3)
        return times[2:]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 3)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events[2:])]
