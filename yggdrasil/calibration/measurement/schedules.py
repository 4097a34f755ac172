"""Measures schedules on the real engine: the cost of their stages and the time of whole plans.

Stages and plans are measured in whole requests of one shape and one schedule, on the same prompts and at the same
contexts, so caches are as warm as in decoding. The machine's speed changes within seconds. So requests of all compared
shapes and schedules alternate, and every turn includes a plain request, whose steps give the machine's speed. All times
are scaled to the speed at which a plain step takes its median time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from time import perf_counter
from typing import NamedTuple, TypeVar

import pandas as pd

from yggdrasil.calibration.measurement.iterations import WARM_UP, TimedIteration, timed_iterations, wide_widths
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy, Policy
from yggdrasil.scheduling.costs import COLUMNS, LOOP, TIMES, schedule_code
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.scheduling.stages import NAMED_VARIANTS, STAGES, Schedule
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

Progress = Callable[[float], None]
Way = TypeVar("Way")
PLAN_COLUMNS = ("plan", "prompt", "round", "iterations", "tokens", "iteration_ms", "decode_ms", *STAGES, LOOP)
PLAIN = "plain decoding"
SHALLOW = 2  # the other measured depth is ``max_depth``


def measured_shapes(shapes: Shapes) -> list[TreeShape]:
    """Return the tree shapes to time: every verify width and every draft width, at a shallow and at the full depth.

    The shallow shapes come first. Not every pair of a draft and a verify width is included. ``shapes`` must have a
    draft width.

    Raises:
        YggdrasilError: the only verify width is 1.
    """
    wide, narrow = wide_widths(shapes), shapes.draft_widths
    return [
        TreeShape(narrow[(i + shift) % len(narrow)], depth, wide[i % len(wide)])
        for shift, depth in enumerate((min(SHALLOW, shapes.max_depth), shapes.max_depth))
        for i in range(max(len(wide), len(narrow)))
    ]


def measured_schedules(named: Mapping[str, Mapping[str, str]]) -> list[Schedule]:
    """Return the schedules whose stages a search times: the default schedule, then the named schedules.

    Args:
        named: schedule name -> stage -> variant. Together with the default they must have every variant of every stage.
    """
    return [Schedule.of(variants) for variants in ({}, *named.values())]


MEASURED = measured_schedules(NAMED_VARIANTS)


def measure_stage_costs(
    assembly: Assembly,
    new_stream: Callable[[], TextStream],
    texts: Sequence[Sequence[int]],
    progress: Progress,
    schedules: Sequence[Schedule] = MEASURED,
    *,
    seconds: float = inf,
) -> pd.DataFrame:
    """Time the stages of every schedule in real iterations; one row per iteration, columns ``costs.COLUMNS``.

    A cycle is one shape on one text, decoded with every schedule and plainly, one request after the other, in rotating
    order. The first ``WARM_UP`` iterations of a request are dropped. Milliseconds are scaled by ``at_one_speed``.

    Args:
        assembly: models and steps, built with the stages of ``schedules``.
        new_stream: makes the text stream of a request, which limits its tokens.
        texts: prompts as token ids.
        progress: takes the fraction done, 0 to 1.
        seconds: no cycle begins later than this after the call, except those of the first text.

    Raises:
        YggdrasilError: requests are too short to measure every schedule.
    """
    shapes = measured_shapes(assembly.shapes)
    cycles = [(text, shape) for text in texts for shape in shapes]
    rows: list[tuple[object, ...]] = []
    measured = set()
    warmed = [cycles[0], *cycles]  # the first cycle is repeated: it warms up
    for number, (text, shape) in turns_in_time(warmed, 1 + len(shapes), seconds, progress):
        ways = [(schedule, shape) for schedule in schedules] + [(schedules[0], PLAIN_STEP)]
        for schedule, way in _rotated_order(ways, number):
            assembly.engine.use_schedule(schedule.labels)
            samples = list(timed_iterations(assembly.engine, text, new_stream(), FixedPolicy(way)))
            if number:
                rows += [_row(len(text), number, schedule, sample) for sample in samples[WARM_UP:]]
                measured |= {(schedule.labels, way)} if samples[WARM_UP:] else set()
    assembly.engine.use_schedule(schedules[0].labels)
    if len(measured) < len(schedules) * len(set(shapes)) + 1:
        raise _too_short(assembly)
    return at_one_speed(pd.DataFrame(rows, columns=list(COLUMNS)))


def turns_in_time(turns: Sequence[Way], least: int, seconds: float, progress: Progress) -> Iterator[tuple[int, Way]]:
    """Yield each of ``turns`` with its number from 0, until ``seconds`` have passed, but at least the first ``least``.

    After each turn, ``progress`` takes the fraction done, 0 to 1: of the turns, or of ``seconds`` if they end first.
    """
    began = perf_counter()
    for number, turn in enumerate(turns):
        if number >= least and perf_counter() - began > seconds:
            return
        yield number, turn
        done, spent = number + 1, perf_counter() - began
        of_time = spent / seconds if spent < seconds else 1.0
        progress(max(done / len(turns), min(done / least, of_time)))


def _too_short(assembly: Assembly) -> YggdrasilError:
    enough = (WARM_UP + 1) * (assembly.shapes.max_depth + 1) + 1
    return YggdrasilError(
        f"--max-new-tokens ends texts before anything is measured: the first {WARM_UP} iterations of each do not "
        f"count; give {enough} or more"
    )


def _rotated_order(ways: Sequence[Way], turn: int) -> list[Way]:
    """Return ``ways`` rotated by ``turn`` places, so that each comes first equally often."""
    shift = turn % len(ways)
    return [*ways[shift:], *ways[:shift]]


def _row(context: int, cycle: int, schedule: Schedule, sample: TimedIteration) -> tuple[object, ...]:
    between = sample.total_ms - sum(sample.stages.values())
    times = {**sample.stages, "iteration": sample.total_ms, LOOP: between}
    return context, cycle, schedule_code(schedule), *sample.shape, *(times.get(name) for name in TIMES)


def at_one_speed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return ``frame`` with the milliseconds of each cycle scaled so that its plain steps take the usual time.

    The usual time is the median, over all cycles, of a cycle's median plain iteration. Cycles without plain steps are
    dropped.

    Args:
        frame: samples with the columns ``costs.COLUMNS``; plain steps have depth 0.
    """
    speed = frame[frame["depth"] == 0].groupby("cycle")["iteration"].median()
    scale = frame["cycle"].map(speed.median() / speed)
    scaled = frame.assign(**{name: (frame[name] * scale).round(6) for name in TIMES})
    return scaled[scale.notna()].reset_index(drop=True)


