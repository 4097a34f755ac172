"""Times single steps at given contexts, and compares them with the machine's limits.

Unlike a calibration, this runs one step several times in a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from rich.table import Table
from roofline import measure_rates, step_work

from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.measurement.steps import TimedStep, time_in_turns, timed_steps
from yggdrasil.calibration.pair import build_assembly
from yggdrasil.cli.progress import wide_console
from yggdrasil.engine.assembly import Assembly, assemble
from yggdrasil.errors import YggdrasilError
from yggdrasil.profiling.timers import Timer, host_ms, timer_for
from yggdrasil.scheduling.plan import Shapes

SAMPLE_COLUMNS = ("model", "step", "width", "context", "capacity", "backend", "round", "ms")
REPEATS = 3  # consecutive timed runs of a step


def time_steps(
    steps: Sequence[TimedStep], rounds: int, progress: Callable[[float], None], timer: Timer = host_ms
) -> pd.DataFrame:
    """Time all steps in turns; returns one row per run, in milliseconds, with columns ``SAMPLE_COLUMNS``.

    ``timer`` returns the milliseconds of one run.
    """
    found = time_in_turns(steps, rounds, progress, timer, repeats=REPEATS)
    return pd.DataFrame([(*step[:6], turn, ms) for step, turn, ms in found], columns=list(SAMPLE_COLUMNS))


def time_against_limits(
    pair: PairSource,
    contexts: Sequence[int],
    capacities: Sequence[int],
    rounds: int,
    phase: Callable[[str], Callable[[float], None]],
) -> pd.DataFrame:
    """Time every step with KV caches of each of ``capacities`` (tokens), and return the ``roofline`` table.

    Raises:
        YggdrasilError: a context is too long for a cache.
    """
    if max(contexts) >= min(capacities):
        raise YggdrasilError(f"a cache of {min(capacities)} tokens has no room behind a context of {max(contexts)}")
    sources = [replace(pair, shapes=replace(pair.shapes, max_length=capacity)) for capacity in capacities]
    first = build_assembly(sources[0])
    assemblies = [first, *(with_shapes(first, source.shapes) for source in sources[1:])]
    steps, timer = timed_steps(assemblies, contexts), timer_for(first.target.loaded.device)
    return roofline(first, time_steps(steps, rounds, phase("timing steps"), timer))


def with_shapes(assembly: Assembly, shapes: Shapes) -> Assembly:
    """Return an assembly of the same models with its own caches, tree and steps, which are not built yet."""
    model_free, backend = assembly.engine.model_free, assembly.target.backend
    return assemble(assembly.target.loaded, assembly.second, shapes, backend, model_free=model_free)


def show_table(title: str, frame: pd.DataFrame) -> None:
    """Print a DataFrame as a table with a title to standard output, floats with four significant digits."""
    table = Table(*[column.replace("_", " ") for column in frame.columns], title=title)
    for row in frame.itertuples(index=False):
        table.add_row(*[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row])
    wide_console().print(table)


def roofline(assembly: Assembly, samples: pd.DataFrame) -> pd.DataFrame:
    """Return medians and percentiles of ``samples``, each step's work, the machine's rates and the share reached.

    ``against_plain`` is a step's median divided by that of the model's narrowest step at the same context and capacity,
    ``against_smallest`` its median divided by the same step's at the smallest capacity.
    """
    runners = {"target": assembly.target} | ({"drafter": assembly.drafter} if assembly.drafter is not None else {})
    rates = {name: measure_rates(runner.loaded) for name, runner in runners.items()}
    keys = ["model", "step", "width", "context", "capacity"]
    summary = samples.groupby(keys, sort=False)["ms"]
    table = summary.quantile(np.array([0.5, 0.1, 0.9])).unstack().reset_index()
    table = table.rename(columns={0.5: "ms", 0.1: "p10_ms", 0.9: "p90_ms"})
    work = [
        step_work(runners[model].loaded, int(width), int(context))
        for model, width, context in zip(table["model"], table["width"], table["context"], strict=True)
    ]
    table["megabytes"] = [item.num_bytes / 1e6 for item in work]
    table["megaflops"] = [item.operations / 1e6 for item in work]
    table["bandwidth_gb_s"] = [rates[model].bytes_per_s / 1e9 for model in table["model"]]
    table["matrix_gflops_s"] = [rates[model].operations_per_s / 1e9 for model in table["model"]]
    table["least_ms"] = [rates[model].least_ms(item) for model, item in zip(table["model"], work, strict=True)]
    table["share_of_limit"] = table["least_ms"] / table["ms"]
    narrowest = table.sort_values("width").groupby(["model", "context", "capacity"])["ms"].transform("first")
    smallest = table.sort_values("capacity").groupby(keys[:-1])["ms"].transform("first")
    return table.assign(against_plain=table["ms"] / narrowest, against_smallest=table["ms"] / smallest)
