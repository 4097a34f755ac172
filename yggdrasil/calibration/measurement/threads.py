"""How many threads each model should use: measured before anything is compiled, since steps are compiled for a count.

The model's linear layers are timed alone, one after the other: nearly all that threads do in a compiled step is theirs,
and a whole eager pass of a small model is mostly Python, in whose noise a thread's gain is lost.
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
# Times the least. Layers that are called one by one show less of what a thread brings than a compiled step does: of
# bfloat16 weights one more took 3 % off the first and a third off the second.
NEARLY = 1.03


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, ... and all cores."""
    counts = {cores}
    count = 1
    while count < cores:
        counts.add(count)
        count *= 2
    return sorted(counts)


@torch.inference_mode()
def time_threads(loaded: LoadedModel, name: str, counts: Sequence[int]) -> "pd.DataFrame":
    """Milliseconds of all linear layers for ``WIDTHS`` rows by number of threads, in turns; columns ``COLUMNS``."""
    import pandas as pd  # not when a decoder is opened

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
    """The most threads with which the widths together take ``NEARLY`` the least."""
    medians = samples.groupby(["threads", "width"])["ms"].median().groupby("threads").sum()
    return int(medians.index[medians <= NEARLY * medians.min()].max())


def on_threads(loaded: LoadedModel, count: int) -> LoadedModel:
    """The model, over the same tensors, with its layers on so many threads."""
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
