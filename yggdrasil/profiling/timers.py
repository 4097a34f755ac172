"""Milliseconds of work, by the clock of the device that does it."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeAlias

import torch

Timer: TypeAlias = Callable[[Callable[[], object]], float]  # milliseconds of one run


def timer_for(device: torch.device) -> Timer:
    """Events on a GPU, whose launches return before their work is done; elsewhere the host's clock."""
    return device_ms if device.type == "cuda" else host_ms


def host_ms(run: Callable[[], object]) -> float:
    """By the host's clock."""
    start = perf_counter_ns()
    run()
    return (perf_counter_ns() - start) / 1e6


def device_ms(run: Callable[[], object]) -> float:
    """By events on the current stream. A first run is not timed: the launch of the second is hidden behind its work."""
    begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    begun.record()
    run()
    done.record()
    done.synchronize()
    return float(begun.elapsed_time(done))
