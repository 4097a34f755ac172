"""The search against the full grid, by hand where it can be, and for what it must not depend on."""

import random
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

import yggdrasil.scheduling.search as module
from yggdrasil.errors import YggdrasilError
from yggdrasil.scheduling.costs import COLUMNS, LOOP, TIMES, StageCosts, schedule_code
from yggdrasil.scheduling.search import AcceptedLengths, Space, predict_ms, search
from yggdrasil.scheduling.stages import NAMED_VARIANTS, Schedule, all_variants
from yggdrasil.tree.shape import TreeShape

DRAFT_WIDTHS, VERIFY_WIDTHS, MAX_DEPTH = (1, 2, 4), (1, 2, 4, 8, 16), 6


def made_up_samples(head=2.0, step=1.0, verify=20.0, per_row=0.5, host=0.3, accept=(0.5, 0.8)):
    """Costs that rise with size, every sample the same: what a schedule takes can be added up by hand."""
    rows = [(100, 1, schedule_code(Schedule.of({})), 0, 0, 1, verify, *[None] * len(TIMES[1:]))]
    for chosen in all_variants():
        schedule = Schedule.of(chosen)
        for width in DRAFT_WIDTHS:
            for depth in (2, MAX_DEPTH):
                for verify_width in VERIFY_WIDTHS[1:]:
                    tail_ms = {"superset": 0.0, "conditional": 0.4, "ahead": step + 0.1 * width}[chosen["tail_draft"]]
                    path = chosen["tail_draft"] == "superset"
                    with_tail = (step + 0.1 * width) * (chosen["tail_draft"] != "ahead")
                    times = dict.fromkeys((*schedule.predecessors, LOOP), host)
                    times |= {
                        "head_draft": 3 + per_row * verify_width + with_tail
                        if chosen["head_draft"] == "ahead"
                        else head + 0.5 * path,
                        "draft_steps": (step + 0.1 * width) * (depth - 1) + 0.2,
                        "verify": verify + per_row * verify_width,
                        "accept": accept[chosen["accept"] == "host"],
                        "tail_draft": tail_ms,
                    }
                    code, size = schedule_code(schedule), (width, depth, verify_width)
                    rows.append((100, 1, code, *size, sum(times.values()), *(times.get(name) for name in TIMES[1:])))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def made_up_lengths(seed=0):
    source = np.random.default_rng(seed)
    survival = np.sort(source.uniform(0.2, 0.95, MAX_DEPTH))[::-1]
    ratios = {
        width: np.sort(source.uniform(0.1 * width, 1.0, (MAX_DEPTH, MAX_DEPTH, len(VERIFY_WIDTHS))), axis=-1)
        for width in DRAFT_WIDTHS
    }
    return AcceptedLengths(survival, ratios, VERIFY_WIDTHS)


COSTS = StageCosts.from_samples(made_up_samples())
LENGTHS = made_up_lengths()


def test_an_iteration_is_predicted_as_added_up_by_hand():
    shape = TreeShape(2, 4, 8)
    steps = 1.2 * 3 + 0.2
    serial = predict_ms(Schedule.of({}), [shape], COSTS, LENGTHS, "in-order")[0]
    ahead = predict_ms(Schedule.of({"tail_draft": "ahead"}), [shape], COSTS, LENGTHS, "captured")[0]
    conditional = predict_ms(Schedule.of({"tail_draft": "conditional"}), [shape], COSTS, LENGTHS, "in-order")[0]

    # depth, head of the path, steps, prune, mask, verify, accept, commit, books, loop
    assert serial == pytest.approx(0.3 + 2.5 + steps + 0.3 + 0.3 + 24 + 0.5 + 0.3 + 0.3 + 0.3)
    assert ahead == pytest.approx(serial - 0.5 + 1.2 - 0.3)  # no row for the leaf; pruning hides beside the tail
    leaf = LENGTHS.leaf_share(shape) * 1.1  # read by the narrowest step
    assert conditional == pytest.approx(serial - 0.5 + leaf)
    # A head over the whole verify width reads the leaves itself or finds them read; in order that is the same.
    head_ahead, both_ahead = (
        predict_ms(Schedule.of({"head_draft": "ahead", **tail}), [shape], COSTS, LENGTHS, "in-order")[0]
        for tail in ({}, {"tail_draft": "ahead"})
    )
    assert head_ahead == pytest.approx(serial - 2.5 + 3 + 4 + 1.2)
    assert both_ahead == pytest.approx(head_ahead)