class MeasuredPlan(NamedTuple):
    """A plan to measure: its name, its schedule and the fixed shape of its trees."""

    name: str
    stages: tuple[str, ...]
    shape: TreeShape


def measure_plans(
    assembly: Assembly,
    new_stream: Callable[[], TextStream],
    texts: Sequence[Sequence[int]],
    plans: Sequence[MeasuredPlan],
    rounds: int,
    progress: Progress,
    *,
    seconds: float = inf,
) -> pd.DataFrame:
    """Decode every text with every plan and plainly, in rotating order; one row per request, columns ``PLAN_COLUMNS``.

    Rows of plain decoding have the plan name ``PLAIN``. ``iteration_ms`` and the stages are means over the iterations
    after the first ``WARM_UP``; a request with no more iterations than these has no row. All plans first decode
    ``texts[0]`` once without a row, as a warm-up. The engine has the default schedule afterwards.

    Args:
        new_stream: makes the text stream of a request, which limits its tokens.
        texts: prompts as token ids.
        plans: schedules and tree shapes to compare.
        rounds: times that each text is decoded.
        progress: takes the fraction done, 0 to 1.
        seconds: no text is begun later than this after the call, except ``texts[0]`` in the first round. Every plan
            decodes a text that is begun.

    Raises:
        YggdrasilError: requests are too short to measure every plan.
    """
    ways: list[tuple[str, tuple[str, ...], Policy]] = [
        (plan.name, plan.stages, FixedPolicy(plan.shape)) for plan in plans
    ]
    ways.append((PLAIN, MEASURED[0].labels, PLAIN_POLICY))
    rows: list[tuple[object, ...]] = []
    jobs = [(number, prompt) for number in range(rounds) for prompt in range(len(texts))]
    for turn, (number, prompt) in turns_in_time([(-1, 0), *jobs], 2, seconds, progress):
        for name, stages, policy in _rotated_order(ways, turn):
            assembly.engine.use_schedule(stages)
            stream = new_stream()
            samples = list(timed_iterations(assembly.engine, texts[prompt], stream, policy))
            if number >= 0 and len(samples) > WARM_UP:
                tokens, total = len(stream.tokens) - 1, sum(sample.total_ms for sample in samples)
                rows.append((name, prompt, number, len(samples), tokens, *_means(samples[WARM_UP:], total)))
    assembly.engine.use_schedule(MEASURED[0].labels)
    if {row[0] for row in rows} != {name for name, _, _ in ways}:
        raise _too_short(assembly)
    return pd.DataFrame(rows, columns=list(PLAN_COLUMNS))


