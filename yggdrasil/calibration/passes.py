"""What the target's passes cost beside each other: all widths in quick turns, again and again.

Inside real iterations a width has its turn every few seconds, and a shared machine's memory may be another by then: a
calibration once found twelve rows as cheap as eight. A turn of all widths takes a fraction of a second.
"""

from collections.abc import Callable

import pandas as pd

from yggdrasil.calibration.step_times import time_steps, timed_steps
from yggdrasil.engine.build import Assembly
from yggdrasil.profiling.roofline import wait_for

PASS = "pass"  # the stage of these samples; their cycle is the turn
TURNS = 12


def measure_passes(assembly: Assembly, context: int, progress: Callable[[float], None]) -> list[tuple[object, ...]]:
    """Rows of ``measure.COLUMNS``: times of plain steps and of each verify width, behind ``context`` tokens."""
    steps = [step for step in timed_steps([assembly], [context]) if step.model == "target"]
    samples = time_steps(steps, TURNS, progress, wait_for(assembly.target.loaded.device))
    assembly.engine.forget()
    measured = zip(samples["round"], samples["width"], samples["ms"], strict=True)
    return [(context, turn, 0, 0, width, PASS, milliseconds) for turn, width, milliseconds in measured]


def pass_ratios(frame: pd.DataFrame) -> dict[int, float]:
    """By width, how many plain steps a pass takes at one context: medians over the turns."""
    passes = frame[frame["stage"] == PASS]
    by_turn = passes.groupby(["verify_width", "cycle"])["ms"].median()
    ratios = (by_turn / by_turn[1]).groupby("verify_width").median()
    return dict(zip(map(int, ratios.index.tolist()), ratios.tolist(), strict=True))
