"""Orders of stages against the pairs that must not be swapped, and against what a swapped pair would compute."""

import random
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.scheduling.stages import DEFAULT_ORDER, NAMED_VARIANTS, STAGES, Schedule, all_variants

# What each stage hands to another one, as the engine does it, whatever the variants.
ALWAYS = [
    ("draft_steps", "prune"),  # the tree
    ("draft_steps", "tail_draft"),  # its leaves
    ("prune", "mask"),  # which nodes, and how many
    ("mask", "verify"),
    ("verify", "accept"),  # the target's choices
    ("accept", "commit"),  # which rows stay
    ("tail_draft", "commit"),  # no row is moved before it is written
]
# What a variant makes wait.
BY_VARIANT = {
    ("depth_prediction", "now"): [("depth_prediction", "draft_steps")],
    ("depth_prediction", "informed"): [("depth_prediction", "draft_steps")],
    ("head_draft", "after"): [("head_draft", "draft_steps")],
    ("head_draft", "ahead"): [("verify", "head_draft"), ("tail_draft", "head_draft"), ("head_draft", "commit")],
    ("tail_draft", "conditional"): [("accept", "tail_draft")],
    ("bookkeeping", "inline"): [("commit", "bookkeeping")],
}
variants = st.fixed_dictionaries(
    {name: st.sampled_from(list(choices)) for name, choices in STAGES.items() if len(choices) > 1}
)


def pairs_of(chosen):
    pairs = ALWAYS + [pair for choice, more in BY_VARIANT.items() if choice in chosen.items() for pair in more]
    if (chosen["depth_prediction"], chosen["head_draft"]) == ("informed", "after"):
        pairs = [*pairs, ("head_draft", "depth_prediction")]
    if (chosen["depth_prediction"], chosen["head_draft"]) == ("now", "after"):
        pairs = [*pairs, ("depth_prediction", "head_draft")]  # whether to draft at all
    return pairs


def labels_of(names, chosen):
    return [f"{name}={chosen[name]}" if name in chosen else name for name in names]


@given(variants, st.randoms(use_true_random=False))
def test_accepted_orders_are_those_without_a_swapped_pair(chosen, source):
    """Random orders are nearly always illegal, so half of them start from a legal one with two stages swapped."""
    names = [stage.name for stage in Schedule.of(chosen).stages]
    if source.random() < 0.5:
        source.shuffle(names)
    else:
        i, j = source.sample(range(len(names)), 2)
        names[i], names[j] = names[j], names[i]
    places = {name: place for place, name in enumerate(names)}
    expected = all(places[first] < places[second] for first, second in pairs_of(chosen))

    try:
        Schedule.parse(labels_of(names, chosen))
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == expected, names


@given(variants)
def test_predecessors_are_the_pairs(chosen):
    schedule = Schedule.of(chosen)
    found = {(before, stage) for stage, befores in schedule.predecessors.items() for before in befores}

    assert found == set(pairs_of(chosen))


def values_after(schedule):
    """Run an iteration on symbols: every output is a term of its stage and inputs."""
    values = {name: name for name in schedule.initial}
    for stage in schedule.stages:
        taken = sorted(stage.inputs | (stage.joins & values.keys()))
        term = f"{stage.label}({', '.join(values[name] for name in taken)})"
        values |= {output: f"{output} of {term}" for output in stage.outputs}
    return values


@examples(40)
@given(variants, st.integers(0, 2**32))
def test_moving_a_stage_ahead_never_changes_results(chosen, seed):
    schedule = Schedule.of(chosen)
    orders = list(schedule.orders())
    other = random.Random(seed).choice(orders)

    assert orders[0] == schedule
    assert len(set(orders)) == len(orders)
    assert values_after(other) == values_after(schedule)


def test_every_legal_order_is_found():
    """The loose stages of this schedule can stand anywhere: its orders are counted by hand."""
    chosen = {"depth_prediction": "late", "tail_draft": "superset", "bookkeeping": "overlapped"}

    # A chain of seven (head to commit); the tail has 5 places after the third, then 9 and 10 places for the others.
    assert len(list(Schedule.of(chosen).orders())) == 5 * 9 * 10


def test_the_default_order_is_todays():
    assert (
        Schedule.parse(DEFAULT_ORDER)
        == Schedule.of({})
        == Schedule.parse([name.partition("=")[0] for name in DEFAULT_ORDER])
    )
    assert Schedule.of({}).variants == all_variants()[0]


def test_there_are_as_many_combinations_as_the_variants_give():
    combinations = all_variants()

    assert len(combinations) == 3 * 3 * 2 * 2 * 2
    assert all(first != second for first, second in pairwise(combinations))
    assert all(Schedule.of(chosen).variants == chosen for chosen in combinations)


def test_the_named_plans_differ_in_what_they_are_named_for():
    chosen = {name: Schedule.of(variants).variants for name, variants in NAMED_VARIANTS.items()}

    assert chosen["naive"]["tail_draft"] == "conditional"
    assert [chosen[name]["head_draft"] for name in chosen] == ["after", "after", "ahead", "ahead"]
    assert [chosen[name]["tail_draft"] for name in chosen] == ["conditional", "ahead", "superset", "ahead"]


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "the stage 'depth_prediction' is missing"),
        ([name for name in DEFAULT_ORDER if name != "prune"], "the stage 'prune' is missing"),
        ([*DEFAULT_ORDER, "verify"], "a stage is listed twice"),
        ([*DEFAULT_ORDER, "overlap"], "unknown stage 'overlap'; there are depth_prediction, head_draft"),
        (["accept=later"], "the stage 'accept' has no variant 'later'; there are device, host"),
        (["verify=later"], "the stage 'verify' has no variant 'later'"),
        (DEFAULT_ORDER[::-1], "the stage 'bookkeeping' runs before emission exists"),
        ([DEFAULT_ORDER[1], DEFAULT_ORDER[0], *DEFAULT_ORDER[2:]], "the stage 'head_draft' runs before drafts exists"),
    ],
)
def test_faults_are_named(names, sentence):
    with pytest.raises(ValueError, match=sentence):
        Schedule.parse(names)
