"""Measures how deep a drafter's trees are accepted, with the nodes that model-free drafters add to them.

Decoding adds model-free drafts to drafted trees, so tree shapes are compared with these added: another drafted level
gains less if n-gram statistics extend the tree already. Shapes are compared at positions where iterations begin:
repetitive text is decoded in few long steps, so nothing is drafted at most of its positions.

Dims: P positions where iterations begin, W draft widths, D depth levels, V verify widths, S shapes (width by width).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.calibration.replay import (
    RecordedTrees,
    accepted_path,
    begin_text,
    extend_text,
    recorded_documents,
)
from yggdrasil.calibration.statistics.prediction import policy_without_drafter
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.engine.iteration import ShadowTree
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import ModelFree
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.token_tree import TokenTree

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


class Survival(NamedTuple):
    """Survival tables that the policy decides by."""

    mean: Float64Array  # [D] P(accepted length >= d) of the drafter's unpruned tree of the widest draft width
    ratios: dict[int, Float64Array]  # draft width -> [D budget, D level, V], survival of extended trees over ``mean``
    # Accepted tokens that the best shape adds to a model-free tree that expects 1 token (the bonus). To a tree that
    # expects x tokens it adds 1/x of this.
    added_tokens: float


class _Beginning(NamedTuple):
    """A position at which an iteration begins, and the tokens that each shape gives there."""

    row: int  # in the traces
    kept: Int64Array  # [S, V] accepted drafted tokens of extended trees
    expected: float  # expected tokens of the best model-free tree, bonus included
    given: float  # accepted tokens of that tree, bonus included
    free_width: int  # index of that tree's verify width


def survival_of(
    traces: TraceSet, costs: StepCosts, model_free: DrafterGroup | None, prompts: Mapping[int, Sequence[int]]
) -> Survival:
    """Return tables of how deep the drafter's recorded trees are accepted: P(accepted length >= d) by tree shape.

    Args:
        traces: trees recorded on the target's text.
        costs: step costs in milliseconds, by which the positions where iterations begin are simulated.
        model_free: model-free drafters, which extend the trees; None without them.
        prompts: document number -> token ids of its prompt.
    """
    reference, depth, widths = traces.widths[-1], traces.max_depth, traces.widths
    begun = list(_beginnings(traces, costs, model_free, prompts))
    levels = np.arange(1, depth + 1)
    whole = traces.accepted_length(reference)[[each.row for each in begun]]
    mean = (whole[:, None] >= levels).mean(axis=0)
    kept = np.stack([each.kept for each in begun])  # [P, S, V]
    tables = (kept[:, :, None, :] >= levels[:, None]).mean(axis=0).reshape(len(widths), depth, depth, -1)
    ratios = dict(zip(widths, _relative_to(mean, tables), strict=True))
    values = (1.0 + kept.mean(axis=0)) / _milliseconds(traces, costs)
    shape, width = divmod(int(values.argmax()), values.shape[1])
    return Survival(mean, ratios, _added_tokens(begun, shape, width))


def _relative_to(mean: Float64Array, tables: Float64Array) -> Float64Array:
    """Divide survival ``tables`` [W, D budget, D level, V] by ``mean`` [D level]; 0 where the mean is 0."""
    below = mean[:, None]
    relative: Float64Array = np.divide(tables, below, out=np.zeros_like(tables), where=below > 0)
    return relative


def _added_tokens(begun: Sequence[_Beginning], shape: int, width: int) -> float:
    """Fit c so that ``shape`` gives c / x more accepted tokens than a model-free tree that expects x tokens.

    ``shape`` and ``width`` are indices; the shape is verified at ``width`` or wider. c is fitted by least squares, and
    is at least 0.
    """
    expected = np.array([each.expected for each in begun])
    given = np.array([each.given for each in begun])
    kept = np.array([1 + each.kept[shape, max(width, each.free_width)] for each in begun])
    return max(0.0, float(((kept - given) / expected).sum() / (expected**-2).sum()))


def _shapes(traces: TraceSet) -> list[TreeShape]:
    return [TreeShape(width, budget, 1) for width in traces.widths for budget in range(1, traces.max_depth + 1)]


def _milliseconds(traces: TraceSet, costs: StepCosts) -> Float64Array:
    """Return the milliseconds of an iteration with each shape and verify width, [S, V]."""
    drafting_ms = [costs.drafting_ms(shape.width, shape.depth) + costs.overhead_ms for shape in _shapes(traces)]
    verify_ms = [costs.verify_ms[width] for width in costs.verify_widths]
    milliseconds: Float64Array = np.add.outer(drafting_ms, verify_ms)
    return milliseconds


def _beginnings(
    traces: TraceSet, costs: StepCosts, model_free: DrafterGroup | None, prompts: Mapping[int, Sequence[int]]
) -> Iterator[_Beginning]:
    """Yield the positions where iterations begin, if each uses the shape with the most tokens per millisecond so far.

    Positions too close to a document's end for a whole tree are left out, unless all documents are that short.
    """
    trees, depth, row = RecordedTrees(traces, costs, model_free), traces.max_depth, 0
    shapes, milliseconds, widths = _shapes(traces), _milliseconds(traces, costs), costs.verify_widths
    tokens, model_free_trees = np.zeros_like(milliseconds), _ModelFreeTrees(model_free, costs, trees.tree.num_nodes)
    documents = recorded_documents(traces, prompts)
    is_short = all(len(document.answer) <= depth for document in documents)
    for document in documents:
        begin_text(model_free, document)
        index, answer = 0, document.answer
        while index < len(answer):
            truth = answer[index + 1 : index + 1 + depth]
            if len(truth) < depth and not is_short:
                break
            expected = model_free_trees.here(truth)
            kept = np.array([_kept(trees, row + index, shape, truth, widths) for shape in shapes])
            yield _Beginning(row + index, kept, *expected)
            tokens += 1.0 + kept
            following = min(index + 1 + int(kept.flat[int((tokens / milliseconds).argmax())]), len(answer))
            extend_text(model_free, answer[index + 1 : following + 1])
            index = following
        row += len(answer)


class _ModelFreeTrees:
    """Grows trees of the model-free drafters alone, and counts their expected and their accepted tokens."""

    def __init__(self, model_free: DrafterGroup | None, costs: StepCosts, num_nodes: int) -> None:
        self._costs, self._shadow = costs, None
        self._policy = policy_without_drafter(costs)
        self._tree = TokenTree.on_host(num_nodes)
        if model_free is not None:
            self._shadow = ShadowTree(model_free, self._tree, costs.verify_widths, shares_tree=True)

    def here(self, truth: Sequence[int]) -> tuple[float, float, int]:
        """Return (tokens expected of the best model-free tree, tokens that the tree gives, index of its verify width).

        Tokens include the bonus token. The result is (1.0, 1.0, 0) if there is no tree.

        Args:
            truth: tokens of the text after the tree's root.
        """
        if self._shadow is not None:
            depth = self._costs.verify_widths[-1] - 1
            expected = self._shadow.grow(depth)
            best = self._policy.best_model_free(ModelFree(expected, depth))
            if best is not None:
                width = best.shape.verify_width
                given = 1.0 + len(accepted_path(self._tree, self._shadow.order.tolist()[:width], truth))
                return best.tokens, given, self._costs.verify_widths.index(width)
        return 1.0, 1.0, 0


def _kept(trees: RecordedTrees, row: int, shape: TreeShape, truth: Sequence[int], widths: Sequence[int]) -> Int64Array:
    """Return the accepted drafted tokens of an extended tree at each verify width, [V]."""
    trees.grow(row, shape, fills=True)
    rank = np.empty(trees.tree.num_nodes, dtype=np.int64)
    rank[trees.order] = np.arange(len(rank))
    ranks = rank[accepted_path(trees.tree, trees.order, truth)]
    kept: Int64Array = (ranks[:, None] < np.array(widths)).sum(axis=0)
    return kept
