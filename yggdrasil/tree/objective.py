"""The one objective of every run-time decision, and its fast argmax over tree shapes. Numpy only: no torch import.

    speedup = AAL * T_verifier(1) / (T_drafting + T_verifier(W_v) + T_overhead)

Dims: D depth levels, V verify widths, N candidate shapes. All times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.step_costs import StepCosts

# A tree of low scores keeps more than it promises (one that promises half a token gave twice that): what is left out is
# worth more than it says.
CLEARLY_BETTER = 1.2
UNDERSTATED = 2.0  # times what its score says: what a path may be worth before it is left out
Objective: TypeAlias = Literal["latency", "aal"]
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Number = TypeVar("Number", float, npt.NDArray[np.float64])


def worth(tokens: Number, milliseconds: Number, objective: Objective = "latency") -> Number:
    """What every decision maximises: equation 3 but for its constant, tokens a millisecond; or tokens alone.

    Maximising tokens beyond what the milliseconds would give at the run's own rate, as renewals would have it, is
    worse: a text is easy or hard for a while, so what an iteration gives says best what the next tokens will cost.
    """
    return tokens / milliseconds if objective == "latency" else tokens


class Candidate(NamedTuple):
    """A shape, the tokens expected of it (bonus included), and its objective."""

    shape: TreeShape
    tokens: float
    worth: float


def least_useful(costs: Iterable[StepCosts]) -> float:
    """Probability of a path below which no node is worth its row of a pass, while trees are worth plain steps.

    A row costs the least slope of the passes' times; less than that, since scores may promise too little. A width that
    costs what a wider one does is no pass of its own.
    """
    slopes = [
        (each.verify_ms[wide] - each.verify_ms[narrow]) / (wide - narrow) / each.plain_ms
        for each in costs
        for narrow, wide in pairwise({each.verify_ms[width]: width for width in each.verify_widths}.values())
    ]
    return min(slopes, default=0.0) / UNDERSTATED


def expected_tokens_by_width(sorted_acceptance: FloatArray, verify_widths: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return 1 + the acceptance of the best ``W_v - 1`` nodes for each verify width.

    ``sorted_acceptance`` holds path products (probabilities, not logs) of the drafted nodes, best first, along the
    last axis; leading axes are kept. Widths beyond the tree add nothing.
    """
    num_nodes = sorted_acceptance.shape[-1]
    totals = np.empty((*sorted_acceptance.shape[:-1], num_nodes + 1))
    totals[..., 0] = 1.0
    np.cumsum(sorted_acceptance, axis=-1, out=totals[..., 1:])
    totals[..., 1:] += 1.0
    return totals[..., [min(width - 1, num_nodes) for width in verify_widths]]


def worth_by_width(
    drafting_ms: float, costs: StepCosts, objective: Objective = "latency", planned: int | None = None
) -> list[float]:
    """What a token is worth at each of ``costs.verify_widths`` once ``drafting_ms`` has been spent.

    Latency is improved by less than the ``planned`` width only where that promises to be clearly better.
    """
    paid_ms = drafting_ms + costs.overhead_ms
    favour = CLEARLY_BETTER if objective == "latency" and planned is not None else 1.0
    return [
        worth(1.0, paid_ms + milliseconds, objective) * (favour if width >= (planned or 1) else 1.0)
        for width, milliseconds in sorted(costs.verify_ms.items())
    ]


def choose_verify_width(
    expected_tokens: Sequence[float] | FloatArray,
    drafting_ms: float,
    costs: StepCosts,
    objective: Objective = "latency",
    planned: int | None = None,
) -> int:
    """Return the verify width that maximises the objective once ``drafting_ms`` has been spent.

    ``expected_tokens[v]`` belongs to ``costs.verify_widths[v]`` and counts the bonus token. Ties go to the smaller.
    """
    weights = worth_by_width(drafting_ms, costs, objective, planned)
    return costs.verify_widths[best_of(expected_tokens, weights)]


def best_of(expected_tokens: Sequence[float] | FloatArray, weights: Sequence[float]) -> int:
    """Return where ``expected_tokens``, weighed by what a token is worth there, are most; ties go to the first."""
    best, best_value = 0, -1.0
    for place, (tokens, weight) in enumerate(zip(expected_tokens, weights, strict=True)):
        if (value := float(tokens) * weight) > best_value:
            best, best_value = place, value
    return best


