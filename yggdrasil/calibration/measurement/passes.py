"""What the target's passes cost beside each other: all widths in quick turns, again and again.

Inside real iterations a width has its turn every few seconds, and a shared machine's memory may be another by then: a
calibration once found twelve rows as cheap as eight. A turn here takes some thirty plain steps.
"""

from collections.abc import Callable

import pandas as pd
import torch

from yggdrasil.calibration.measurement.timed_steps import timed_steps
from yggdrasil.engine.assembly import Assembly
from yggdrasil.native.one_thread import one_thread
from yggdrasil.profiling.timers import timer_for

PASS = "pass"  # the stage of these samples; their cycle is the turn
TURNS = 12
# A pass reads and computes at once: it takes what the longer of them takes, and more where both take as long. This is
# the p of their p-norm, by passes of 1 to 16 rows in seconds of fast and of slow memory.
OVERLAP = 5.0


@torch.inference_mode()
def measure_passes(assembly: Assembly, context: int, progress: Callable[[float], None]) -> list[tuple[object, ...]]:
    """Rows of ``measure.COLUMNS``: times of plain steps and of each verify width, behind ``context`` tokens.

    Each runs twice and is timed once, in rising order of width, then in falling.
    """
    steps = [step for step in timed_steps([assembly], [context]) if step.model == "target"]
    timer, rows = timer_for(assembly.target.loaded.device), list[tuple[object, ...]]()
    with one_thread():  # else idle ones would spin on the cores that our operators use
        for turn in range(TURNS + 1):  # the first warms up
            for step in steps if turn % 2 == 0 else reversed(steps):
                step.prepare()
                step.run()
                elapsed_ms = timer(step.run)
                if turn:
                    rows.append((context, turn, 0, 0, step.width, PASS, elapsed_ms))
            progress((turn + 1) / (TURNS + 1))
    assembly.engine.forget()
    return rows


def passes_at(frame: pd.DataFrame, plain_ms: float | None = None) -> dict[int, float]:
    """Milliseconds of passes at one context by width, where a plain step takes ``plain_ms`` (as long as in the turns).

    Iterations may have met slower memory than the turns, while the cores compute as fast. So what a pass takes beyond
    the plain step of its turn, in the p-norm that decisions go by, is computing, and stays. Medians over the turns.
    Where the cores were slower too, wide passes cost more than this says; decoding follows that by itself.
    """
    by_turn = frame[frame["stage"] == PASS].groupby(["verify_width", "cycle"])["ms"].median()
    computing = (by_turn**OVERLAP - by_turn[1] ** OVERLAP).groupby("verify_width").median().clip(lower=0.0)
    reading_ms = float(by_turn[1].median()) if plain_ms is None else plain_ms
    whole = (reading_ms**OVERLAP + computing) ** (1.0 / OVERLAP)
    return {int(width): float(ms) for width, ms in whole.items()}
