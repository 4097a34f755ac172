"""What decoding with guesses that cost no pass will give: played over text, nothing recorded.

The drafter itself grows its trees again over the target's own text, and the run-time policy decides over them at the
plan's costs.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from torch import Tensor

from yggdrasil.calibration.own_text import ANSWER, Document
from yggdrasil.drafters.protocol import FreeDrafter, recyclers
from yggdrasil.engine.aside import AsideTree
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.policy import FreeTreePolicy, Policy
from yggdrasil.profiling.simulator import ShapeTally, SimulationResult
from yggdrasil.scheduling.plan import Expectation, Shapes
from yggdrasil.tree.objective import StepCosts
from yggdrasil.tree.token_tree import TokenTree

RunnersUp = Callable[[Document], Tensor]  # before each token of the answer, [len(answer), K] int64


def foresee(
    free: FreeDrafter | None,
    documents: Sequence[Document],
    costs: StepCosts,
    shapes: Shapes,
    runners_up: RunnersUp | None = None,
) -> list[Expectation]:
    """What the run-time policy gives on ``documents``, and then what else was considered.

    ``runners_up``: the target's, for those of ``free`` that recycle them.
    """
    plain = Expectation("plain decoding", 1.0, costs.plain_ms, 1.0)
    if free is None:
        return [plain]
    known = None if runners_up is None else cache(lambda i: runners_up(documents[i]))
    policy = ObjectivePolicy({0: costs}, {}, np.empty(0, dtype=np.float32), None)
    found = [_expectation(f"counts of {free.name}", play(free, documents, policy, costs, shapes, known), costs)]
    fixed = [
        _expectation(
            f"fixed verify width {width}", play(free, documents, FreeTreePolicy(width), costs, shapes, known), costs
        )
        for width in costs.verify_widths
        if width > 1
    ]
    return [*found, *sorted(fixed, key=lambda each: each.tpot_ms)[:1], plain]


def play(
    free: FreeDrafter,
    documents: Sequence[Document],
    policy: Policy,
    costs: StepCosts,
    shapes: Shapes,
    runners_up: Callable[[int], Tensor] | None = None,
) -> SimulationResult:
    """Decode every document as the engine would, each a request of its own, at ``costs``; greedy acceptance.

    ``runners_up``: of a document by its number. Those of refused rows are not known here, so recycling has less of them
    than it will when decoding.

    Raises:
        ValueError: no text at all.
    """
    learner = policy.learner
    assert learner is not None, "a policy that does not learn is not asked for free trees"
    tree = TokenTree.on_host(shapes.num_nodes)
    aside = AsideTree(free, tree, costs.verify_widths, is_alone=True)
    tally, tokens = ShapeTally(), sum(len(document.answer) - 1 for document in documents)
    if tokens < 1:
        raise ValueError("no text to play over")
    for number, (prompt, answer) in enumerate(documents):
        text, likely = [*prompt[-1:], *answer[:-1]], None if runners_up is None else runners_up(number)
        learner.begin()
        free.begin(prompt)
        free.extend(answer[:1], {})  # the prefill's
        _recycle(free, text, likely, slice(1))
        place = 1
        while place < len(answer):
            decision, rested = None, True
            if (depth := min(max(ANSWER, len(answer)) - place - 1, costs.verify_widths[-1] - 1)) > 0:
                decision, rested = learner.free(aside.grow(depth), depth, 0), False
            if decision is None:
                decision, rested = policy.rest(0), True
            assert decision is not None, "there is nothing to draft"
            shape = decision.shape
            accepted = _accepted(tree, aside.order.tolist(), shape.verify_width, answer[place:])
            milliseconds = costs.iteration_ms(*shape)
            learner.settle(decision, accepted + 1, milliseconds, rested=rested)
            tally.add(shape, accepted, milliseconds)
            free.extend(answer[place : place + accepted + 1], {})
            _recycle(free, text, likely, slice(place, place + accepted + 1))
            place += accepted + 1
    return tally.result(tokens)


def _recycle(free: FreeDrafter, text: Sequence[int], likely: Tensor | None, rows: slice) -> None:
    """Tell of the rows that were verified and stand."""
    if likely is not None:
        for drafter in recyclers(free):
            drafter.recycle(text[rows], likely[rows])


def _accepted(tree: TokenTree, order: Sequence[int], width: int, truth: Sequence[int]) -> int:
    """Drafted tokens of the best ``width`` nodes that are what came next."""
    tokens, parents, scores = tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist()
    kept = [node for node in order[:width] if node and scores[node] > float("-inf")]
    children = {(parents[node], tokens[node]): node for node in kept}
    node, accepted = 0, 0
    for token in truth:
        following = children.get((node, token))
        if following is None:
            break
        node, accepted = following, accepted + 1
    return accepted


def _expectation(policy: str, result: SimulationResult, costs: StepCosts) -> Expectation:
    per_token = result.ms_per_token
    return Expectation(policy, round(result.aal, 3), round(per_token, 4), round(costs.plain_ms / per_token, 3))
