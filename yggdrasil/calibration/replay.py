"""Simulates decoding of recorded text: runs the real policy, its budgets included, with given step costs.

The trees of a draft model or head were recorded at every position of the text. Model-free drafts are made during the
simulation as in decoding: they extend the recorded trees, or form trees alone.

Dims: P positions, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from yggdrasil.calibration.own_text import ANSWER, Document
from yggdrasil.drafters.protocol import Budget, DrafterGroup
from yggdrasil.engine.iteration import ShadowTree
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import Policy
from yggdrasil.policy.objective import Decision, ModelFree
from yggdrasil.predictor.features import Float32Array
from yggdrasil.profiling.tally import ShapeTally, Totals
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree


class RecordedFeatures:
    """The depth predictor's features at one recorded position."""

    def __init__(self, traces: TraceSet, index: int, context: int) -> None:
        self._traces, self.index = traces, index
        self.context = context

    def hidden(self) -> Float32Array:
        """Return the target's recorded hidden state from which the position's token was chosen, [H] float32."""
        row: Float32Array = self._traces.hidden[self.index]
        return row

    def repetition(self) -> Float32Array:
        """Return the R recorded numbers on how far the text repeats earlier parts of itself, [R] float32."""
        row: Float32Array = self._traces.repetition[self.index]
        return row

    def head(self) -> Float32Array:
        """Return the drafter's recorded log-probabilities of its likeliest next tokens, [K] float32."""
        row: Float32Array = self._traces.head[self.index]
        return row


class RecordedTrees:
    """Rebuilds the trees of ``traces``, one at a time, and extends them by ``model_free`` drafters."""

    def __init__(self, traces: TraceSet, costs: StepCosts, model_free: DrafterGroup | None) -> None:
        self.traces = traces
        self._free, self._last = model_free, np.array(costs.verify_widths) - 1
        nodes = max(1 + traces.max_depth * traces.widths[-1], costs.verify_widths[-1])
        offered = traces.offered_token.get(traces.widths[-1])
        self.tree = TokenTree.on_host(nodes, 1 if offered is None else offered.shape[2])
        self._ranking = torch.empty_like(self.tree.parents), torch.empty_like(self.tree.scores)

    def grow(self, index: int, shape: TreeShape, *, fills: bool) -> list[float]:
        """Rebuild the tree that was drafted at one position, and return its expected tokens at each verify width.

        The verify widths are those of the costs, ascending. The expected tokens include the bonus token. The tree stays
        in ``tree`` until the next call.

        Args:
            index: row of the traces.
            shape: draft width and depth of the tree.
            fills: whether model-free drafts extend the tree.
        """
        traces, tree, width = self.traces, self.tree, shape.width
        size = width * shape.depth
        for buffer, values in (
            (tree.tokens, traces.token), (tree.depths, traces.depth), (tree.scores, traces.scores),
            (tree.edges, traces.edge_log_probability),
        ):  # fmt: skip
            buffer[1 : 1 + size] = torch.from_numpy(values[width][index, :size])
        tree.parents[1 : 1 + size] = torch.from_numpy(traces.parent[width][index, :size]) + 1
        tree.tokens[0], tree.scores[0] = int(traces.root[index]), 0.0
        tree.scores[1 + size :] = NO_SCORE
        self._offer(index, shape)
        if fills and self._free is not None:
            self._free.propose(tree, Budget(tree.num_nodes, is_first=False))
        torch.ops.yggdrasil.rank_nodes.default(tree.scores, *self._ranking)
        expected: list[float] = self._ranking[1][torch.from_numpy(self._last)].tolist()
        return expected

    def _offer(self, index: int, shape: TreeShape) -> None:
        """Fill the candidate pool with the drafter's candidates below the nodes that it has read, if not attached."""
        traces, tree, width = self.traces, self.tree, shape.width
        tree.pool_scores.fill_(NO_SCORE)
        if width not in traces.offered_token:
            return
        read, size = 1 + width * (shape.depth - 1), width * shape.depth
        scores = tree.pool_scores.view(tree.num_nodes, tree.candidates)[:read]
        tokens = tree.pool_tokens.view(tree.num_nodes, tree.candidates)[:read]
        tokens.copy_(torch.from_numpy(traces.offered_token[width][index, :read]))
        scores.copy_(tree.scores[:read, None] + torch.from_numpy(traces.offered_fall[width][index, :read]))
        parents = traces.parent[width][index] + 1
        for node in size + np.flatnonzero(parents[size:] < read):  # attached later: still a candidate
            empty = np.flatnonzero(~np.isfinite(scores[parents[node]].numpy()))
            if len(empty) and np.isfinite(traces.scores[width][index, node]):
                tokens[parents[node], empty[0]] = int(traces.token[width][index, node])
                scores[parents[node], empty[0]] = float(traces.scores[width][index, node])

    @property
    def order(self) -> list[int]:
        """Indices of the nodes of the tree that ``grow`` made last, by descending score, the root first."""
        best: list[int] = self._ranking[0].tolist()
        return best


class _Step(NamedTuple):
    decision: Decision
    accepted: int  # drafted tokens