def test_accepted_lengths_are_those_of_the_tables():
    lengths = AcceptedLengths(
        np.array([0.8, 0.5]), {2: np.array([[[0.5, 1.0], [0.0, 0.0]], [[0.5, 1.0], [0.2, 0.6]]])}, (2, 4)
    )

    assert lengths.aal(TreeShape(2, 1, 4)) == pytest.approx(1 + 0.8)
    assert lengths.aal(TreeShape(2, 2, 4)) == pytest.approx(1 + 0.8 + 0.3)
    assert lengths.aal(TreeShape(2, 2, 2)) == pytest.approx(1 + 0.4 + 0.1)
    assert lengths.leaf_share(TreeShape(2, 2, 4)) == pytest.approx(0.3)


@examples(6)
@given(
    st.integers(0, 1000), st.sampled_from(["latency", "aal"]), st.sampled_from(["in-order", "captured"]),
    st.floats(0.1, 10), st.floats(0.01, 3), st.floats(0.1, 60), st.integers(1, 15),
)  # fmt: skip
@pytest.mark.slow
def test_pruning_never_loses_a_plan_of_the_full_grid(seed, objective, executor, head, per_row, verify, keep):
    lengths = made_up_lengths(seed)
    costs = StageCosts.from_samples(made_up_samples(head=head, per_row=per_row, verify=verify))
    variants = random.Random(seed).sample(all_variants(), 3)
    space = Space(Space.of(lengths, executor).shapes, tuple(variants), executor)

    with mock.patch.object(module, "_BLOCK", 1):  # a shape at a time: nothing is laid out that could be skipped
        found = search(space, costs, lengths, objective, keep=keep)

    whole_grid = search(space, costs, lengths, objective, keep=10**6)  # never full, so nothing is skipped
    assert found == whole_grid[:keep]
    everything = [
        (-lengths.aal(shape), ms / lengths.aal(shape)) if objective == "aal" else (ms / lengths.aal(shape),)
        for schedule in space.schedules()
        for shape, ms in zip(space.shapes, predict_ms(schedule, space.shapes, costs, lengths, executor), strict=True)
    ]
    best = found[0]
    assert ((-best.aal, best.ms_per_token) if objective == "aal" else (best.ms_per_token,)) == pytest.approx(
        min(everything)
    )


@examples(6)
@given(st.integers(0, 1000), st.sampled_from(["in-order", "captured"]), st.floats(0.1, 10), st.floats(0.1, 60))
def test_no_plan_beats_the_bound_of_its_shape(seed, executor, head, verify):
    """What is skipped is skipped by this bound, so it is held against every schedule; it is not idle either."""
    lengths = made_up_lengths(seed)
    costs = StageCosts.from_samples(made_up_samples(head=head, verify=verify))
    variants = random.Random(seed).sample(all_variants(), 3)
    space = Space(Space.of(lengths, executor).shapes, tuple(variants), executor)
    schedules = list(space.schedules())
    bounds = np.array([bound.ms_per_token * bound.aal for bound in module._bounds(space, schedules, costs, lengths)])
    least = np.min([predict_ms(schedule, space.shapes, costs, lengths, executor) for schedule in schedules], axis=0)

    assert (bounds <= least + 1e-9).all()
    assert (bounds > 0.2 * least).all()


