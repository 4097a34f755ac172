"""Executors call every stage once, after what it waits for. Streams and events are stand-ins that keep a log."""

from collections import Counter

import pytest

from yggdrasil.scheduling.executors import InOrderExecutor, StreamExecutor, ThreadedExecutor
from yggdrasil.scheduling.stages import NAMED_VARIANTS, STAGES, Schedule

SCHEDULES = {name: Schedule.of(variants) for name, variants in {**NAMED_VARIANTS, "default": {}}.items()}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("executor", [InOrderExecutor(), ThreadedExecutor(lambda _: 0.0)], ids=["in order", "threads"])
def test_every_stage_runs_once_after_its_predecessors(executor, schedule):
    order, times = [], Counter()
    actions = {name: lambda state, name=name: state.append(name) for name in STAGES}
    executor.run(schedule, actions, order, times)

    assert sorted(order) == sorted(STAGES)
    places = {name: place for place, name in enumerate(order)}
    assert all(places[p] < places[s] for s, before in schedule.predecessors.items() for p in before)
    assert sorted(name for name, ns in times.items() if ns > 0) == sorted(STAGES)

    order = []  # a stage without an action still separates those around it
    executor.run(schedule, {name: actions[name] for name in ("verify", "commit")}, order, Counter())
    assert order == ["verify", "commit"]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_what_is_forgotten_comes_too_late_unless_others_imply_it(schedule):
    actions = {name: lambda state, name=name: state.append(name) for name in STAGES}
    for stage, before in schedule.predecessors.items():
        for forgotten in before:
            order = []
            ThreadedExecutor(lambda _: 0.0, [(stage, forgotten)]).run(schedule, actions, order, Counter())
            is_implied = forgotten in set().union(*(all_before(schedule, other) for other in before - {forgotten}))

            assert sorted(order) == sorted(STAGES)
            assert (order.index(forgotten) < order.index(stage)) == is_implied, (stage, forgotten)


def all_before(schedule, stage):
    return {stage}.union(*(all_before(schedule, each) for each in schedule.predecessors[stage]))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_failing_stage_is_raised(schedule):
    def fail(_):
        raise ZeroDivisionError

    for executor in (InOrderExecutor(), ThreadedExecutor(lambda _: 0.0)):
        actions = {name: (fail if name == "accept" else lambda _: None) for name in STAGES}
        with pytest.raises(ZeroDivisionError):
            executor.run(schedule, actions, None, Counter())


class FakeEvent:
    def __init__(self, after):
        self.after = after  # every action that has happened once this event has

    def synchronize(self):
        FakeStream.host |= self.after


class FakeStream:
    """Knows which actions are sure to have ended before the next one on it begins."""

    host = frozenset()

    def __init__(self):
        self.done = frozenset()

    def wait_event(self, event):
        self.done |= event.after

    def record_event(self):
        return FakeEvent(self.done)

    def __enter__(self):
        FakeStream.current = self

    def __exit__(self, *_):
        FakeStream.current = FakeStream.default


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_streams_wait_for_what_a_stage_takes(schedule):
    streams = {"target": FakeStream(), "drafter": FakeStream()}
    FakeStream.default = FakeStream.current = FakeStream()
    FakeStream.host = frozenset()
    executor = StreamExecutor(streams, lambda stream: stream, lambda: FakeStream.default)
    resources = {stage.name: stage.resource for stage in schedule.stages}

    for round_number in range(2):

        def action(_, *, name, round_number=round_number):
            known = FakeStream.current.done | FakeStream.host
            wanted = {(p, round_number) for p in schedule.predecessors[name]}
            assert wanted <= known, f"{name} does not wait for {wanted - known}"
            if round_number and resources[name] != "host":
                assert ("commit", round_number - 1) in known
            FakeStream.current.done |= known | {(name, round_number)}

        actions = {name: lambda state, name=name, action=action: action(state, name=name) for name in STAGES}
        executor.run(schedule, actions, None, Counter())
