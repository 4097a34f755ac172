"""Measures the relative cost of target passes of all widths, alternating quickly between them.

In real iterations a width recurs only every few seconds, and a shared machine's memory bandwidth may have changed by
then: one calibration measured twelve rows as cheap as eight. A turn of all widths here takes about 30 plain steps.
"""

from collections.abc import Callable

import pandas as pd

from yggdrasil.calibration.measurement.timed_steps import time_alternately, timed_steps
from yggdrasil.engine.assembly import Assembly
from yggdrasil.profiling.timers import timer_for

PASS = "pass"  # value of the column "stage" of these samples; "cycle" is the turn
TURNS = 12
# A pass overlaps reading and computing. Its time is modelled as the p-norm of the two; this p was fitted to passes of
# 1 to 16 rows with fast and slow memory.
OVERLAP = 5.0


def measure_passes(assembly: Assembly, context: int, progress: Callable[[float], None]) -> list[tuple[object, ...]]:
    """Time plain steps and target passes of each verify width with ``context`` tokens in the cache.

    Returns one row per run with the columns ``stages.COLUMNS``; its stage is "pass".
    """
    steps = [step for step in timed_steps([assembly], [context]) if step.model == "target"]
    found = time_alternately(steps, TURNS, progress, timer_for(assembly.target.loaded.device))
    assembly.engine.forget()
    return [(context, turn, 0, 0, step.width, PASS, ms) for step, turn, ms in found]


def passes_at(frame: pd.DataFrame, plain_ms: float | None = None) -> dict[int, float]:
    """Return the milliseconds of a target pass by verify width, at the context length of the samples.

    Args:
        frame: samples with the columns ``stages.COLUMNS``, of one context length.
        plain_ms: milliseconds of a plain step to which all passes are scaled; None: the plain step's median.

    Memory may have been slower in iterations than in the measured passes, at the same compute speed. So the part of a
    pass beyond the plain step of its turn (p-norm difference, median over turns) is taken as compute time and kept. If
    the cores were slower too, this underestimates wide passes; the latency scales correct that during decoding.
    """
    by_turn = frame[frame["stage"] == PASS].groupby(["verify_width", "cycle"])["ms"].median()
    computing = (by_turn**OVERLAP - by_turn[1] ** OVERLAP).groupby("verify_width").median().clip(lower=0.0)
    reading_ms = float(by_turn[1].median()) if plain_ms is None else plain_ms
    whole = (reading_ms**OVERLAP + computing) ** (1.0 / OVERLAP)
    return {int(width): float(ms) for width, ms in whole.items()}