class _Simulation:
    """Simulates decoding with one policy, one iteration per call of ``step``."""

    def __init__(
        self,
        policy: Policy,
        costs: StepCosts,
        trees: RecordedTrees | None,
        model_free: DrafterGroup | None,
        context: int,
    ) -> None:
        self._policy, self._costs, self._trees, self._context = policy, costs, trees, context
        self._wants_model_free = model_free is not None and policy.wants_model_free
        self._alone = TokenTree.on_host(costs.verify_widths[-1] if trees is None else trees.tree.num_nodes)
        self._shadow = (
            None if model_free is None else ShadowTree(model_free, self._alone, costs.verify_widths, shares_tree=True)
        )

    def step(self, index: int, truth: Sequence[int], remaining: int) -> _Step:
        """Simulate one iteration: return the policy's decision and the number of accepted drafted tokens.

        Args:
            index: row of the traces, the position of the tree's root.
            truth: tokens of the text after the root.
            remaining: tokens that may still be generated.
        """
        model_free, depth = None, min(remaining, self._costs.verify_widths[-1]) - 1
        if self._shadow is not None and self._wants_model_free and depth > 0:
            model_free = ModelFree(self._shadow.grow(depth), depth)
        decision = self._policy.choose(self._context, model_free)
        if decision is None:
            assert self._trees is not None, "there is nothing to draft"
            features = RecordedFeatures(self._trees.traces, index, self._context)
            decision = self._policy.choose(self._context, features=features)
            assert decision is not None
        if decision.kind == "model_free":
            assert self._shadow is not None
            nodes = self._shadow.order.tolist()[: decision.shape.verify_width]
            return _Step(decision, len(accepted_path(self._alone, nodes, truth)))
        return self._drafted(decision, index, truth) if decision.shape.depth else _Step(decision, 0)

    def _drafted(self, decision: Decision, index: int, truth: Sequence[int]) -> _Step:
        assert self._trees is not None, "there is nothing to draft"
        expected = self._trees.grow(index, decision.shape, fills=self._wants_model_free)
        decision = self._policy.prune(decision, expected, self._context)
        nodes = self._trees.order[: decision.shape.verify_width]
        return _Step(decision, len(accepted_path(self._trees.tree, nodes, truth)))


def replay(
    documents: Sequence[Document],
    policy: Policy,
    costs: StepCosts,
    *,
    trees: RecordedTrees | None = None,
    model_free: DrafterGroup | None = None,
    context: int = 0,
    is_head_first: bool = False,
) -> Totals:
    """Simulate greedy decoding of every document with ``policy``, one request each, and return the totals.

    All costs of decoding are counted: a head draft before a plain step, trees verified with width 1, and the drafter's
    reading.

    Args:
        documents: prompts and the target's answers.
        costs: step costs in milliseconds, which give the time of each iteration.
        trees: the drafter's trees at the tokens of the answers, in the order of ``documents``; None without a drafter.
        model_free: model-free drafters; None without them.
        context: context length at which ``costs`` were measured.
        is_head_first: whether the head draft runs before the depth is chosen, and so before plain steps too.

    Raises:
        ValueError: the documents have no text to decode.
    """
    simulation, tally = _Simulation(policy, costs, trees, model_free, context), ShapeTally()
    tokens, first = sum(len(document.answer) for document in documents) - len(documents), 0
    if tokens < 1:
        raise ValueError("no text to play over")
    for document in documents:
        answer = document.answer
        begin_text(model_free, document)
        tally.begin()
        policy.begin()
        unread = len(document.prompt)  # tokens that the drafter has not read
        index = 1  # of the next token; the prefill gives the first
        while index < len(answer):
            step = simulation.step(first + index - 1, answer[index:], max(ANSWER, len(answer)) - index)
            shape = step.decision.shape
            spends_head = is_head_first and step.decision.is_drafting and not shape.depth
            milliseconds = costs.iteration_ms(*shape)
            milliseconds += costs.head_ms if spends_head else 0.0
            if spends_head or (shape.depth and not shape.is_model_free):
                milliseconds += costs.reading_ms * unread
                unread = 0
            else:
                unread += step.accepted + 1
            policy.observe(step.decision, step.accepted + 1, milliseconds)
            tally.add(shape, milliseconds)
            committed = answer[index : index + step.accepted + 1]
            extend_text(model_free, committed)
            index += len(committed)
        first += len(answer)
    return tally.result(tokens)


def begin_text(model_free: DrafterGroup | None, document: Document) -> None:
    """Begin a request with the document's prompt in the model-free drafters, and add the answer's first token.

    The prefill of the prompt gives the first token. Nothing happens if ``model_free`` is None.
    """
    if model_free is not None:
        model_free.begin(document.prompt)
        extend_text(model_free, document.answer[:1])


def extend_text(model_free: DrafterGroup | None, tokens: Sequence[int]) -> None:
    """Append committed ``tokens`` to the text of the model-free drafters; nothing happens if ``model_free`` is None."""
    if model_free is not None and tokens:
        model_free.extend(tokens, {})


def recorded_documents(traces: TraceSet, prompts: Mapping[int, Sequence[int]]) -> list[Document]:
    """Return prompts and answers of the documents that ``traces`` were recorded on, in the order of the traces.

    An answer has the recorded positions only: its last ``max_depth`` tokens are missing.

    Args:
        prompts: document number -> token ids; a missing prompt is empty.
    """
    return [
        Document(list(prompts.get(int(traces.document[start]), [])), traces.root[start:stop].tolist())
        for start, stop in traces.document_ranges()
    ]


def accepted_path(tree: TokenTree, nodes: Sequence[int], truth: Sequence[int]) -> list[int]:
    """Return the nodes that the target accepts, in order of depth, without the root; empty if it accepts none.

    Args:
        nodes: indices of verified nodes in ``tree``.
        truth: tokens of the text after the tree's root.
    """
    tokens, parents, scores = tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist()
    children = {(parents[node], tokens[node]): node for node in nodes if node and scores[node] > NO_SCORE}
    path: list[int] = []
    for token in truth:
        following = children.get((path[-1] if path else 0, token))
        if following is None:
            break
        path.append(following)
    return path
