"""Orders of stages against the pairs that must not be swapped."""

from itertools import permutations

import pytest

from yggdrasil.scheduling.stages import DEFAULT_ORDER, STAGES, check_order

# What each stage hands to another one, as the engine does it.
MUST_PRECEDE = [
    ("depth_prediction", "draft_steps"),  # the shape: whether to draft at all
    ("depth_prediction", "draft_steps"),  # the shape: how deep and how wide
    ("head_draft", "draft_steps"),  # the root
    ("draft_steps", "prune"),  # the tree
    ("prune", "verify"),  # which nodes, and how many
    ("verify", "accept"),  # the target's choices
    ("accept", "commit"),  # which rows stay
    ("commit", "bookkeeping"),  # nothing is emitted before it is in the caches
]


def is_accepted(names):
    try:
        check_order(names)
    except ValueError:
        return False
    return True


def test_accepted_orders_are_those_without_a_swapped_pair():
    for names in permutations(STAGES):
        places = {name: place for place, name in enumerate(names)}
        expected = all(places[first] < places[second] for first, second in MUST_PRECEDE)

        assert is_accepted(names) == expected, names


def test_the_default_order_is_accepted():
    check_order(DEFAULT_ORDER)
    check_order(list(DEFAULT_ORDER))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "the stage 'depth_prediction' is missing"),
        ([name for name in DEFAULT_ORDER if name != "prune"], "the stage 'prune' is missing"),
        ([*DEFAULT_ORDER, "verify"], "a stage is listed twice"),
        ([*DEFAULT_ORDER, "overlap"], "unknown stage 'overlap'; there are depth_prediction, head_draft"),
        (DEFAULT_ORDER[::-1], "the stage 'bookkeeping' runs before accepted, cache exists"),
        (
            ["draft_steps", *DEFAULT_ORDER[:2], *DEFAULT_ORDER[3:]],
            "the stage 'draft_steps' runs before root, shape exists",
        ),
    ],
)
def test_faults_are_named(names, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_order(names)
