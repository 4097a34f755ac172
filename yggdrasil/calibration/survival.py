"""How deep a drafter's trees are accepted, together with what guesses without a pass add to them.

Decoding verifies those trees filled, so shapes are compared filled: where counts go on with a tree, another level of
the drafter's own is worth less than it would be without them.

Dims: P positions, D depth levels, V verify widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.calibration.replay import RecordedTrees, Told, recorded_documents
from yggdrasil.drafters.protocol import FreeDrafter
from yggdrasil.profiling.traces import TraceSet, ratios_of
from yggdrasil.tree.objective import StepCosts, TreeShape
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree

_COMPARED = 1500  # positions where every shape is tried, spread over the text

Float64Array = npt.NDArray[np.float64]


class Survival(NamedTuple):
    """What a policy and its predictor go by."""

    lengths: npt.NDArray[np.int64]  # [P] accepted of the whole tree of the widest draft width, at every position
    mean: Float64Array  # [D] of that tree
    ratios: dict[int, Float64Array]  # draft width -> [D budget, D level, V], relative to ``mean``


def survival_of(
    traces: TraceSet,
    known: Sequence[int],
    costs: StepCosts,
    free: FreeDrafter | None,
    prompts: Mapping[int, Sequence[int]],
) -> Survival:
    """Lengths at all positions of ``traces``, the rest from the documents ``known`` alone.

    ``free`` guesses behind the ``prompts`` by document.
    """
    reference, depth, widths = traces.widths[-1], traces.max_depth, costs.verify_widths
    lengths = traces.accepted_length(reference, depth, depth * reference + 1)
    if free is None:
        return _unfilled(traces.select(known), lengths, widths)
    rows = np.flatnonzero(np.isin(traces.document, known))
    compared = set(rows[:: max(1, len(rows) // _COMPARED)].tolist())
    filled = _Filled(traces, free, costs)
    found = filled.play(prompts, compared)
    lengths = np.maximum(lengths, filled.lengths)  # the end of a text is not recorded
    if not found[reference][0]:  # texts are no longer than trees are deep
        return _unfilled(traces.select(known), lengths, widths)
    levels = np.arange(1, depth + 1)
    tables = {
        width: np.stack([(np.stack(kept)[:, None, :] >= levels[:, None]).mean(axis=0) for kept in budgets])
        for width, budgets in found.items()
    }
    mean = (lengths[rows][:, None] >= levels).mean(axis=0)
    return Survival(lengths, mean, ratios_of(tables, mean))


def _unfilled(seen: TraceSet, lengths: npt.NDArray[np.int64], widths: Sequence[int]) -> Survival:
    """By the drafter's own trees alone."""
    reference = seen.widths[-1]
    mean = seen.survival_table(reference, seen.max_depth * reference + 1)
    return Survival(lengths, mean, seen.ratio_tables(widths, reference))


class _Filled:
    """Trees of every shape at the positions of recorded text, with what ``free`` adds to them there."""

    def __init__(self, traces: TraceSet, free: FreeDrafter, costs: StepCosts) -> None:
        self._traces, self._free = traces, free
        self._trees = RecordedTrees(traces, costs, free)
        self._last = np.array(costs.verify_widths)
        self.lengths = np.zeros(traces.num_positions, dtype=np.int64)

    def play(
        self, prompts: Mapping[int, Sequence[int]], compared: set[int]
    ) -> dict[int, list[list[npt.NDArray[np.int64]]]]:
        """Accepted lengths [V] by draft width and depth at ``compared`` positions; fills ``lengths`` at all."""
        traces, depth = self._traces, self._traces.max_depth
        found: dict[int, list[list[npt.NDArray[np.int64]]]] = {
            width: [[] for _ in range(depth)] for width in traces.widths
        }
        whole, row = TreeShape(traces.widths[-1], depth, 1), 0
        for document in recorded_documents(traces, prompts):
            told = Told(self._free, document, None)
            for place in range(len(document.answer)):
                truth = document.answer[place + 1 : place + 1 + depth]
                self.lengths[row] = self._kept(row, whole, truth)[-1]
                if row in compared and len(truth) == depth:
                    for width, budgets in found.items():
                        for budget, kept in enumerate(budgets, start=1):
                            kept.append(self._kept(row, TreeShape(width, budget, 1), truth))
                told.extend(place + 1, place + 2)
                row += 1
        return found

    def _kept(self, row: int, shape: TreeShape, truth: Sequence[int]) -> npt.NDArray[np.int64]:
        """Drafted tokens of the filled tree that each verify width keeps, [V]."""
        self._trees.grow(row, shape, fills=True)
        rank = np.empty(self._trees.tree.num_nodes, dtype=np.int64)
        rank[self._trees.order] = np.arange(len(rank))
        ranks = [rank[node] for node in path_of(self._trees.tree, truth)]
        kept: npt.NDArray[np.int64] = (np.array(ranks, dtype=np.int64)[:, None] < self._last).sum(axis=0)
        return kept


def path_of(tree: TokenTree, truth: Sequence[int]) -> list[int]:
    """The nodes below the root that say what came next."""
    tokens, parents, scores = tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist()
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens)) if scores[node] > NO_SCORE}
    path: list[int] = []
    for token in truth:
        following = children.get((path[-1] if path else 0, token))
        if following is None:
            break
        path.append(following)
    return path
