"""The plan's policy with one decision left out: exactly that one."""

from dataclasses import replace

import made_up
import numpy as np
import pytest
from rivals.policies import plan_ablations
from tiny_pair import SHAPES, TEXT

from yggdrasil.engine.plan_parts import planned_policy
from yggdrasil.policy.objective import Decision
from yggdrasil.scheduling.stages import DEFAULT_ORDER, HEAD_FIRST_ORDER
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

PROMPT, COUNT = TEXT[:20], 40


class Features:
    context = 100

    def hidden(self):
        return np.zeros(1, dtype=np.float32)


def decided(policy):
    """The decision where the cost of a plain step is known."""
    policy.begin()
    for _ in range(2):
        policy.choose(100)
        policy.observe(Decision(PLAIN_STEP), 1, policy._plain_ms)
    return policy.choose(100) or policy.choose(100, features=Features())


@pytest.fixture
def plan():
    """Verification costs its width, so wide trees and all of a tree are not what the plan chooses."""
    return made_up.plan()


def test_nothing_guesses_beside_a_draft_model_alone(plan):
    learned = made_up.learned()
    alone = plan_ablations(plan, learned)["by plan, draft model only"]
    by_plan = planned_policy(plan, learned)
    assert by_plan.wants_model_free
    assert not alone.wants_model_free


def test_a_plan_goes_by_what_drafting_adds(plan):
    beside = Decision(TreeShape(0, 3, 4), 2.0, 1.0)
    given, unknown = (planned_policy(plan, replace(made_up.learned(), added_tokens=lift)) for lift in (0.5, None))

    alone = unknown._drafted.typical(0, None).tokens - 1.0
    assert given._drafted.typical(0, beside).tokens == 2.0 + 0.5 / 2.0
    assert unknown._drafted.typical(0, beside).tokens == 2.0 + alone / 2.0


def test_one_draft_width_is_the_widest(plan):
    learned = made_up.learned()
    alone = plan_ablations(plan, learned)["by plan, one draft width"]

    assert decided(planned_policy(plan, learned)).shape.width < SHAPES.draft_widths[-1]
    assert decided(alone).shape.width == SHAPES.draft_widths[-1]


def test_unpruned_verifies_whatever_was_drafted(plan):
    learned, shape = made_up.learned(), TreeShape(2, 3, 4)
    expected = [1.0] * len(SHAPES.verify_widths)
    unpruned = plan_ablations(plan, learned)["by plan, unpruned"]

    assert planned_policy(plan, learned).prune(Decision(shape), expected, 100).shape.verify_width == 1
    assert unpruned.prune(Decision(shape), expected, 100).shape.verify_width == 8  # the root and six nodes
    assert unpruned.prune(Decision(TreeShape(4, 4, 4)), expected, 100).shape.verify_width == SHAPES.verify_widths[-1]


def test_depth_comes_from_the_other_source_where_it_can(plan):
    learned = made_up.learned()
    reads_head = replace(learned, reads=learned.reads._replace(hidden=0, head=1))
    predicted = replace(plan, depth_from="predictor")

    def depth_source(plan, learned):
        return list(plan_ablations(plan, learned))[3:]

    assert depth_source(replace(plan, depth_from="mean", stages=DEFAULT_ORDER), learned) == ["by plan, predicted depth"]
    assert depth_source(replace(plan, depth_from="mean", stages=DEFAULT_ORDER), reads_head) == []
    assert depth_source(replace(plan, depth_from="mean", stages=HEAD_FIRST_ORDER), reads_head) != []
    assert depth_source(replace(predicted, stages=DEFAULT_ORDER), learned) == ["by plan, mean depth"]


def test_every_ablation_is_lossless(pair, plan):
    learned = made_up.learned()
    for name, policy in plan_ablations(replace(plan, depth_from="mean"), learned).items():
        found = pair.decoder(policy).generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True)
        assert found.tokens == pair.reference(PROMPT, COUNT), name
