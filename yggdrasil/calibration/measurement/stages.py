"""Measures the cost of each stage inside real iterations.

The engine runs a cycle of shapes on real text, so CPU caches are as warm as in decoding. A shared machine's memory
speed changes within seconds, and a cycle takes several. So plain steps precede the shapes of each verify width, as a
reference, and the relative cost of widths is measured by quicker alternation (``passes``).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import attrgetter

import numpy as np
import pandas as pd
import torch

from yggdrasil.calibration.measurement.passes import measure_passes, passes_at
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.engine.trace import MODEL_STAGES, EventExecutor, Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import lower_envelope
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.policy.objective import UNBOUNDED, Decision, ModelFree, StoppingBound, stopping_bound
from yggdrasil.predictor.features import Features
from yggdrasil.scheduling.plan import Costs, Shapes
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

COLUMNS = ("context", "cycle", "width", "depth", "verify_width", "stage", "ms")
SHALLOW = 2  # the other measured depth is ``max_depth``
STREAK, WARM_UP = 8, 2
SPAN = 128  # maximum tokens decoded after the text: longer contexts would cost more
READ, USUAL = 5, 4  # texts whose reading by the drafter is timed; normal head drafts after each
_IN_ITERATIONS = 0.8  # share of the measuring time that iterations take, for progress
_CLEARLY = 1.05  # a width is dropped if it costs more than this times a wider one
Progress = Callable[[float], None]


class ShapeCycle:
    """A policy that cycles through ``shapes``, each ``STREAK`` times in a row, by ascending verify width.

    Plain steps precede the shapes of each verify width, which are in random order. Only the verify width of a
    model-free shape counts; its tree is as deep as the drafts.

    Decoding mostly repeats a shape, and the first steps after a change of width are slower (other code, buffers and
    threads), so costs are measured in long repetitions. Wide passes slow the processor down for some milliseconds. That
    would distort narrow passes, so plain steps follow the widest ones. Correcting costs during decoding instead would
    need many plain steps to tell wrong costs from a slower machine.
    """

    def __init__(self, shapes: Sequence[TreeShape], seed: int) -> None:
        self._shapes = list(shapes)
        self._random = random.Random(seed)
        self._order: list[TreeShape] = []  # remaining shapes of the cycle, the next one last
        self.length = STREAK * (len(self._shapes) + max(1, len({shape.verify_width for shape in shapes})))  # per cycle
        self.streaks = 0  # streaks of plain steps begun so far
        self.wants_model_free = any(shape.is_free for shape in shapes)

    def begin(self) -> None:
        """Do nothing: the cycle of shapes continues across requests."""

    def observe(self, decision: Decision, tokens: int, milliseconds: float) -> None:
        """Do nothing: the cycle of shapes does not depend on measurements."""

    def _next(self) -> TreeShape:
        if not self._order:
            shuffled = self._random.sample(self._shapes, len(self._shapes))
            groups = groupby(sorted(shuffled, key=attrgetter("verify_width")), attrgetter("verify_width"))
            order = [shape for _, group in groups for shape in (PLAIN_STEP, *group)] or [PLAIN_STEP]
            self._order = [shape for shape in reversed(order) for _ in range(STREAK)]
        return self._order[-1]

    def _take(self) -> TreeShape:
        self.streaks += self._next() == PLAIN_STEP and len(self._order) % STREAK == 0
        return self._order.pop()

    def bound(self, context: int, shape: TreeShape | None = None) -> StoppingBound:
        """Return a bound by which a model-free tree has about as many nodes as in decoding at ``shape``."""
        if shape is None:
            return UNBOUNDED
        return stopping_bound([shape.verify_width], [1.0])  # about as many nodes as in decoding at that width

    def choose(
        self, context: int, model_free: ModelFree | None = None, features: Features | None = None
    ) -> Decision | None:
        """Return the next shape of the cycle; a plain step in place of a model-free shape if ``model_free`` is None."""
        if not self._next().is_free:
            shape = self._take()
            return Decision(shape, is_drafting=shape.depth > 0)
        # Without model-free drafts (end of the text, no repetition) take a plain step.
        return Decision(PLAIN_STEP if model_free is None else self._take())

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        """Return ``decision``, whose verify width the cycle has chosen."""
        return decision


def measured_shapes(shapes: Shapes, *, with_model_free: bool) -> list[TreeShape]:
    """Return the tree shapes to time: every verify width and every draft width, at a shallow and at the full depth.

    Without a draft model or head they are model-free shapes, one per verify width.

    Args:
        shapes: the plan's draft widths, verify widths and greatest depth.
        with_model_free: add the model-free shapes to a drafter's.

    Raises:
        YggdrasilError: there is a drafter, and the only verify width is 1.
    """
    wide = [width for width in shapes.verify_widths if width > 1]
    narrow = shapes.draft_widths
    model_free = [TreeShape(0, 1, width) for width in wide]
    if not narrow:
        return model_free
    if not wide:
        raise YggdrasilError("the only verify width is 1, which no tree can use; give --verify-widths such as 1,2,4,8")
    pairs = [
        TreeShape(narrow[(i + shift) % len(narrow)], depth, wide[i % len(wide)])
        for shift, depth in enumerate((min(SHALLOW, shapes.max_depth), shapes.max_depth))
        for i in range(max(len(wide), len(narrow)))
    ]
    return [*pairs, *(model_free if with_model_free else ())]


@contextmanager
def on_device_clock(assembly: Assembly) -> Iterator[None]:
    """Within the context, time the stages of an iteration by CUDA events on a GPU, and by the host's clock on a CPU.

    On a GPU launches return early, so the host's clock would not see a stage's time.
    """
    engine = assembly.engine
    before = engine.executor
    if assembly.target.loaded.device.type == "cuda":
        engine.executor = EventExecutor(partial(torch.cuda.Event, enable_timing=True))
    try:
        yield
    finally:
        engine.executor = before


def measure_stages(
    assembly: Assembly, stream: Callable[[], TextStream], text: Sequence[int], samples: int, progress: Progress
) -> pd.DataFrame:
    """Time the stages of at least ``samples`` iterations per tree shape; one row per stage, columns ``COLUMNS``.

    A request ends ``SPAN`` tokens after ``text``, and the next begins there, so that the context length stays the same.
    The column "stage" also has "overhead", the iteration's time outside the models; "iteration", its whole time;
    "reading", the drafter's time per token of unread text; and "pass", a target pass measured outside iterations. The
    first cycle and the first ``WARM_UP`` iterations of each streak are dropped. The column "cycle" numbers the streaks
    of plain steps, each with the shapes that follow it.

    Args:
        stream: makes the text stream of a request.
        text: token ids of the context.
        progress: takes the fraction done, 0 to 1.
    """
    policy = ShapeCycle(
        measured_shapes(assembly.shapes, with_model_free=assembly.engine.model_free is not None), seed=0
    )
    wanted = policy.length * (-(-samples // (STREAK - WARM_UP)) + 1)
    rows: list[tuple[object, ...]] = []
    done = 0
    while done < wanted:
        trace = Trace()
        request = assembly.engine.decode(text, stream(), policy, trace)
        next(request)
        seen, seen_ns, counted = dict(trace.stage_ns), 0, 0
        previous, repeated = PLAIN_STEP, 0
        for _ in request:
            if trace.iterations == counted:  # the end of the text is no iteration
                continue
            counted, shape = trace.iterations, trace.last_shape
            shape = shape._replace(depth=1) if shape.is_free else shape
            stages = {name: (ns - seen.get(name, 0)) / 1e6 for name, ns in trace.stage_ns.items()}
            total = (trace.decode_ns - seen_ns) / 1e6
            seen, seen_ns = dict(trace.stage_ns), trace.decode_ns
            repeated = repeated + 1 if shape == previous else 0
            previous = shape
            if done >= policy.length and repeated >= WARM_UP:
                model = sum(ms for name, ms in stages.items() if name in MODEL_STAGES)
                stages |= {"overhead": total - model, "iteration": total}
                rows += [(len(text), policy.streaks, *shape, name, ms) for name, ms in stages.items()]
            done += 1
            progress(_IN_ITERATIONS * done / wanted)
            if done >= wanted or assembly.engine.target.length >= len(text) + SPAN:
                break
    if assembly.shapes.draft_widths:
        reading = _reading_ms(assembly, stream, text)
        rows += [(len(text), policy.streaks, *PLAIN_STEP, "reading", milliseconds) for milliseconds in reading]
    rows += measure_passes(assembly, len(text), lambda part: progress(_IN_ITERATIONS + (1.0 - _IN_ITERATIONS) * part))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _reading_ms(assembly: Assembly, stream: Callable[[], TextStream], text: Sequence[int]) -> list[float]:
    """Return the drafter's milliseconds per token of reading a prompt, for ``READ`` rotations of ``text``.

    It is the time of a request's first head draft beyond the median of the following ones. The text is rotated because
    KV entries of a known text would be reused.
    """
    shapes, found = assembly.shapes, list[float]()
    narrowest = next(width for width in shapes.verify_widths if width > 1)
    policy = FixedPolicy(TreeShape(shapes.draft_widths[0], 1, narrowest))
    for number in range(1, READ + 1):
        first, trace, heads = number * len(text) // (READ + 1), Trace(), list[float]()
        request = assembly.engine.decode([*text[first:], *text[:first]], stream(), policy, trace)
        while len(heads) <= USUAL:
            iterations, before = trace.iterations, trace.stage_ns["head_draft"]
            next(request)
            if trace.iterations > iterations:  # the prompt has been read
                heads.append((trace.stage_ns["head_draft"] - before) / 1e6)
        found.append((heads[0] - float(np.median(heads[1:]))) / len(text))
    return found


def without_drift(frame: pd.DataFrame) -> pd.DataFrame:
    """Scale the milliseconds of each cycle so that its plain steps take their median time of the context.

    A shared machine's speed can change twofold within seconds. All shapes of a cycle see about the same speed, so their
    ratios are reliable even where their milliseconds are not.

    Args:
        frame: samples with the columns ``COLUMNS``.
    """
    parts = []
    for _, part in frame.groupby("context"):
        plain = part[(part["depth"] == 0) & (part["stage"] == "plain")].groupby("cycle")["ms"].median()
        scale = part["cycle"].map(plain.median() / plain)
        parts.append(part.assign(ms=part["ms"] * scale).dropna(subset=["ms"]))
    return pd.concat(parts, ignore_index=True)


def costs_from(frame: pd.DataFrame, shapes: Shapes) -> list[Costs]:
    """Return the step costs of a plan, one entry per measured context length: medians in milliseconds.

    Verification costs never fall as the width grows: a width that is slower than a wider one has the wider one's cost.

    Args:
        frame: samples with the columns ``COLUMNS``.
        shapes: widths to give costs of.
    """
    contexts = sorted(frame["context"].unique().tolist())
    parts = [frame[frame["context"] == context] for context in contexts]
    return [_costs_at(int(context), part, shapes) for context, part in zip(contexts, parts, strict=True)]


def _costs_at(context: int, frame: pd.DataFrame, shapes: Shapes) -> Costs:
    measured, frame = frame, without_drift(frame)
    drafted, plain = trees_of(frame), frame[frame["depth"] == 0]

    def median(part: pd.DataFrame, stage: str) -> float:
        return float(np.median(part.loc[part["stage"] == stage, "ms"]))

    plain_ms = median(plain, "plain")
    envelope = lower_envelope(passes_at(measured, plain_ms))
    by_draft_width = _by_width(drafted[drafted["stage"] == "draft_steps"], "width") if shapes.draft_widths else []
    draft = {w: _draft_line(part) for w, part in by_draft_width}
    steps = {width: step for width, (step, _) in draft.items()}  # if a narrower step costs more, that is noise
    rest = float(np.median([rest for _, rest in draft.values()])) if draft else 0.0
    verify_ms = {width: rounded(envelope[width][0]) for width in shapes.verify_widths}
    reading = frame.loc[frame["stage"] == "reading", "ms"]
    is_kept = frame["verify_width"].isin(shapes.verify_widths)
    model_free = frame[is_kept & (frame["depth"] > 0) & (frame["width"] == 0)]
    return Costs(
        context=context,
        head_ms=rounded(median(drafted, "head_draft")) if draft else 0.0,
        draft_ms={width: rounded(ms) for width, (ms, _) in lower_envelope(steps).items()} if draft else {},
        verify_ms=verify_ms,
        overhead_ms=rounded(median(drafted if len(drafted) else plain, "overhead") + rest),
        plain_ms=rounded(median(plain, "iteration")),
        model_free_overhead_ms=rounded(median(model_free, "overhead")) if draft and len(model_free) else None,
        reading_ms=rounded(max(float(reading.median()), 0.0)) if len(reading) else 0.0,
    )


def _draft_line(frame: pd.DataFrame) -> tuple[float, float]:
    """Return the milliseconds of one growth step, and of the rest of drafting (attaching the leaves)."""
    by_depth = frame.groupby("depth")["ms"].median()
    (shallow, shallow_ms), (deep, deep_ms) = ((int(by_depth.index[i]), float(by_depth.iloc[i])) for i in (0, -1))
    if shallow == deep:
        return deep_ms / max(deep - 1, 1), 0.0
    step = max((deep_ms - shallow_ms) / (deep - shallow), deep_ms / deep / 2)  # a noisy slope stays positive
    return step, max(deep_ms - (deep - 1) * step, 0.0)


def trees_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``frame`` (columns ``COLUMNS``) that verify drafted trees; without any, model-free trees."""
    trees = frame[frame["depth"] > 0]
    drafted = trees[trees["width"] > 0]
    return trees if drafted.empty else drafted


def useful_verify_widths(frame: pd.DataFrame, shapes: Shapes) -> tuple[int, ...]:
    """Return the verify widths to keep in a plan: width 1, and widths that cost at most 5 % more than any wider one.

    Costs are those at the shortest measured context. Which of two widths is cheaper depends on the memory's speed (with
    slow memory six rows cost as much as eight); a kept width then has the wider one's cost in the plan.

    Args:
        frame: samples with the columns ``COLUMNS``.
    """
    measured = passes_at(frame[frame["context"] == frame["context"].min()])
    served = {width: ms for width, (ms, _) in lower_envelope(measured).items()}
    useful = {width for width, ms in served.items() if measured[width] <= _CLEARLY * ms}
    return tuple(width for width in shapes.verify_widths if width == 1 or width in useful)


def _by_width(frame: pd.DataFrame, column: str) -> list[tuple[int, pd.DataFrame]]:
    return [(int(width), frame[frame[column] == width]) for width in sorted(frame[column].unique().tolist())]


def rounded(value: float) -> float:
    """Return ``value`` rounded to four significant digits, as plans store it."""
    return float(f"{float(value):.4g}")
