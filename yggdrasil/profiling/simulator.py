"""Play a policy over recorded traces: exact accepted lengths, measured costs, no model.

Dims: P positions, V verify widths. All times are milliseconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from yggdrasil.profiling.traces import Outcomes, TraceSet
from yggdrasil.tree.objective import Objective, ShapeChooser, TreeShape, worth


class IterationCosts(Protocol):
    """What the simulator needs to know about costs; ``yggdrasil.tree.objective.StepCosts`` is one."""

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The admissible verify widths, ascending."""

    def iteration_ms(self, width: int, depth: int, verify_width: int) -> float:
        """Return the cost of one iteration; depth 0 is a plain target step."""


class Policy(Protocol):
    """Chooses (draft width, depth) at a row of the traces, before anything is drafted."""

    @property
    def verify_width(self) -> int | None:
        """A fixed verify width, or None: chosen by the objective from the scores of the drafted nodes."""

    @property
    def objective(self) -> Objective:
        """What the choice of the verify width maximises."""

    def __call__(self, index: int) -> tuple[int, int]:
        """Return (draft width, depth) for row ``index``; depth 0 is a plain target step."""


@dataclass(frozen=True)
class FixedPolicy:
    """The same tree at every position."""

    width: int
    depth: int
    verify_width: int | None = None
    objective: Objective = "latency"

    def __call__(self, index: int) -> tuple[int, int]:
        """Return the fixed (width, depth)."""
        return self.width, self.depth


@dataclass(frozen=True, eq=False)
class PredictedPolicy:
    """The shape that maximises the objective under predicted survival; with the true lengths it is an oracle."""

    survival: npt.NDArray[np.floating[Any]]  # [P, D] one row for each row of the traces it is played on
    chooser: ShapeChooser

    @property
    def verify_width(self) -> int | None:
        """None: the scores of the drafted nodes say more than the prediction did."""
        return None

    @property
    def objective(self) -> Objective:
        """The objective of its chooser."""
        return self.chooser.objective

    def __call__(self, index: int) -> tuple[int, int]:
        """Return (width, depth) of the chosen shape."""
        shape = self.chooser.choose(self.survival[index])
        return shape.width, shape.depth


Histogram: TypeAlias = dict[int, int]


@dataclass(frozen=True)
class SimulationResult:
    """Totals of one simulation. ``histograms`` counts iterations by width, depth, verify_width and accepted."""

    tokens: int
    iterations: int
    milliseconds: float
    histograms: dict[str, Histogram]

    @property
    def aal(self) -> float:
        """Tokens an iteration, the bonus token included."""
        return self.tokens / self.iterations

    @property
    def ms_per_token(self) -> float:
        """Mean time a generated token."""
        return self.milliseconds / self.tokens


class ShapeTally:
    """Adds iterations up to a ``SimulationResult``."""

    def __init__(self) -> None:
        self._shapes: Counter[TreeShape] = Counter()
        self._accepted: Counter[int] = Counter()
        self._milliseconds = 0.0

    def add(self, shape: TreeShape, accepted: int, milliseconds: float) -> None:
        """One iteration."""
        self._shapes[shape] += 1
        self._accepted[accepted] += 1
        self._milliseconds += milliseconds

    def result(self, tokens: int) -> SimulationResult:
        """The totals of all iterations, which gave ``tokens``."""
        histograms = _shape_histograms(self._shapes) | {"accepted": dict(sorted(self._accepted.items()))}
        return SimulationResult(tokens, self._shapes.total(), self._milliseconds, histograms)


class OutcomeCache:
    """Outcomes of each (width, depth) over one trace set, computed once; share it between simulations."""

    def __init__(self, traces: TraceSet, verify_widths: tuple[int, ...]) -> None:
        self.traces = traces
        self.verify_widths = verify_widths
        self._outcomes: dict[tuple[int, int], Outcomes] = {}

    def get(self, width: int, depth: int) -> Outcomes:
        """Return outcomes [P, V] of the tree of this draft width and depth budget."""
        key = (width, depth)
        if key not in self._outcomes:
            self._outcomes[key] = self.traces.outcomes(width, depth, self.verify_widths)
        return self._outcomes[key]


class _Verifier:
    """Picks the verify width after drafting and says what was accepted; one column of outcomes an iteration."""

    def __init__(self, policy: Policy, costs: IterationCosts, cache: OutcomeCache) -> None:
        self._policy = policy
        self._costs = costs
        self._cache = cache
        self._columns: dict[tuple[int, int], npt.NDArray[np.intp]] = {}
        if policy.verify_width not in (None, *cache.verify_widths):
            raise ValueError(f"no cost for verify width {policy.verify_width}, only for {cache.verify_widths}")

    def verify(self, index: int, width: int, depth: int) -> tuple[int, int]:
        """Return (verify width, accepted length) at row ``index``."""
        if depth == 0:
            return 1, 0
        key = (width, depth)
        if key not in self._columns:
            self._columns[key] = self._choose_columns(width, depth)
        column = self._columns[key][index]
        return self._cache.verify_widths[column], int(self._cache.get(width, depth).accepted[index, column])

    def _choose_columns(self, width: int, depth: int) -> npt.NDArray[np.intp]:
        """Return the chosen column of outcomes at every row, [P]; ties go to the smaller width."""
        verify_widths = self._cache.verify_widths
        if self._policy.verify_width is not None:
            fixed = verify_widths.index(self._policy.verify_width)
            return np.full(self._cache.traces.num_positions, fixed, dtype=np.intp)
        milliseconds = np.array(
            [self._costs.iteration_ms(width, depth, verify_width) for verify_width in verify_widths]
        )
        expected = self._cache.get(width, depth).expected_tokens.astype(np.float64)
        columns: npt.NDArray[np.intp] = worth(expected, milliseconds, self._policy.objective).argmax(axis=1)
        return columns


def simulate(
    traces: TraceSet, policy: Policy, costs: IterationCosts, cache: OutcomeCache | None = None
) -> SimulationResult:
    """Decode every document of ``traces`` as ``policy`` would and add up the costs. Greedy acceptance.

    An iteration yields its accepted tokens and the bonus token and moves on by as many rows. Tokens past the last row
    of a document are not counted, so every policy yields the same tokens. Raises ValueError on empty traces, skipped
    positions, a verify width without a cost, or a ``cache`` made for something else.
    """
    if not traces.num_positions:
        raise ValueError("no positions to simulate")
    cache = cache or OutcomeCache(traces, costs.verify_widths)
    if cache.traces is not traces or cache.verify_widths != costs.verify_widths:
        raise ValueError("the outcome cache belongs to other traces or verify widths")
    verifier = _Verifier(policy, costs, cache)
    tally = ShapeTally()
    for start, stop in traces.document_ranges():
        index = start
        while index < stop:
            width, depth = policy(index)
            verify_width, accepted = verifier.verify(index, width, depth)
            shape = TreeShape(width, depth, verify_width)
            tally.add(shape, accepted, costs.iteration_ms(*shape))
            index += accepted + 1
    return tally.result(traces.num_positions)


def _shape_histograms(shapes: Counter[TreeShape]) -> dict[str, Histogram]:
    histograms: dict[str, Histogram] = {}
    for field_name in TreeShape._fields:
        counts: Counter[int] = Counter()
        for shape, count in shapes.items():
            counts[getattr(shape, field_name)] += count
        histograms[field_name] = dict(sorted(counts.items()))
    return histograms
