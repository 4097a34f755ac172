"""Executors call every stage once, after what it waits for. Events are stand-ins."""

from collections import Counter

import pytest
from threaded_executor import ThreadedExecutor

from yggdrasil.engine.trace import EventExecutor, InOrderExecutor
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
def test_a_failing_stage_is_raised(schedule):
    def fail(_):
        raise ZeroDivisionError

    for executor in (InOrderExecutor(), ThreadedExecutor(lambda _: 0.0)):
        actions = {name: (fail if name == "accept" else lambda _: None) for name in STAGES}
        with pytest.raises(ZeroDivisionError):
            executor.run(schedule, actions, None, Counter())


class FakeEvent:
    """Notes the time of a device that takes two milliseconds for each stage that was launched before."""

    launched, waits = 0, 0

    def record(self):
        self.ms = 2.0 * FakeEvent.launched

    def elapsed_time(self, later):
        return later.ms - self.ms

    def synchronize(self):
        FakeEvent.waits += 1


def test_stage_times_by_events():
    """One wait an iteration, and each stage has the time of its own work on the device."""
    executor, times = EventExecutor(FakeEvent), Counter()
    order = []

    def action(name):
        order.append(name)
        FakeEvent.launched += 1 + (name == "verify")

    schedule = SCHEDULES["default"]
    actions = {name: lambda state, name=name: action(name) for name in STAGES if name != "tail_draft"}
    for _ in range(2):
        executor.run(schedule, actions, None, times)

    assert order == [name for name in schedule.names if name != "tail_draft"] * 2
    assert times == {name: 4_000_000 * (1 + (name == "verify")) for name in actions}
    assert FakeEvent.waits == 2
