"""Executors run the stages of a schedule: one after the other, by the host's clock or a GPU's, or on threads.

All three honour the same dependencies, those that follow from inputs and outputs, so a schedule gives the same tokens
under each.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from graphlib import CycleError, TopologicalSorter
from time import perf_counter_ns, sleep
from typing import Any, Protocol, TypeVar

from yggdrasil.scheduling.stages import STAGES, Schedule

State = TypeVar("State")
Actions = Mapping[str, Callable[[State], None]]  # by stage name; a stage that is not there has nothing to do


class Executor(Protocol):
    """Runs one iteration."""

    def run(self, schedule: Schedule, actions: Actions[State], state: State, times: Counter[str]) -> None:
        """Call every stage's action on ``state`` once and return when all are done; ``times`` grows by nanoseconds."""


class InOrderExecutor:
    """Runs stages on one thread in the schedule's order: fastest on a CPU, whose cores verification already fills.

    Times are the host's: on a GPU those of launches, and of what waits for the device.
    """

    def run(self, schedule: Schedule, actions: Actions[State], state: State, times: Counter[str]) -> None:
        before = perf_counter_ns()
        for name in schedule.names:
            if name not in actions:
                continue
            actions[name](state)
            now = perf_counter_ns()
            times[name] += now - before
            before = now


class ThreadedExecutor:
    """Every stage on a thread of its own, waiting for declared dependencies alone.

    It is there to prove schedules: ``delay`` gives the seconds that a stage sleeps before it runs, and with random
    ones a dependency that is not declared shows as a wrong token, or as a worse draft. To see that it does, pairs
    (stage, its predecessor) may be ``forgotten``: there the stage does not wait, and its predecessor waits for it.
    """

    def __init__(self, delay: Callable[[str], float], forgotten: Collection[tuple[str, str]] = ()) -> None:
        self._delay = delay
        self._forgotten = frozenset(forgotten)
        self._pool = ThreadPoolExecutor(len(STAGES), thread_name_prefix="stage")

    def run(self, schedule: Schedule, actions: Actions[State], state: State, times: Counter[str]) -> None:
        running: dict[str, Future[int]] = {}
        waits = _waits(schedule, self._forgotten)

        def one(name: str) -> int:
            import torch

            for other in waits[name]:
                running[other].result()
            sleep(self._delay(name))
            start = perf_counter_ns()
            with torch.inference_mode():
                actions.get(name, _nothing)(state)
            return perf_counter_ns() - start

        for name in TopologicalSorter(waits).static_order():  # each waits for those submitted before it
            running[name] = self._pool.submit(one, name)
        wait(running.values())  # a stage that failed leaves none behind that still works on ``state``
        for name, future in running.items():
            times[name] += future.result()


def _waits(schedule: Schedule, forgotten: Collection[tuple[str, str]]) -> dict[str, set[str]]:
    """For each stage what it waits for. What is forgotten waits itself, unless others imply that it is first."""
    waits = {
        stage: {each for each in before if (stage, each) not in forgotten}
        for stage, before in schedule.predecessors.items()
    }
    for stage, predecessor in sorted(forgotten):
        if predecessor not in schedule.predecessors.get(stage, ()):
            continue
        waits[predecessor].add(stage)
        try:
            TopologicalSorter(waits).prepare()
        except CycleError:
            waits[predecessor].remove(stage)
    return waits


class EventExecutor:
    """In order, with stage times by a GPU's clock: what each adds to the device's timeline, work and waiting for work.

    The host waits once, at the end of an iteration. ``make_event`` gives events that note the time.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._events = [make_event() for _ in range(1 + len(STAGES))]

    def run(self, schedule: Schedule, actions: Actions[State], state: State, times: Counter[str]) -> None:
        names = [name for name in schedule.names if name in actions]
        events = self._events[: 1 + len(names)]
        events[0].record()
        for name, event in zip(names, events[1:], strict=True):
            actions[name](state)
            event.record()
        events[-1].synchronize()
        for name, before, after in zip(names, events, events[1:], strict=False):
            times[name] += round(before.elapsed_time(after) * 1e6)


def _nothing(_: object) -> None:
    return
