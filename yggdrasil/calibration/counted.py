"""What a calibration learns for drafters that count: the table and the belief, and what decoding with them will give.

Counting costs no pass, so nothing has to be recorded of trees: the drafter itself grows them again over the target's
own text, and the run-time policy decides over them at the plan's costs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from yggdrasil.calibration.own_text import ANSWER, Document
from yggdrasil.drafters.belief import Belief
from yggdrasil.drafters.counts import BELIEF_FILE, TABLE_FILE, CountsDrafter
from yggdrasil.drafters.options import CountsOptions
from yggdrasil.drafters.table import Table
from yggdrasil.engine.aside import AsideTree
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.scheduling.plan import Expectation, Shapes
from yggdrasil.tree.objective import StepCosts, least_useful
from yggdrasil.tree.token_tree import TokenTree

_HELD_OUT_EVERY, _BELIEF_EVERY = 10, 5  # documents for the prediction, and for the belief; the others fill the table
_MOST_CANDIDATES = 400_000  # that a belief is fitted to
_LEAST_TOKENS = 2_000  # of answers, for a belief of one's own


class Counted(NamedTuple):
    """A belief, a table of all documents, and the simulated outcome on documents that neither has seen.

    Without documents there is no table and no outcome.
    """

    belief: Belief
    table: Table | None
    expected: Expectation | None

    def options(self) -> CountsOptions:
        """What a plan says of it."""
        return CountsOptions(table=self.table is not None)

    def save(self, folder: Path) -> None:
        """Write what ``CountsDrafter.load`` reads."""
        self.belief.save(folder / BELIEF_FILE)
        if self.table is not None:
            self.table.save(folder / TABLE_FILE)


def learn_counts(documents: Sequence[Document], costs: StepCosts, shapes: Shapes, *, with_table: bool) -> Counted:
    """Fit on some documents, predict on others; the table that is kept counts all of them."""
    if not documents:
        return Counted(Belief.usual(with_table=False), None, None)
    held_out = documents[::_HELD_OUT_EVERY]
    rest = [document for i, document in enumerate(documents) if i % _HELD_OUT_EVERY]
    belief = fit_belief(rest, with_table=with_table)
    drafter = CountsDrafter(belief, Table.of(rest) if with_table else None)
    drafter.leave_out_below(least_useful([costs]))
    expected = play(drafter, held_out, costs, shapes)
    return Counted(belief, Table.of(documents) if with_table else None, expected)


def fit_belief(documents: Sequence[Document], *, with_table: bool) -> Belief:
    """From documents that the table does not know: it is counted without them here.

    The usual one where they are too few, or nothing in them ever came again.
    """
    if sum(len(document.answer) for document in documents) < _LEAST_TOKENS:
        return Belief.usual(with_table=with_table)
    asked = documents[::_BELIEF_EVERY]
    known = [document for i, document in enumerate(documents) if i % _BELIEF_EVERY]
    drafter = CountsDrafter(Belief.none(), Table.of(known) if with_table else None)
    kinds: list[np.ndarray] = []
    right: list[np.ndarray] = []
    for document in asked:
        drafter.begin(document.prompt)
        tree = TokenTree.allocate(1, 1, torch.device("cpu"))
        for token in document.answer:
            drafter.head(tree)
            rows = drafter.evidence(()).numpy()
            kinds.append(np.concatenate([rows[:, 1:], np.arange(len(rows))[:, None]], axis=1))
            right.append(rows[:, 0] == token)
            drafter.extend([token], {})
        if sum(map(len, right)) > _MOST_CANDIDATES:
            break
    is_right = np.concatenate(right)
    if is_right.all() or not is_right.any():
        return Belief.usual(with_table=with_table)
    return Belief.fit(np.concatenate(kinds), is_right)


def play(drafter: CountsDrafter, documents: Sequence[Document], costs: StepCosts, shapes: Shapes) -> Expectation:
    """Decode every document as the engine would, each a request of its own, at ``costs``; greedy acceptance."""
    policy = ObjectivePolicy({0: costs}, {}, np.empty(0, dtype=np.float32), None)
    tree = TokenTree.on_host(shapes.num_nodes)
    aside = AsideTree(drafter, tree, costs.verify_widths, is_alone=True)
    tokens, iterations, spent = 0, 0, 0.0
    for document in documents:
        policy.begin()
        drafter.begin(document.prompt)
        place = 0
        while place < (end := len(document.answer)):
            depth = min(max(ANSWER, end) - place - 1, costs.verify_widths[-1] - 1)
            decision = None
            if depth > 0 and (expected := aside.grow(depth))[-1] > 1.0:
                decision = policy.free(expected, depth, 0)
            resting = policy.rest(0) if decision is None else None
            decision = decision or resting
            assert decision is not None
            width = decision.shape.verify_width
            accepted = _accepted(tree, width, document.answer[place:])
            made = min(accepted + 1, end - place)
            milliseconds = costs.iteration_ms(*decision.shape)
            policy.settle(decision, made, milliseconds, rested=resting is not None)
            drafter.extend(document.answer[place : place + made], {})
            tokens, iterations, spent, place = tokens + made, iterations + 1, spent + milliseconds, place + made
    per_token = spent / max(tokens, 1)
    return Expectation(
        f"counts of {drafter.name}", round(tokens / max(iterations, 1), 3), round(per_token, 4),
        round(costs.plain_ms / per_token, 3) if per_token else 1.0,
    )  # fmt: skip


def _accepted(tree: TokenTree, width: int, truth: Sequence[int]) -> int:
    """Drafted tokens of the best ``width`` nodes that are what came next."""
    size = min(width, tree.size)
    tokens, parents = tree.tokens[:size].tolist(), tree.parents[:size].tolist()
    children = {(parents[node], tokens[node]): node for node in range(1, size)}
    node, accepted = 0, 0
    for token in truth:
        following = children.get((node, token))
        if following is None:
            break
        node, accepted = following, accepted + 1
    return accepted
