"""How much of a tree that costs nothing is verified."""

from itertools import pairwise

import numpy as np
import pytest
from tiny_pair import SHAPES, TEXT, OracleDrafter

from yggdrasil.drafters.belief import Belief
from yggdrasil.drafters.counts import CountsDrafter
from yggdrasil.engine.free_policy import FreePolicy
from yggdrasil.tree.objective import StepCosts, TreeShape

WIDTHS = (1, 2, 4, 8)
COSTS = StepCosts(0.01, {1: 0.01}, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}, overhead_ms=0.1, plain_ms=1.0)
SHAPE = TreeShape(1, 4, 8)
TREE_MS = {width: COSTS.verify_ms[width] + COSTS.overhead_ms for width in WIDTHS[1:]}


def policy(**changes):
    return FreePolicy({50: COSTS}, 4, **changes)


def chosen(policy, expected):
    resting = policy.rest(50)
    return policy.prune(SHAPE, expected, 50) if resting is None else resting


def test_a_tree_that_promises_nothing_is_a_plain_step():
    decision = chosen(policy(), [1.0, 1.0, 1.0, 1.0])
    assert decision.shape.verify_width == 1
    assert decision.shape.depth == 0
    assert decision.milliseconds == COSTS.plain_ms


@pytest.mark.parametrize(
    ("expected", "width"), [([1, 1.5, 1.6, 1.7], 2), ([1, 1.5, 2.4, 2.5], 4), ([1, 1.9, 2.9, 5], 8)]
)
def test_at_first_a_width_is_worth_its_time_at_the_plain_rate(expected, width):
    values = {w: tokens - TREE_MS.get(w, 1.0) for w, tokens in zip(WIDTHS, expected, strict=True)}
    assert max(values, key=values.get) == width  # the test's own account
    assert chosen(policy(), expected).shape.verify_width == width


def test_accepted_length_alone_takes_the_widest():
    assert chosen(policy(objective="aal"), [1.0, 1.1, 1.11, 1.12]).shape.verify_width == 8


def run(policy, draw, truth, iterations, pace=lambda iteration: 1.0, *, learns=True):
    """Tokens and milliseconds of a made-up run: ``draw()`` gives what is expected, ``truth`` what comes of a width.

    ``learns``: promises are held against what came of them.
    """
    tokens = milliseconds = 0.0
    for iteration in range(iterations):
        expected = draw()
        resting = policy.rest(50)
        decision = resting or policy.prune(SHAPE, policy.promises.honest(expected), 50)
        width = decision.shape.verify_width
        given, spent = (truth(expected, width), TREE_MS[width]) if width > 1 else (1, COSTS.plain_ms)
        if width > 1 and learns:
            policy.promises.observe(expected[WIDTHS.index(width)] - 1, given - 1)
        spent *= pace(iteration)
        policy.settle(decision, given, spent, rested=resting is not None)
        tokens, milliseconds = tokens + given, milliseconds + spent
    return tokens / milliseconds


def test_the_runs_own_rate_beats_the_best_ratio_of_each_iteration():
    """Good places pay for more nodes than bad ones: what is taken must be worth the run's rate, everywhere."""
    generator = np.random.default_rng(0)

    def draw():
        return [1.0, 1.9, 2.9, 3.9] if generator.random() < 0.5 else [1.0, 1.05, 1.1, 1.12]

    def truth(expected, width):
        whole, part = divmod(expected[WIDTHS.index(width)], 1)
        return int(whole) + (generator.random() < part)

    ours = run(policy(), draw, truth, 4000)
    plain_where_bad = {width: (2.9 if width == 4 else 3.9 if width == 8 else 1.9) for width in WIDTHS[1:]}
    best = max((plain_where_bad[w] + 1) / (TREE_MS[w] + COSTS.plain_ms) for w in WIDTHS[1:])
    assert ours > 0.98 * best


@pytest.mark.parametrize("pace", [lambda _: 1.0, lambda i: 2.0 if i % 400 < 200 else 1.0], ids=["steady", "changing"])
def test_a_drafter_that_promises_what_it_never_keeps_costs_little(pace):
    rate = run(policy(), lambda: [1.0, 1.9, 2.9, 4.5], lambda expected, width: 1, 1500, pace)
    plain = 1500 / sum(COSTS.plain_ms * pace(i) for i in range(1500))
    assert rate > 0.98 * plain


def test_where_nothing_is_learned_of_promises_the_account_bounds_the_loss():
    rate = run(policy(), lambda: [1.0, 1.9, 2.9, 4.5], lambda expected, width: 1, 3000, learns=False)
    assert rate > 0.95 / COSTS.plain_ms


def test_trees_are_priced_at_the_pace_they_show():
    slow = policy()
    for _ in range(60):  # they pay all the same, so that the account stays open
        decision = chosen(slow, [1, 2, 3, 9])
        assert decision.shape.verify_width == 8
        slow.settle(decision, 9, 3 * TREE_MS[8], rested=False)
    assert chosen(slow, [1, 2, 3, 9]).milliseconds == pytest.approx(3 * TREE_MS[8], rel=0.02)


def test_a_drafter_that_comes_good_is_found():
    turned = iter(range(4000))

    def truth(expected, width):
        return 1 if next(turned) < 300 else expected[WIDTHS.index(width)]

    tried = policy()
    run(tried, lambda: [1, 2, 3, 5], truth, 1500)
    assert run(tried, lambda: [1, 2, 3, 5], lambda expected, width: expected[WIDTHS.index(width)], 500) > 1.8


def test_decoding_is_exact_and_verifies_what_the_text_says(pair):
    reference = pair.reference(TEXT[:20], 60)
    drafters = (OracleDrafter([*TEXT[:20], *reference]), CountsDrafter(Belief.usual(with_table=False)))
    for drafter in drafters:
        decoder = pair.decoder(FreePolicy({50: _costs(SHAPES)}, SHAPES.max_depth), drafter=drafter)
        generation = decoder.generate(TEXT[:20], max_new_tokens=60)
        assert generation.tokens == reference
        assert generation.metrics.free_trees == 0
        assert generation.metrics.aal > 1.0
        plain = decoder.generate(TEXT[:20], max_new_tokens=60, speculation=False)
        assert plain.tokens == reference


def _costs(shapes):
    verify = {width: 1.0 + 0.05 * width for width in shapes.verify_widths}
    assert all(a < b for a, b in pairwise(verify.values()))
    return StepCosts(0.01, dict.fromkeys(shapes.draft_widths, 0.01), verify, 0.05, 1.05)