def _means(samples: Sequence[TimedIteration], total_ms: float) -> list[float]:
    """Return the mean iteration, ``total_ms``, the mean of every stage and of the time between stages."""
    count = len(samples)
    mean = sum(sample.total_ms for sample in samples) / count
    stages = [sum(sample.stages.get(name, 0.0) for sample in samples) / count for name in STAGES]
    return [mean, total_ms, *stages, mean - sum(stages)]


def at_profiles_speed(frame: pd.DataFrame, plain_ms: float) -> pd.DataFrame:
    """Return ``frame`` with its milliseconds scaled to the speed at which a plain step takes ``plain_ms``.

    All requests of one prompt in one round get the same factor. The factor undoes the machine's speed at that time,
    which is the median, over the plans with most rows, of a request's time divided by the median time of its plan on
    the prompt. The factor also makes the median iteration of plain decoding take ``plain_ms`` on each prompt.

    Args:
        frame: one row per request, columns ``PLAN_COLUMNS``. The plan "plain decoding" must be measured on every
            prompt.
        plain_ms: milliseconds of an iteration of plain decoding.
    """
    turns = frame.groupby("plan").size()
    common = frame[frame["plan"].isin(turns[turns == turns.max()].index)]
    against_usual = common["decode_ms"] / common.groupby(["plan", "prompt"])["decode_ms"].transform("median")
    pace = against_usual.groupby([common["prompt"], common["round"]]).median()
    steady = pace.reindex(pd.MultiIndex.from_frame(frame[["prompt", "round"]])).to_numpy()
    plain = frame["iteration_ms"].div(steady)[frame["plan"] == PLAIN].groupby(frame["prompt"]).median()
    scale = plain_ms / (frame["prompt"].map(plain).to_numpy() * steady)
    times = ["iteration_ms", "decode_ms", *STAGES, LOOP]
    return frame.assign(**{name: frame[name] * scale for name in times})


def summarise_plans(frame: pd.DataFrame, plain_ms: float) -> pd.DataFrame:
    """Return one row per plan: plan, iteration_ms, ms_per_token, aal and speedup, in the order measured.

    "plain decoding" is one of the plans. Times are scaled by ``at_profiles_speed``. Every value is first a median over
    rounds, which ignores pauses of the machine. Then ``iteration_ms`` is the median over prompts, ``ms_per_token`` and
    ``aal`` are ratios of sums over prompts, and ``speedup`` is the median over prompts of the time per token of plain
    decoding divided by the plan's.

    Args:
        frame: one row per request, columns ``PLAN_COLUMNS``, with "plain decoding" on every prompt.
        plain_ms: milliseconds of an iteration of plain decoding.
    """
    figures = ["iteration_ms", "decode_ms", "tokens", "iterations"]
    usual = at_profiles_speed(frame, plain_ms).groupby(["plan", "prompt"], sort=False)[figures].median()
    each = usual["decode_ms"] / usual["tokens"]
    rows = []
    for name in frame["plan"].unique():
        part = usual.loc[name]
        rows.append(
            {
                "plan": name,
                "iteration_ms": float(part["iteration_ms"].median()),
                "ms_per_token": float(part["decode_ms"].sum() / part["tokens"].sum()),
                "aal": float(part["tokens"].sum() / part["iterations"].sum()),
                "speedup": float((each[PLAIN] / each[name]).median()),
            }
        )
    return pd.DataFrame(rows)
