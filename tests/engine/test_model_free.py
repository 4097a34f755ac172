"""Model-free drafts without a drafter: which of their nodes are verified, the output, and a shared pool of counts."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_pair import SHAPES, TEXT

from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.engine.iteration import ModelFreeDrafts
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import ModelFreePolicy
from yggdrasil.policy.objective import ModelFree
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.token_tree import TokenTree

WIDTHS = (1, 2, 4, 8)
COSTS = StepCosts(0.01, {1: 0.01}, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}, overhead_ms=0.1, plain_ms=1.0)
TREE_MS = {width: COSTS.verify_ms[width] + COSTS.overhead_ms for width in WIDTHS[1:]}
NO_SURVIVAL = np.empty(0, dtype=np.float32)


def fresh(costs=COSTS, kind=ObjectivePolicy, **changes):
    return kind({50: costs}, {}, NO_SURVIVAL, None, **changes)


def policy(**changes):
    """Past the plain steps that show their price."""
    made = fresh(**changes)
    made.begin()
    for _ in range(2):
        made.observe(made.choose(50), 1, COSTS.plain_ms)
    return made


def chosen(policy, expected, depth=16):
    return policy.choose(50, ModelFree(expected, depth))


def test_beside_a_drafter_its_overhead_is_not_theirs():
    """A tree that does not pay with a drafted one's overhead pays without it, and at a narrower width."""
    dear, expected = replace(COSTS, overhead_ms=1.0), [1.0, 1.5, 1.66, 1.7]

    assert chosen(policy(costs=dear), expected).shape.depth == 0
    decision = chosen(policy(costs=replace(dear, model_free_overhead_ms=0.1)), expected)
    assert decision.shape == TreeShape(0, 16, 2)
    assert (
        decision.milliseconds == TREE_MS[2] == replace(dear, model_free_overhead_ms=0.1).iteration_ms(*decision.shape)
    )
    with pytest.raises(ValueError, match=r"model_free_overhead_ms must not be negative, got -0\.1"):
        replace(COSTS, model_free_overhead_ms=-0.1)


def run(policy, draw, truth, iterations, pace=lambda iteration: 1.0):
    """Tokens and milliseconds of a made-up run: ``draw()`` gives what is expected, ``truth`` what comes of a width."""
    tokens = milliseconds = 0.0
    for iteration in range(iterations):
        expected = draw()
        decision = chosen(policy, expected)
        width = decision.shape.verify_width
        given, spent = (truth(expected, width), TREE_MS[width]) if width > 1 else (1, COSTS.plain_ms)
        spent *= pace(iteration)
        policy.observe(decision, given, spent)
        tokens, milliseconds = tokens + given, milliseconds + spent
    return tokens / milliseconds


def test_a_drafter_that_comes_good_is_found():
    turned = iter(range(4000))

    def truth(expected, width):
        return 1 if next(turned) < 300 else expected[WIDTHS.index(width)]

    tried = policy()
    run(tried, lambda: [1, 2, 3, 5], truth, 1500)
    assert run(tried, lambda: [1, 2, 3, 5], lambda expected, width: expected[WIDTHS.index(width)], 500) > 1.8


def test_decoding_is_exact_and_verifies_what_the_text_says(pair):
    reference = pair.reference(TEXT[:20], 60)
    decoder = pair.decoder(fresh(_costs(SHAPES)), drafter=None, model_free=default_statistics())
    generation = decoder.generate(TEXT[:20], max_new_tokens=60)
    assert generation.tokens == reference
    assert generation.metrics.model_free_trees > 0
    assert generation.metrics.model_free_trees + generation.metrics.plain_steps == generation.metrics.iterations
    assert generation.metrics.aal > 1.0
    plain = decoder.generate(TEXT[:20], max_new_tokens=60, speculation=False)
    assert plain.tokens == reference
    assert plain.metrics.model_free_trees == 0


@pytest.mark.parametrize("speculation", [Speculation(), Speculation(exactness="strict", tolerance=1e6)])
def test_whoever_watches_sees_which_nodes_were_accepted(pair, speculation):
    """Also where width-1 passes decide near ties, which commit a part of the path before acceptance ends."""
    seen = []
    decoder = pair.decoder(ModelFreePolicy(8), drafter=None, model_free=default_statistics())
    generation = decoder.generate(TEXT[:20], max_new_tokens=20, speculation=speculation, watch=seen.append)
    assert {tree.drafter for tree in seen} >= {"text"}
    assert [token for tree in seen for token in (*(tree.tokens[node] for node in tree.accepted[1:]), tree.bonus)][
        :19
    ] == generation.tokens[1:]


class AtExpectedTimes(ObjectivePolicy):
    """A busy machine changes nothing."""

    def observe(self, decision, tokens, milliseconds):
        super().observe(decision, tokens, decision.milliseconds)


def test_a_public_pool_is_exact_and_knows_the_answer_again(pair):
    passes = {}
    for shares in (False, True):
        decoder = pair.decoder(fresh(_costs(SHAPES), AtExpectedTimes), drafter=None, model_free=default_statistics())
        if shares:
            decoder.pool_texts()
        for prompt in (TEXT[:20], TEXT[30:50], TEXT[:20]):
            generation = decoder.generate(prompt, max_new_tokens=60)
            assert generation.tokens == pair.reference(prompt, 60)
        passes[shares] = generation.metrics.iterations
    assert passes[True] < passes[False]


def test_without_counts_there_is_no_pool(pair):
    with pytest.raises(YggdrasilError, match="this decoder counts none"):
        pair.decoder(fresh(), drafter=None).pool_texts()


def _costs(shapes):
    verify = {width: 1.0 + 0.05 * width for width in shapes.verify_widths}
    assert all(a < b for a, b in pairwise(verify.values()))
    return StepCosts(0.01, dict.fromkeys(shapes.draft_widths, 0.01), verify, 0.05, 1.05)


@pytest.mark.parametrize("ranks_nodes", [True, False])
def test_a_tree_that_is_ranked_on_the_device_is_filled_by_nobody(ranks_nodes):
    """Its pass reads the nodes that its own step ranked, before the host could add to them."""
    target = SimpleNamespace(ranks_nodes=ranks_nodes, order=torch.arange(16), host_tree=None, vocab_size=64)
    guesses = ModelFreeDrafts(DrafterGroup([NGramDrafter()]), target, TokenTree.on_host(16), (1, 4), shares_tree=False)

    assert guesses.can_fill != ranks_nodes
