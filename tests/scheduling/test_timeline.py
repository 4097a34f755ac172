"""Timelines against hand-computed ones, and against bounds that no executor can beat."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.scheduling.stages import STAGES, Schedule
from yggdrasil.scheduling.timeline import critical_path, predict_timeline

TIMES = {
    "depth_prediction": 1.0,
    "head_draft": 2.0,
    "draft_steps": 6.0,
    "prune": 1.0,
    "mask": 0.5,
    "verify": 20.0,
    "accept": 0.5,
    "tail_draft": 3.0,
    "commit": 1.0,
    "bookkeeping": 4.0,
}
variants = st.fixed_dictionaries(
    {name: st.sampled_from(list(choices)) for name, choices in STAGES.items() if len(choices) > 1}
)
durations = st.fixed_dictionaries(dict.fromkeys(STAGES, st.floats(0, 100)))


def starts(schedule, executor):
    timeline = predict_timeline(schedule, TIMES, executor)
    return {event.stage: event.start_ms for event in timeline.events}, timeline.makespan_ms


def test_in_order_is_one_after_the_other():
    begun, makespan = starts(Schedule.of({"tail_draft": "conditional"}), "in-order")

    assert makespan == sum(TIMES.values()) == 39.0
    assert begun["verify"] == 1 + 2 + 6 + 1 + 0.5
    assert begun["tail_draft"] == 31.0


def test_captured_steps_overlap_with_the_host_alone():
    """Both models share one stream; bookkeeping of the iteration before runs beside the pass."""
    begun, makespan = starts(Schedule.of({"tail_draft": "ahead", "bookkeeping": "overlapped"}), "captured")

    assert begun["bookkeeping"] < begun["verify"]
    assert begun["verify"] == 12.5  # behind the tail draft, which takes 3, and the mask
    assert makespan == 39.0 - 4.0 - 1.0  # pruning runs beside the tail draft


def test_a_head_ahead_of_time_stands_before_acceptance_on_the_stream():
    schedule = Schedule.of({"tail_draft": "ahead", "head_draft": "ahead"})
    begun, makespan = starts(schedule, "captured")

    assert begun["draft_steps"] == 1.0  # no head stands before it
    assert begun["head_draft"] == 1 + 6 + 3 + 0.5 + 20
    assert begun["accept"] == begun["head_draft"] + 2
    assert makespan == 39.0 - 1.0  # pruning runs beside the tail draft


def test_bookkeeping_and_a_late_prediction_hide_beside_the_next_draft():
    """Host: bookkeeping (4) runs beside head and steps (8); the prediction (1) beside the rest."""
    schedule = Schedule.of({"tail_draft": "ahead", "bookkeeping": "overlapped", "depth_prediction": "late"})
    _, makespan = starts(schedule, "captured")

    assert makespan == 2 + 6 + 3 + 0.5 + 20 + 0.5 + 1


def test_the_order_on_one_resource_counts():
    """Bookkeeping launched before pruning delays it where the draft is the shorter of the two."""
    chosen = {"bookkeeping": "overlapped", "tail_draft": "ahead"}
    orders = list(Schedule.of(chosen).orders())
    times = {**TIMES, "bookkeeping": 12.0, "depth_prediction": 0.0}
    makespans = {predict_timeline(order, times, "captured").makespan_ms for order in orders}

    assert min(makespans) == 2 + 6 + 3 + 0.5 + 20 + 0.5 + 1  # launched after pruning: beside verification
    assert max(makespans) > min(makespans)


def test_arrays_are_laid_out_element_by_element():
    schedule = Schedule.of({"tail_draft": "ahead", "head_draft": "ahead"})
    verify = np.array([0.0, 20.0, 40.0])
    grid = predict_timeline(schedule, {**TIMES, "verify": verify}, "captured").makespan_ms

    each = [predict_timeline(schedule, {**TIMES, "verify": float(ms)}, "captured").makespan_ms for ms in verify]
    assert grid.tolist() == each
    assert grid[0] == 1 + 6 + 3 + 0.5 + 2 + 0.5 + 1 + 4  # a verification of nothing


def test_the_critical_path_is_the_longest_chain_whoever_else_waits():
    overlapped = Schedule.of({"tail_draft": "ahead", "bookkeeping": "overlapped"})

    assert critical_path(overlapped, TIMES) == 1 + 2 + 6 + 1 + 0.5 + 20 + 0.5 + 1  # books and tail are beside it
    assert critical_path(overlapped, {**TIMES, "bookkeeping": 100.0}) == 100.0  # a chain of its own, not the last one
    assert critical_path(overlapped, {**TIMES, "tail_draft": 50.0}) == 1 + 2 + 6 + 50 + 1
    grid = critical_path(overlapped, {**TIMES, "bookkeeping": np.array([0.0, 100.0])})
    assert np.asarray(grid).tolist() == [32.0, 100.0]


@examples(40)
@given(variants, durations, st.integers(0, 10**6))
def test_no_timeline_beats_its_bounds(chosen, times, pick):
    orders = list(Schedule.of(chosen).orders())
    schedule = orders[pick % len(orders)]
    timeline = predict_timeline(schedule, times, "captured")
    serial = predict_timeline(schedule, times, "in-order")

    busy = {}
    for event in timeline.events:
        busy[event.resource] = busy.get(event.resource, 0.0) + times[event.stage]
    almost = timeline.makespan_ms + 1e-6
    assert almost >= critical_path(schedule, times)
    assert almost >= max(busy.values())
    assert serial.makespan_ms == pytest.approx(sum(times.values()))
    assert timeline.makespan_ms <= serial.makespan_ms + 1e-6


@examples(40)
@given(variants, durations, st.integers(0, 10**6))
def test_stages_wait_for_inputs_and_resources(chosen, times, pick):
    orders = list(Schedule.of(chosen).orders())
    schedule = orders[pick % len(orders)]
    events = {event.stage: event for event in predict_timeline(schedule, times, "captured").events}

    for stage, befores in schedule.predecessors.items():
        assert all(events[before].end_ms <= events[stage].start_ms for before in befores)
    by_resource = {}
    for stage in schedule.stages:
        event = events[stage.name]
        assert event.start_ms >= by_resource.get(event.resource, 0.0)
        by_resource[event.resource] = event.end_ms
