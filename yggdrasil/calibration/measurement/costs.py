"""Computes the step costs of a plan from measured samples of steps and iterations."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import get_args

from yggdrasil.calibration.measurement.pauses import has_pause, without_pauses
from yggdrasil.calibration.measurement.steps import Sample
from yggdrasil.policy.costs import Kind, lower_envelope
from yggdrasil.scheduling.plan import Costs, Shapes

# A pass overlaps reading and computing. Its time is modelled as the p-norm of the two; this p was fitted to passes of
# 1 to 16 rows with fast and slow memory.
OVERLAP = 5.0
_CLEARLY = 1.05  # a width is dropped if it costs more than this times a wider one


def typical(milliseconds: Iterable[float]) -> float:
    """Return the lower quartile of one or more times (the least of up to three): other programs only ever add time."""
    ordered = sorted(milliseconds)
    return ordered[len(ordered) // 4]


def step_ms(samples: Iterable[Sample], stage: str) -> dict[int, float]:
    """Return width -> least measured milliseconds of a step, by ascending width; empty without samples.

    A step does the same work in every run, and other programs only ever add time.

    Args:
        samples: samples at one context length.
        stage: "pass" for the target's passes by verify width, "grow" for draft steps by draft width.
    """
    found = defaultdict[int, list[float]](list)
    for sample in samples:
        if sample.stage == stage:
            found[sample.verify_width if stage == "pass" else sample.width].append(sample.ms)
    return {width: min(found[width]) for width in sorted(found)}


def shows_pause(samples: Sequence[Sample]) -> bool:
    """Return whether ``has_pause`` is true of the least times of the passes or of the draft steps, at one context
    length."""
    return any(has_pause(step_ms(samples, stage)) for stage in ("pass", "grow"))


def costs_from(samples: Iterable[Sample], shapes: Shapes) -> list[Costs]:
    """Return the step costs of a plan in milliseconds, one entry per measured context length, ascending.

    Verification costs never fall as the width grows: a width that is slower than a wider one has the wider one's cost.
    Memory may have been slower in iterations than in the passes, at the same compute speed. So if plain iterations
    were timed, the time of a pass beyond a pass of width 1 counts as compute time, and is added (p-norm) to the time of
    a plain step. If the cores were slower too, this underestimates wide passes; the latency scales correct that during
    decoding.

    Args:
        samples: passes ("pass") and draft steps ("grow") of every width and context, and timed iterations, if any.
        shapes: the draft and verify widths of the result.
    """
    ordered = sorted(samples, key=attrgetter("context"))
    return [_costs_at(context, list(part), shapes) for context, part in groupby(ordered, attrgetter("context"))]


def _costs_at(context: int, samples: Sequence[Sample], shapes: Shapes) -> Costs:
    passes, levels = (_without_noise(step_ms(samples, stage)) for stage in ("pass", "grow"))
    plain, model_free, drafted = ([each for each in samples if _kind(each) == kind] for kind in get_args(Kind))
    steps = [each.ms for each in plain if each.stage == "plain"]
    if steps:
        computing = {width: ms**OVERLAP - passes[1] ** OVERLAP for width, ms in passes.items()}
        passes = {width: (typical(steps) ** OVERLAP + ms) ** (1 / OVERLAP) for width, ms in computing.items()}

    def iteration_ms(iterations: Sequence[Sample], stage: str) -> float | None:
        found = [each.ms for each in iterations if each.stage == stage]
        return max(rounded(typical(found)), 0.0) if found else None

    overheads = [iteration_ms(each, "overhead") for each in (plain, model_free, drafted)]
    known = [ms for ms in overheads if ms is not None] or [0.0]
    overhead_ms, plain_overhead_ms = known[-1], known[0]
    attaching = [each.ms - (each.depth - 1) * levels[each.width] for each in drafted if each.stage == "draft_steps"]
    if attaching:  # time of drafting besides its steps, such as the last level; the least, as of the steps
        overhead_ms = rounded(overhead_ms + max(min(attaching), 0.0))
    reading = [each.ms for each in samples if each.stage == "reading"]
    has_drafter = bool(shapes.draft_widths)
    return Costs(
        context=context,
        head_ms=(iteration_ms(drafted, "head_draft") or 0.0) if has_drafter else 0.0,
        draft_ms={width: rounded(levels[width]) for width in shapes.draft_widths},
        verify_ms={width: rounded(passes[width]) for width in shapes.verify_widths},
        overhead_ms=overhead_ms,
        plain_ms=rounded(passes[1] + plain_overhead_ms),
        model_free_overhead_ms=overheads[1] if has_drafter else None,
        reading_ms=rounded(max(median(reading), 0.0)) if reading else 0.0,
    )


def _kind(sample: Sample) -> Kind | None:
    """Return the kind of the iteration that ``sample`` is from; None if it is from none."""
    if sample.stage in ("pass", "grow", "reading"):
        return None
    return "drafted" if sample.width else "model_free" if sample.depth else "plain"


def _without_noise(measured: dict[int, float]) -> dict[int, float]:
    """Return the times by width, lowered where only a pause explains them or where a wider width is cheaper."""
    served = lower_envelope(without_pauses(measured)) if measured else {}
    return {width: ms for width, (ms, _) in served.items()}


def useful_verify_widths(samples: Sequence[Sample], shapes: Shapes) -> tuple[int, ...]:
    """Return the verify widths of ``shapes`` for a plan: width 1, and widths that no wider width clearly undercuts.

    Such a width costs at most 5 % more than the cheapest wider width, at the shortest measured context. A slightly
    dearer width is not dropped, because the memory's speed decides which of two widths is cheaper (with slow memory six
    rows cost as much as eight). In the plan, a dearer width has the cost of the wider width.
    """
    shortest = min(sample.context for sample in samples)
    measured = step_ms((sample for sample in samples if sample.context == shortest), "pass")
    served = {width: ms for width, (ms, _) in lower_envelope(measured).items()}
    useful = {width for width, ms in served.items() if measured[width] <= _CLEARLY * ms}
    return tuple(width for width in shapes.verify_widths if width == 1 or width in useful)


def rounded(value: float) -> float:
    """Return ``value`` rounded to four significant digits, as plans store it."""
    return float(f"{float(value):.4g}")
