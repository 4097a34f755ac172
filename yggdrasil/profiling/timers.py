"""Functions that time a run by the clock of the device that does the work."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeAlias

import torch

Timer: TypeAlias = Callable[[Callable[[], object]], float]  # milliseconds of one run


def timer_for(device: torch.device) -> Timer:
    """Return the timer of ``device``: CUDA events on a GPU, whose launches return early, else the host's clock."""
    return device_ms if device.type == "cuda" else host_ms


def host_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds of ``run`` by the host's clock."""
    start = perf_counter_ns()
    run()
    return (perf_counter_ns() - start) / 1e6


def device_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds of ``run`` by CUDA events on the current stream.

    It runs twice, and only the second run is timed: the first run's work hides the second one's launch.
    """
    begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    begun.record()
    run()
    done.record()
    done.synchronize()
    return float(begun.elapsed_time(done))
