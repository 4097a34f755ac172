"""Where a grammar leaves one continuation, that is verified; nothing of it reaches what learns about the drafter."""

import json

import pytest
from tiny_pair import TEXT

from yggdrasil.acceptance.sampling import Constraint, SamplingParams
from yggdrasil.engine.forced_policy import ForcedPolicy
from yggdrasil.engine.policy import PLAIN_POLICY, Decision, FixedPolicy
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.tree.objective import PLAIN_STEP, TreeShape

WIDTHS, DEEPEST = (1, 2, 4, 8), 5


class Noting:
    """A policy that wants one shape and notes what it is told."""

    def __init__(self):
        self.learner, self.told, self.promises = self, [], KeptPromises()
        self._fixed = FixedPolicy(TreeShape(2, 3, 8))
        self.rest, self.choose, self.prune = self._fixed.rest, self._fixed.choose, self._fixed.prune

    def begin(self):
        self.told.append("begin")

    def settle(self, decision, tokens, milliseconds, *, rested):
        self.told.append((decision.shape, tokens, milliseconds, rested))


@pytest.mark.parametrize(("forced", "depth", "width"), [(1, 1, 2), (3, 3, 4), (4, 4, 8), (9, 5, 8)])
def test_forced_tokens_are_a_chain_in_the_narrowest_pass(forced, depth, width):
    inner = Noting()
    policy = ForcedPolicy(inner, lambda: forced, WIDTHS, DEEPEST)

    assert policy.rest(10) is None
    decision = policy.choose(None)
    assert decision.shape == TreeShape(1, depth, width)
    assert policy.prune(decision.shape._replace(verify_width=1), [1.0] * 4, 10).shape == decision.shape
    policy.learner.settle(decision, 4, 1.0, rested=False)
    assert inner.told == []


def test_free_text_is_the_policys_own():
    inner = Noting()
    policy = ForcedPolicy(inner, lambda: 0, WIDTHS, DEEPEST)
    shape = TreeShape(2, 3, 8)
    policy.learner.begin()

    assert policy.rest(10) is None
    assert policy.choose(None).shape == policy.prune(shape, [1.0] * 4, 10).shape == shape
    policy.learner.settle(Decision(shape), 3, 2.0, rested=False)
    assert inner.told == ["begin", (shape, 3, 2.0, False)]
    assert ForcedPolicy(PLAIN_POLICY, lambda: 0, WIDTHS, DEEPEST).rest(10).shape == PLAIN_STEP


def test_what_a_grammar_forces_costs_few_passes(pair):
    """Even where the policy would never draft."""
    pytest.importorskip("llguidance")
    decoder = pair.decoder(PLAIN_POLICY, eos=[0])
    sampling = SamplingParams(constraint=Constraint("regex", "[ab]{2} and then and then (on|it)"))
    plain, guided = (
        decoder.generate(TEXT[:20], max_new_tokens=60, sampling=sampling, speculation=way) for way in (False, True)
    )

    assert guided.tokens == plain.tokens
    assert guided.finish_reason == "eos"
    assert guided.metrics.aal > 2
    assert json.dumps(guided.metrics.as_dict())
