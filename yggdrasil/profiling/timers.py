"""Functions that time a call by the clock of the device (CPU or GPU) that does the work."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeAlias

import torch

Timer: TypeAlias = Callable[[Callable[[], object]], float]  # calls its argument; returns milliseconds of one call


def timer_for(device: torch.device) -> Timer:
    """Return the function that calls its argument and returns the milliseconds of one call on ``device``.

    For a GPU this is ``device_ms``, which calls its argument twice and times the second call with CUDA events. For
    other devices it is ``host_ms``, which calls its argument once.
    """
    return device_ms if device.type == "cuda" else host_ms


def host_ms(run: Callable[[], object]) -> float:
    """Call ``run`` once and return the elapsed milliseconds by the host's clock."""
    start = perf_counter_ns()
    run()
    return (perf_counter_ns() - start) / 1e6


def device_ms(run: Callable[[], object]) -> float:
    """Call ``run`` twice and return the milliseconds of the second call by CUDA events on the current stream.

    While the device does the work of the first call, the host launches the second, so launching is not timed.
    """
    begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    begun.record()
    run()
    done.record()
    done.synchronize()
    return float(begun.elapsed_time(done))