def test_in_order_nothing_is_gained_by_overlap_and_the_simplest_plan_is_listed():
    found = search(Space.of(LENGTHS, "in-order"), COSTS, LENGTHS)

    for candidate in found:
        variants = Schedule.parse(candidate.stages).variants
        assert (variants["bookkeeping"], variants["depth_prediction"]) == ("inline", "now")
    assert Schedule.parse(found[0].stages).variants["accept"] == "device"


def test_overlap_of_host_and_device_is_found():
    best = search(Space.of(LENGTHS, "captured"), COSTS, LENGTHS)[0]
    variants = Schedule.parse(best.stages).variants

    assert variants["bookkeeping"] == "overlapped"
    assert variants["depth_prediction"] == "late"


def test_the_objective_aal_takes_the_longest_tree_and_pays_for_it():
    space = Space.of(LENGTHS, "in-order")
    by_latency, by_aal = (search(space, COSTS, LENGTHS, objective)[0] for objective in ("latency", "aal"))

    assert by_aal.aal == max(LENGTHS.aal(shape) for shape in space.shapes)
    assert by_aal.ms_per_token >= by_latency.ms_per_token


def test_the_ranking_depends_on_nothing_but_the_profile():
    frame = made_up_samples()
    shuffled = frame.sample(frac=1.0, random_state=3)
    space = Space.of(LENGTHS, "captured")

    assert search(space, COSTS, LENGTHS) == search(space, StageCosts.from_samples(shuffled), LENGTHS)


def test_the_default_grid_is_little_work(monkeypatch):
    """Counted, not timed: of nine thousand iterations, half are skipped, and many are laid out at once."""
    laid_out, predict_timeline = [], module.predict_timeline

    def counted(*given):
        timeline = predict_timeline(*given)
        laid_out.append(len(timeline.makespan_ms))
        return timeline

    monkeypatch.setattr(module, "predict_timeline", counted)
    space = Space.of(LENGTHS, "captured")
    search(space, COSTS, LENGTHS)

    assert 0 < len(laid_out) < 1000
    assert sum(laid_out) < len(space.shapes) * len(list(space.schedules())) / 2


def test_a_cost_never_measured_is_named():
    frame = made_up_samples()
    default_only = frame[frame["schedule"] == schedule_code(Schedule.of({}))]
    costs = StageCosts.from_samples(default_only, "samples.csv")

    with pytest.raises(YggdrasilError, match=r"^samples\.csv has no cost of 'head_draft of the bonus'; run `yggdr"):
        predict_ms(Schedule.of({"tail_draft": "ahead"}), [TreeShape(1, 2, 4)], costs, LENGTHS, "in-order")
    with pytest.raises(YggdrasilError, match=r"^samples\.csv has no cost of 'draft_steps' at \(3, 2\), only at"):
        costs.durations(Schedule.of({}), [TreeShape(3, 2, 4)], np.array([0.5]))
    with pytest.raises(YggdrasilError, match=r"^samples\.csv has no cost of 'verify' at \(5,\), only at"):
        costs.durations(Schedule.of({}), [TreeShape(1, 2, 5)], np.array([0.5]))
    with pytest.raises(YggdrasilError, match=r"^samples\.csv holds no iterations; run"):
        StageCosts.from_samples(frame[frame["depth"] > 0], "samples.csv")


def test_what_a_search_measures_gives_every_cost():
    """Five schedules are measured; the costs of all the others are theirs, or sums of theirs."""
    frame = made_up_samples()
    measured = [schedule_code(Schedule.of(chosen)) for chosen in ({}, *NAMED_VARIANTS.values())]
    costs = StageCosts.from_samples(frame[frame["schedule"].isin(measured)])
    shape = TreeShape(2, 4, 8)

    for chosen in all_variants():
        schedule = Schedule.of(chosen)
        found = predict_ms(schedule, [shape], costs, LENGTHS, "in-order")
        assert found == pytest.approx(predict_ms(schedule, [shape], COSTS, LENGTHS, "in-order")), chosen
