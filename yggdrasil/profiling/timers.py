"""Functions that time a run by the clock of the device that does the work."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeAlias

import torch

Timer: TypeAlias = Callable[[Callable[[], object]], float]  # milliseconds of one run


def timer_for(device: torch.device) -> Timer:
    """Return the function that calls its argument and returns the milliseconds of a run on ``device``.

    On a GPU it is ``device_ms``, which calls it twice and times the second call with CUDA events; else ``host_ms``,
    which calls it once.
    """
    return device_ms if device.type == "cuda" else host_ms


def host_ms(run: Callable[[], object]) -> float:
    """Call ``run`` and return the milliseconds it took by the host's clock."""
    start = perf_counter_ns()
    run()
    return (perf_counter_ns() - start) / 1e6


def device_ms(run: Callable[[], object]) -> float:
    """Call ``run`` twice and return the milliseconds of the second call by CUDA events on the current stream.

    The first call's work hides the launch of the second.
    """
    begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    begun.record()
    run()
    done.record()
    done.synchronize()
    return float(begun.elapsed_time(done))
