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

from yggdrasil.calibration.replay import RecordedTrees, Told, path_of, recorded_documents
from yggdrasil.drafters.protocol import FreeDrafter
from yggdrasil.profiling.traces import TraceSet, ratios_of
from yggdrasil.tree.objective import StepCosts, TreeShape

_COMPARED = 1500  # positions where every shape is tried, spread over the text

Float64Array = npt.NDArray[np.float64]


class Survival(NamedTuple):
    """What a policy goes by."""

    mean: Float64Array  # [D] of the drafter's own whole tree of the widest draft width
    ratios: dict[int, Float64Array]  # draft width -> [D budget, D level, V], of filled trees relative to ``mean``


def survival_of(
    traces: TraceSet, costs: StepCosts, free: FreeDrafter | None, prompts: Mapping[int, Sequence[int]]
) -> Survival:
    """By ``traces``, in whose trees ``free`` guesses behind the ``prompts`` by document."""
    reference, depth, widths = traces.widths[-1], traces.max_depth, costs.verify_widths
    mean = traces.survival_table(reference, depth * reference + 1)
    kept = {} if free is None else _kept_when_filled(traces, costs, free, prompts)
    if not kept:  # or texts are no longer than trees are deep
        return Survival(mean, traces.ratio_tables(widths, reference))
    levels = np.arange(1, depth + 1)[:, None]
    tables = {width: (lengths[:, :, None, :] >= levels).mean(axis=0) for width, lengths in kept.items()}
    return Survival(mean, ratios_of(tables, mean))


def _kept_when_filled(
    traces: TraceSet, costs: StepCosts, free: FreeDrafter, prompts: Mapping[int, Sequence[int]]
) -> dict[int, npt.NDArray[np.int64]]:
    """Drafted tokens that filled trees keep: draft width -> [P', D budget, V], at some of the positions.

    Only where the text is recorded as far as trees go; nothing where that is nowhere.
    """
    trees, depth = RecordedTrees(traces, costs, free), traces.max_depth
    every, row = max(1, traces.num_positions // _COMPARED), 0
    found: dict[int, list[list[npt.NDArray[np.int64]]]] = {width: [] for width in traces.widths}
    for document in recorded_documents(traces, prompts):
        told = Told(free, document, None)
        for place in range(len(document.answer)):
            truth = document.answer[place + 1 : place + 1 + depth]
            if row % every == 0 and len(truth) == depth:
                for width, rows in found.items():
                    shapes = (TreeShape(width, budget, 1) for budget in range(1, depth + 1))
                    rows.append([_kept(trees, row, shape, truth, costs.verify_widths) for shape in shapes])
            told.extend(place + 1, place + 2)
            row += 1
    return {width: np.array(rows) for width, rows in found.items() if rows}


def _kept(
    trees: RecordedTrees, row: int, shape: TreeShape, truth: Sequence[int], widths: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Drafted tokens that each verify width keeps of a filled tree, [V]."""
    trees.grow(row, shape, fills=True)
    rank = np.empty(trees.tree.num_nodes, dtype=np.int64)
    rank[trees.order] = np.arange(len(rank))
    ranks = rank[path_of(trees.tree, trees.order, truth)]
    kept: npt.NDArray[np.int64] = (ranks[:, None] < np.array(widths)).sum(axis=0)
    return kept
