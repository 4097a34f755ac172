"""Measures the best number of threads of each model, before its steps are compiled for that number.

Only the model's linear layers are timed, one after the other. They do nearly all multi-threaded work of a step; an
eager pass of a small model is mostly Python, whose noise would hide a thread's gain.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from yggdrasil.checkpoints.formats.layers import QuantisedLinear
from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.native.one_thread import one_thread
from yggdrasil.runtime.loaded import LoadedModel

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("model", "threads", "width", "round", "ms")
WIDTHS = (1, 8)
ROUNDS = 9
# Counts within this factor of the fastest are equal. Single layers gain less from a thread than a compiled step: with
# bfloat16 weights a second thread made layers 3 % faster and steps a third.
NEARLY = 1.03


def thread_counts(cores: int) -> list[int]:
    """Return the numbers of threads to measure: the powers of two below ``cores``, and ``cores``, ascending."""
    counts = {cores}
    count = 1
    while count < cores:
        counts.add(count)
        count *= 2
    return sorted(counts)


@torch.inference_mode()
def time_threads(loaded: LoadedModel, name: str, counts: Sequence[int]) -> "pd.DataFrame":
    """Time all linear layers of a model together with each number of threads, on rows of each width in ``WIDTHS``.

    The result has the columns ``COLUMNS``, and in each of ``ROUNDS`` rounds one row per number of threads and width.
    Times are milliseconds.

    Args:
        name: the model's name in the column "model": "target" or "drafter".
        counts: numbers of threads.
    """
    import pandas as pd  # lazily: opening a decoder does not need it

    runs = {(count, width): _pass(loaded, count, width) for count in counts for width in WIDTHS}
    rows = []
    with one_thread():
        try:
            for turn in range(-1, ROUNDS):  # the first is warm-up
                for (count, width), run in runs.items():
                    start = perf_counter_ns()
                    run()
                    if turn >= 0:
                        rows.append((name, count, width, turn, (perf_counter_ns() - start) / 1e6))
        finally:
            _use(loaded, loaded.num_threads)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def best_threads(samples: "pd.DataFrame") -> int:
    """Return the largest number of threads whose time, summed over all widths, is at most 3 % above the least.

    Args:
        samples: measured times of one model, columns ``COLUMNS``.
    """
    medians = samples.groupby(["threads", "width"])["ms"].median().groupby("threads").sum()
    return int(medians.index[medians <= NEARLY * medians.min()].max())


def on_threads(loaded: LoadedModel, count: int) -> LoadedModel:
    """Return the model with ``count`` threads per linear layer; ``loaded``, which shares the layers, changes too."""
    _use(loaded, count)
    return replace(loaded, num_threads=count)


def _pass(loaded: LoadedModel, count: int, width: int) -> Callable[[], object]:
    layers = _layers(loaded)
    inputs = {size: torch.randn(1, width, size).to(loaded.dtype) for size in {layer.in_features for layer in layers}}

    def run() -> None:
        _use(loaded, count)
        for layer in layers:
            layer(inputs[layer.in_features])

    return run


def _layers(loaded: LoadedModel) -> list[PackedLinear | QuantisedLinear]:
    return [module for module in loaded.model.modules() if isinstance(module, PackedLinear | QuantisedLinear)]


def _use(loaded: LoadedModel, count: int) -> None:
    for layer in _layers(loaded):
        layer.num_threads = count
