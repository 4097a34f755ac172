"""Measure schedules on the real engine: what their stages cost, and what whole plans take, alternating.

The machine's speed changes while it is measured. So every schedule runs in every round, and each round has plain steps
that tell its speed; times are reported at the speed of the profile.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from yggdrasil.calibration.measure import STREAK, WARM_UP, ShapeCycle, measured_shapes
from yggdrasil.engine.build import Assembly
from yggdrasil.engine.engine import Engine
from yggdrasil.engine.policy import PLAIN_POLICY, FixedPolicy, Policy
from yggdrasil.engine.text import TextStream
from yggdrasil.engine.trace import Trace
from yggdrasil.scheduling.costs import COLUMNS, LOOP, schedule_code
from yggdrasil.scheduling.stages import NAMED_VARIANTS, STAGES, Schedule
from yggdrasil.tree.objective import PLAIN_STEP, TreeShape

Progress = Callable[[float], None]
PLAN_COLUMNS = ("plan", "prompt", "round", "iterations", "tokens", "iteration_ms", "decode_ms", *STAGES, LOOP)
PLAIN = "plain decoding"
# One schedule for each cost that another variant changes; the others are sums of theirs.
MEASURED = [Schedule.of(variants) for variants in ({}, *NAMED_VARIANTS.values())]


class _Sample(NamedTuple):
    shape: TreeShape
    stages: dict[str, float]  # milliseconds
    total_ms: float


def _iterations(engine: Engine, text: Sequence[int], stream: TextStream, policy: Policy) -> Iterator[_Sample]:
    """Decode and yield what each iteration took."""
    trace = Trace()
    request = engine.decode(text, stream, policy, trace)
    next(request)
    seen, seen_ns, counted = dict(trace.stage_ns), 0, 0
    for _ in request:
        if trace.iterations == counted:
            continue
        counted = trace.iterations
        stages = {name: (ns - seen.get(name, 0)) / 1e6 for name, ns in trace.stage_ns.items()}
        yield _Sample(trace.last_shape, stages, (trace.decode_ns - seen_ns) / 1e6)
        seen, seen_ns = dict(trace.stage_ns), trace.decode_ns


def measure_stage_costs(
    assembly: Assembly,
    new_stream: Callable[[], TextStream],
    text: Sequence[int],
    rounds: int,
    progress: Progress,
) -> pd.DataFrame:
    """Stage times of all that the variants change, at context ``len(text)``; columns ``costs.COLUMNS``.

    The assembly must have been put together for ``MEASURED``. The first round warms up and is not kept, nor are
    the first iterations of a streak.
    """
    shapes = measured_shapes(assembly.shapes)
    wanted = len(shapes) * STREAK
    rows: list[tuple[object, ...]] = []
    for number in range(rounds + 1):
        for place, schedule in enumerate(MEASURED):
            assembly.engine.use(schedule.labels)
            policy = ShapeCycle(shapes, seed=number)
            previous, repeated = PLAIN_STEP, 0
            for done, sample in enumerate(_iterations(assembly.engine, text, new_stream(), policy), start=1):
                repeated = repeated + 1 if sample.shape == previous else 0
                if number and repeated >= WARM_UP:
                    rows += _rows(len(text), number, schedule, sample)
                previous = sample.shape
                if done == wanted:
                    break
            progress((number * len(MEASURED) + place + 1) / ((rounds + 1) * len(MEASURED)))
    assembly.engine.use(MEASURED[0].labels)
    return at_one_speed(pd.DataFrame(rows, columns=list(COLUMNS)))


def _rows(context: int, cycle: int, schedule: Schedule, sample: _Sample) -> Iterator[tuple[object, ...]]:
    spent = sum(sample.stages.values())
    times = {**sample.stages, LOOP: sample.total_ms - spent, "iteration": sample.total_ms}
    for stage, ms in times.items():
        yield context, cycle, schedule_code(schedule), *sample.shape, stage, ms


def at_one_speed(frame: pd.DataFrame) -> pd.DataFrame:
    """The same samples, each (cycle, schedule) scaled so that its plain steps cost what they usually do."""
    plain = frame[(frame["depth"] == 0) & (frame["stage"] == "iteration")]
    group = ["cycle", "schedule"]
    speed = plain.groupby(group)["ms"].median().rename("plain_ms").reset_index()
    joined = frame.merge(speed, on=group, how="inner")
    joined["ms"] = joined["ms"] * (speed["plain_ms"].median() / joined["plain_ms"])
    return joined[list(COLUMNS)]


class MeasuredPlan(NamedTuple):
    """A plan to time: a name, a schedule and the one shape of all its trees."""

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
) -> pd.DataFrame:
    """Decode every text by every plan and plainly, the order turning each time; columns ``PLAN_COLUMNS``.

    ``new_stream`` bounds the tokens. ``iteration_ms`` is the mean iteration without the first two, and each stage has
    its mean over the same ones; a first pass over all plans warms up.
    """
    ways: list[tuple[str, tuple[str, ...], Policy]] = [
        (plan.name, plan.stages, FixedPolicy(plan.shape)) for plan in plans
    ]
    ways.append((PLAIN, MEASURED[0].labels, PLAIN_POLICY))
    rows: list[tuple[object, ...]] = []
    jobs = [(number, prompt) for number in range(rounds) for prompt in range(len(texts))]
    for turn, (number, prompt) in enumerate([(-1, 0), *jobs]):
        shift = turn % len(ways)
        for name, stages, policy in [*ways[shift:], *ways[:shift]]:
            assembly.engine.use(stages)
            stream = new_stream()
            samples = list(_iterations(assembly.engine, texts[prompt], stream, policy))
            if number >= 0 and len(samples) > 2:
                tokens, total = len(stream.tokens) - 1, sum(sample.total_ms for sample in samples)
                rows.append((name, prompt, number, len(samples), tokens, *_means(samples[2:], total)))
        progress((turn + 1) / (len(jobs) + 1))
    assembly.engine.use(MEASURED[0].labels)
    return pd.DataFrame(rows, columns=list(PLAN_COLUMNS))


def _means(samples: Sequence[_Sample], total_ms: float) -> list[float]:
    """The mean iteration, the whole, and the mean of every stage and of what lies between them."""
    count = len(samples)
    mean = sum(sample.total_ms for sample in samples) / count
    stages = [sum(sample.stages.get(name, 0.0) for sample in samples) / count for name in STAGES]
    return [mean, total_ms, *stages, mean - sum(stages)]


def summarise_plans(frame: pd.DataFrame, plain_ms: float) -> pd.DataFrame:
    """One row a plan, in the order measured: mean iteration and milliseconds a token at the speed where a plain step
    takes ``plain_ms``, the quartiles of the latter over prompts, and the speed-up over plain decoding."""
    plain = frame[frame["plan"] == PLAIN].set_index(["prompt", "round"])
    speed = plain_ms / plain["iteration_ms"]
    plain_tpot = plain["decode_ms"] / plain["tokens"]
    rows = []
    for name, part in frame.groupby("plan", sort=False):
        part = part.set_index(["prompt", "round"])
        scaled = part["decode_ms"] * speed.reindex(part.index)
        each = scaled / part["tokens"]
        ratio = plain_tpot.reindex(part.index) / (part["decode_ms"] / part["tokens"])
        rows.append(
            {
                "plan": name,
                "iteration_ms": float((part["iteration_ms"] * speed.reindex(part.index)).median()),
                "ms_per_token": float(scaled.sum() / part["tokens"].sum()),
                "ms_per_token_low": float(each.quantile(0.25)),
                "ms_per_token_high": float(each.quantile(0.75)),
                "aal": float(part["tokens"].sum() / part["iterations"].sum()),
                "speedup": float(ratio.median()),
            }
        )
    return pd.DataFrame(rows)
