"""How many threads each model should use: measured before anything is compiled, since steps are compiled for a count.

Eager steps over the very same operators are timed. Only the operators use threads, so the difference between two
counts is what a compiled step would gain.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter_ns

import pandas as pd
import torch

from yggdrasil.models.formats.layers import QuantisedLinear
from yggdrasil.models.loaded import LoadedModel
from yggdrasil.models.packing import PackedLinear
from yggdrasil.models.runner import ModelCall, ModelRunner

COLUMNS = ("model", "threads", "width", "round", "ms")
WIDTHS = (1, 8)
CONTEXT = 256
ROUNDS = 9
WORTH = 0.97  # another thread is used where it takes at most this share of the time


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, ... and all cores."""
    counts = {cores}
    count = 1
    while count < cores:
        counts.add(count)
        count *= 2
    return sorted(counts)


@torch.inference_mode()
def time_threads(loaded: LoadedModel, name: str, counts: Sequence[int]) -> pd.DataFrame:
    """Milliseconds of an eager pass of ``WIDTHS`` rows by number of threads, in turns; columns ``COLUMNS``."""
    runs = {(count, width): _pass(loaded, count, width) for count in counts for width in WIDTHS}
    rows = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(-1, ROUNDS):  # the first is warm-up
            for (count, width), run in runs.items():
                start = perf_counter_ns()
                run()
                if turn >= 0:
                    rows.append((name, count, width, turn, (perf_counter_ns() - start) / 1e6))
    finally:
        torch.set_num_threads(before)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def best_threads(samples: pd.DataFrame) -> int:
    """The count whose widths together are fastest; fewer threads where more are hardly faster."""
    medians = samples.groupby(["threads", "width"])["ms"].median().groupby("threads").sum()
    best = int(medians.index[0])
    for count in medians.index[1:]:
        if medians[count] < WORTH * medians[best]:
            best = int(count)
    return best


def _pass(loaded: LoadedModel, count: int, width: int) -> Callable[[], object]:
    counted = replace(loaded, num_threads=count)
    runner = ModelRunner(counted, CONTEXT + width, loaded.vocab_size, "eager")
    call = ModelCall(counted, loaded.vocab_size)
    rows = torch.arange(width)
    tokens, mask = torch.ones(width, dtype=torch.int64), rows[:, None] >= rows[None, :]
    offsets = torch.tensor([CONTEXT, CONTEXT])

    def run() -> object:
        for module in loaded.model.modules():
            if isinstance(module, PackedLinear | QuantisedLinear):
                module.num_threads = count
        return call(runner.weights, runner.cache.tensors(), tokens, CONTEXT + rows, mask, offsets)

    return run
