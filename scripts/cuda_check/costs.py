"""T(W) of a model of a size: captured and compiled steps by the device's own clock, and where the time goes."""

import gzip
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuda_check.machine import nominal_bandwidth, read_bandwidth, time_calls
from cuda_check.models import modes, random_model, step_bytes, steps_of
from cuda_check.notes import Notes
from yggdrasil.engine.assembly import Assembly, assemble
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.scheduling.plan import Shapes

WIDTHS = (1, 16, 64, 8, 32, 128, 4, 2)  # in the order of what is missed most where time runs out
CONTEXTS = (128, 2048)
PROFILED = (1, 16)


def costs(notes: Notes, device: torch.device, *, tiny: bool, size: str) -> None:
    widths, contexts = ((1, 4), (16,)) if tiny else (WIDTHS, CONTEXTS)
    bandwidth = notes.attempt("read_gb_per_s", lambda: read_bandwidth(device, tiny=tiny))
    loaded = random_model(size, device, tiny=tiny)
    notes.note("model", {"parameters": sum(p.numel() for p in loaded.model.parameters()), "bytes": step_bytes(loaded)})
    shapes = Shapes(
        max_length=max(contexts) + 64, draft_widths=(8,), max_depth=4, candidates=8,
        verify_widths=tuple(sorted(widths)),
        prefill_widths=(16,),
    )  # fmt: skip
    measured: dict[str, dict[str, dict[int, float]]] = {}
    for mode in [mode for mode in modes() if mode != "eager"] or ["eager"]:
        with steps_of(mode, device) as backend:
            assembly = assemble(loaded, None, shapes, backend if backend == "cudagraph" else "cudagraph")
        # Few widths of what runs uncompiled: it is there to say what compiling brings.
        chosen = widths if mode == "compiled" else tuple(w for w in widths if w in (1, 8, 64))
        timer = _Timer(assembly, device, samples=1 if tiny else 30)
        for width in chosen:
            # The first call compiles inside the mode in which the step is made.
            with steps_of(mode, device):
                made = partial(timer.times, width, contexts)
                found = notes.attempt(f"T({width}), {mode}", made, seconds=6)
            if found is not None:
                measured.setdefault(mode, {})[str(width)] = found
        if mode == "compiled" or len(modes()) < 3:
            for width in PROFILED:
                if width in chosen and device.type == "cuda":
                    path = notes._report.path.parent / "trace.json.gz"
                    notes.attempt(f"kernels at W{width}, {mode}", partial(timer.kernels, width, path), seconds=5)
        notes.note(f"ready in ms, {mode}", timer.build_ms())
    if bandwidth:
        shares = _shares(
            measured, step_bytes(loaded), assembly.target.cache.num_bytes / shapes.cache_capacity, bandwidth
        )
        notes.note("bandwidth", shares)
    notes.note("peak_gib", torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None)


def _shares(measured: Any, weights: int, row_bytes: float, bandwidth: float) -> dict[str, Any]:
    """Share of the measured and of the nominal bandwidth that a plain step reaches."""
    nominal, shares = nominal_bandwidth(), {}
    for mode, by_width in measured.items():
        for context, ms in by_width.get("1", {}).items():
            rate = (weights + row_bytes * int(context)) / ms / 1e6
            shares[f"{mode}, context {context}"] = {
                "gb_per_s": round(rate, 1),
                "of_measured": round(rate / bandwidth, 4),
                "of_nominal": None if nominal is None else round(rate / nominal, 4),
            }
    return shares


class _Timer:
    """Replays of the target's steps."""

    def __init__(self, assembly: Assembly, device: torch.device, samples: int) -> None:
        target = assembly.engine.target
        assert isinstance(target, CapturedTarget)
        self._assembly, self._target, self._device, self._samples = assembly, target, device, samples

    def times(self, width: int, contexts: tuple[int, ...]) -> dict[int, float]:
        """Median milliseconds by context."""
        return {context: round(self._median(self._at(width, context)), 4) for context in contexts}

    def _median(self, launch: Callable[[], object]) -> float:
        return statistics.median(time_calls(launch, self._device, self._samples))

    @torch.inference_mode()
    def _at(self, width: int, context: int) -> Callable[[], object]:
        """The launch of a step behind ``context`` tokens, recorded."""
        target, tree = self._target, self._assembly.engine.tree
        capture = target.captures["plain", 1] if width == 1 else target.captures["verify", width]
        capture.prepare()
        target.text.pretend([1] * context, context)
        tree.plant(1)
        _ = target.plain(1) if width == 1 else target.verify(width)  # writes the inputs
        return capture

    def kernels(self, width: int, path: Path) -> dict[str, Any]:
        """Nodes and microseconds of one replay by kernel; the first trace of a run is kept."""
        launch, replays = self._at(width, 128), 3
        launch()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(replays):
                launch()
            torch.cuda.synchronize()
        if not path.exists():
            raw = path.with_suffix("")
            profile.export_chrome_trace(str(raw))
            path.write_bytes(gzip.compress(raw.read_bytes()))
            raw.unlink()
        found = [event for event in profile.key_averages() if event.self_device_time_total > 0]
        found.sort(key=lambda event: -event.self_device_time_total)
        table = {
            event.key[:70]: [event.count // replays, round(event.self_device_time_total / replays, 1)]
            for event in found
        }
        total, nodes = (sum(row[i] for row in table.values()) for i in (1, 0))
        return {"nodes": nodes, "us": round(total, 1), "by_kernel": dict(list(table.items())[:25])}

    def build_ms(self) -> dict[str, float]:
        steps: dict[Any, Any] = self._assembly.target._steps
        return {step.name: round(step.build_ms) for step in steps.values()}


def summary(results: dict[str, Any]) -> list[str]:
    """Lines for a person: milliseconds by width."""
    lines = []
    for mode in ("captured", "compiled"):
        row = {key: value for key, value in results.items() if key.endswith(f", {mode}") and key.startswith("T(")}
        ok = {key.split(",")[0]: value for key, value in row.items() if "error" not in value and "skipped" not in value}
        if ok:
            lines.append(f"  {mode}: " + json.dumps(ok).replace('"', ""))
    shares = [f"{key} {value['of_measured']:.0%}" for key, value in results.get("bandwidth", {}).items()]
    lines += [f"  of measured bandwidth: {', '.join(shares)}"] if shares else []
    return lines