class ShapeChooser:
    """Argmax of the objective over (width, depth, verify width), with everything static computed once.

    ``ratios[width]`` says how the survival of a shape relates to the survival the predictor gives. Either
    [D, V] (level, verify width), the same for each depth budget, or [D, D, V] (budget, level, verify width), which also
    knows that a smaller budget puts fewer nodes on the early levels, and what others add below the last one. Verify
    widths are ``costs.verify_widths``.

        AAL(width, depth, W_v | context) = 1 + sum over levels i of survival[i] * ratio[width][depth][i][W_v]

    ``objective="latency"`` maximises AAL per millisecond, ``"aal"`` AAL alone (the ablation). A plain step is always a
    candidate. Ties go to the plain step, then to the smaller (width, depth, verify width) in that order.
    """

    def __init__(self, costs: StepCosts, ratios: Mapping[int, FloatArray], objective: Objective = "latency") -> None:
        _check_chooser_inputs(costs, ratios, objective)
        self.objective: Objective = objective
        self.max_depth = next(iter(ratios.values())).shape[0]
        self.shapes = [PLAIN_STEP]
        columns = [np.zeros((self.max_depth, 1))]
        for width in sorted(ratios):
            by_budget = _ratios_by_budget(np.asarray(ratios[width], dtype=np.float64))  # [D, D, V]
            for depth in range(1, self.max_depth + 1):
                self.shapes += [TreeShape(width, depth, verify_width) for verify_width in costs.verify_widths]
                columns.append(by_budget[depth - 1])
        self._index = {shape: index for index, shape in enumerate(self.shapes)}
        self._ratios = np.ascontiguousarray(np.concatenate(columns, axis=1))  # [D, N]
        self._levels: dict[TreeShape, list[float]] = {}
        self.use(costs)

    def use(self, costs: StepCosts) -> None:
        """Choose by other costs, of the same widths."""
        self.costs = costs
        iteration_ms = np.array([costs.iteration_ms(*shape) for shape in self.shapes])
        self._weight = worth(np.ones_like(iteration_ms), iteration_ms, self.objective)  # [N], of a token

    def expected_tokens(self, survival: FloatArray) -> npt.NDArray[np.float64]:
        """Return the expected AAL of each of ``self.shapes``, given ``survival`` [D]."""
        # NOTE: a sum over axis 0 adds every column in the same order, so equal shapes tie exactly; BLAS may differ.
        total: npt.NDArray[np.float64] = np.add.reduce(self._ratios * survival[:, None], axis=0)
        total += 1.0
        return total

    def choose(self, survival: FloatArray) -> TreeShape:
        """Return the best shape for ``survival`` [D], where ``survival[d - 1]`` is P(accepted length >= d)."""
        return self.shapes[int((self.expected_tokens(survival) * self._weight).argmax())]

    def best_tree(self, survival: FloatArray) -> Candidate:
        """The best shape for ``survival`` [D] that drafts at all."""
        expected = self.expected_tokens(survival)
        worth = expected * self._weight
        best = 1 + int(worth[1:].argmax())  # the plain step comes first
        return Candidate(self.shapes[best], float(expected[best]), float(worth[best]))

    def candidate(self, shape: TreeShape, survival: FloatArray) -> Candidate:
        """``shape``, one of ``self.shapes``, for ``survival`` [D]."""
        index = self._index[shape]
        tokens = 1.0 + float(self._ratios[:, index] @ survival)
        return Candidate(shape, tokens, tokens * float(self._weight[index]))

    def level_ratios(self, shape: TreeShape) -> list[float]:
        """Survival of each level with ``shape``, one of ``self.shapes``, as a share of the predicted one.

        Levels of which nothing survives are left out: there is one number for each above them.
        """
        if (levels := self._levels.get(shape)) is None:
            levels = self._levels[shape] = np.trim_zeros(self._ratios[:, self._index[shape]], "b").tolist()
        return levels


def _ratios_by_budget(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return [D budget, D level, V] from either table form; without budgets a level beyond one is worth nothing."""
    if table.ndim == 3:
        return table
    depth = table.shape[0]
    reachable = np.tril(np.ones((depth, depth)))[:, :, None]
    return np.where(reachable > 0, table[None], 0.0)


def _check_chooser_inputs(costs: StepCosts, ratios: Mapping[int, FloatArray], objective: Objective) -> None:
    faults: list[str] = []
    if objective not in get_args(Objective):
        faults.append(f"objective must be one of {get_args(Objective)}, got {objective!r}")
    if not ratios:
        faults.append("ratios is empty: give a table for at least one draft width")
    unknown = sorted(set(ratios) - set(costs.draft_ms))
    if unknown:
        faults.append(f"no draft cost for widths {unknown}, only for {list(costs.draft_widths)}")
    num_verify = len(costs.verify_widths)
    depths = {table.shape[0] for table in ratios.values()}
    if len(depths) > 1:
        faults.append(f"ratio tables disagree on the number of levels: {sorted(depths)}")
    for width, table in ratios.items():
        depth = table.shape[0]
        if table.shape not in ((depth, num_verify), (depth, depth, num_verify)) or depth == 0:
            faults.append(f"ratios[{width}] must be [D, {num_verify}] or [D, D, {num_verify}], got {table.shape}")
        elif not (np.isfinite(table).all() and (table >= 0).all()):
            faults.append(f"ratios[{width}] holds negative or non-finite values")
    if faults:
        raise ValueError("; ".join(faults))
