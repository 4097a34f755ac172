"""The sections of ``check_cuda.py``: what is measured, in the order of its worth."""

import importlib.util
import json
import platform
import shutil
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from cuda_pair import Pair, time_calls

GIB = 2**30


class Notes:
    """Results of one section: written after every measurement, whatever happens later."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.content: dict[str, Any] = {}
        self._path, self._deadline = path, deadline

    def note(self, key: str, value: object) -> None:
        self.content[key] = value
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        temporary.replace(self._path)

    def attempt(self, key: str, measure: Callable[[], Any], seconds: float = 5.0) -> Any:
        """Note what ``measure`` returns, or why it failed; skipped where fewer than ``seconds`` are left."""
        left = self._deadline - time.monotonic()
        if left < seconds:
            self.note(key, {"skipped": f"{left:.0f} s were left, it may take {seconds:.0f}"})
            return None
        begun = time.monotonic()
        try:
            value = measure()
        except Exception as error:  # noqa: BLE001 - one failure must not lose the rest
            reason = (str(error).strip() or type(error).__name__)[:2000]
            self.note(key, {"error": f"{type(error).__name__}: {reason}", "traceback": traceback.format_exc()[-4000:]})
            return None
        self.note(key, value)
        self.note("seconds", {**self.content.get("seconds", {}), key: round(time.monotonic() - begun, 2)})
        return value


def environment(notes: Notes, name: str, device: str, *, tiny: bool) -> None:
    """What this machine is, and its two ceilings."""
    notes.attempt("versions", _versions)
    if device == "cuda":
        notes.attempt("gpu", _gpu)
    notes.attempt("copy_gb_per_s", lambda: copy_bandwidth(device, tiny=tiny))
    notes.attempt("matmul_tflop_per_s", lambda: _matmul_rate(device, tiny=tiny))


def gpu_checks(notes: Notes, name: str, device: str, *, tiny: bool) -> None:
    """Every GPU test as a plain function; a device that was lost fails the rest of this section only."""
    if device != "cuda":
        notes.note("skipped", "the GPU tests need a CUDA device")
        return
    from gpu.checks import CHECKS

    for check in CHECKS:
        notes.attempt(check.__name__, lambda check=check: check() or "passed")


def pair(notes: Notes, name: str, device: str, *, tiny: bool) -> None:
    """T(W), decoding with each optimisation on and off, and the share of the bandwidth, at the shape of a real pair."""
    bandwidth = notes.attempt("copy_gb_per_s", lambda: copy_bandwidth(device, tiny=tiny))
    measured = Pair(name, torch.device(device), tiny=tiny)
    notes.note("models", measured.describe())
    notes.attempt("decode captured: plain", measured.plain)
    notes.attempt("step_ms captured", measured.step_times)
    for shape in measured.shapes_to_try():
        notes.attempt(f"decode captured: width {shape.width}, depth {shape.depth}, verify {shape.verify_width}",
                      lambda shape=shape: measured.tree(shape))  # fmt: skip
    notes.attempt("decode captured: objective policy", measured.objective)
    notes.attempt("decode without the Triton kernels: best tree", measured.portable_tree)
    notes.attempt("decode eager: plain", measured.eager_plain)
    notes.attempt("decode eager: best tree", measured.eager_tree)
    notes.attempt("decode transformers generate", measured.transformers_generate)
    notes.attempt("decode compiled: plain", measured.compiled_plain, seconds=20)  # compiling takes what is left
    notes.attempt("step_ms compiled: plain", measured.compiled_plain_ms)
    if bandwidth:
        notes.attempt("bandwidth_share", lambda: measured.bandwidth_shares(bandwidth), seconds=0)
    notes.attempt("decode compiled: best tree", measured.compiled_tree, seconds=20)
    notes.note("compiled_steps", measured.compiled_steps())
    notes.note("peak_gib", torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None)


SECTIONS = {"environment": environment, "tests": gpu_checks, "pair": pair}


def _versions() -> dict[str, Any]:
    packages = ("triton", "pytest", "typer", "rich", "pandas", "sklearn", "yaml")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "present": {package: importlib.util.find_spec(package) is not None for package in packages},
        "compilers": {name: shutil.which(name) for name in ("gcc", "g++", "cc", "nvcc")},
    }


def _gpu() -> dict[str, Any]:
    from yggdrasil.artifacts import current_machine

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / GIB, 1),
        "multiprocessors": properties.multi_processor_count,
        "machine": current_machine().describe(),
        "fingerprint": current_machine().fingerprint,
    }


def copy_bandwidth(device: str, *, tiny: bool) -> float:
    """GB/s of a large copy on the device, bytes read plus bytes written."""
    source = torch.ones((1 << 20) if tiny else (1 << 31), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    ms = statistics.median(time_calls(lambda: target.copy_(source), device, 3 if tiny else 12))
    return round(2 * source.nbytes / ms / 1e6, 1)


def _matmul_rate(device: str, *, tiny: bool) -> float:
    """TFLOP/s of a large bfloat16 matrix product on random data."""
    size = 256 if tiny else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    ms = statistics.median(time_calls(lambda: a @ b, device, 3 if tiny else 12))
    return round(2 * size**3 / ms / 1e9, 2)
