"""What each step costs on the other backend that could decode: the losers' numbers beside the winner's.

Every step is timed as an ahead-of-time package and eagerly, over the very same operators, weights and thread counts.
Packages decode whatever the table says, because a choice width by width needs steps that may be mixed:

- eager steps give some rows other last bits than packages do, so a width on its own would no longer choose like the
  others, and speculation would change the text;
- frozen weights and max-autotune templates (``variants``) hold the weights as constants of a graph, packed once a
  graph: each width would cost a copy of the model, and its rows' bits would follow the width.

What is picked for each width is the package that serves it, its own or a wider one (``measure.useful_verify_widths``),
and for each model the number of threads.
"""

from collections.abc import Callable

import pandas as pd

from yggdrasil.calibration.pair import sibling
from yggdrasil.calibration.step_times import time_steps
from yggdrasil.calibration.timed_steps import timed_steps
from yggdrasil.engine.assembly import Assembly

ROUNDS = 5
KEYS = ["model", "step", "width", "context"]


def time_backends(assembly: Assembly, context: int, progress: Callable[[float], None]) -> pd.DataFrame:
    """Samples (``SAMPLE_COLUMNS``) of every decoding step at ``context`` on both backends, in turns."""
    both = [assembly, sibling(assembly, backend="eager")]
    return time_steps(timed_steps(both, [context]), ROUNDS, progress)


def compare_backends(samples: pd.DataFrame) -> pd.DataFrame:
    """Median milliseconds of each step by backend, and what eager costs over the package."""
    medians = samples.groupby([*KEYS, "backend"], sort=False)["ms"].median().unstack("backend").reset_index()
    table = medians.rename(columns={"inductor": "package_ms", "eager": "eager_ms"})
    return table.assign(eager_over_package=table["eager_ms"] / table["package_ms"])
