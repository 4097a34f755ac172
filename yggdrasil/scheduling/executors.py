"""Executors, which run the stages of a schedule: in order, timed by the host or by a GPU, or on threads.

All three respect the dependencies that follow from inputs and outputs, so a schedule generates the same tokens under
each.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from graphlib import CycleError, TopologicalSorter
from time import perf_counter_ns, sleep
from typing import Any, Protocol, TypeVar

from yggdrasil.scheduling.stages import STAGES, Schedule

State = TypeVar("State")
Actions = Mapping[str, Callable[[State], None]]  # by stage name; stages without an entry do nothing


class Executor(Protocol):
    """Protocol of executors, which run one iteration."""

    def run(self, schedule: Schedule, actions: Actions[State], state: State, times: Counter[str]) -> None:
        """Call every stage's action on ``state`` once and wait for all. Add their nanoseconds to ``times``."""


class InOrderExecutor:
    """Executor on one thread, in the schedule's order. Fastest on a CPU, where verification uses all cores.

    Times are the host's: on a GPU they are those of launches and of waiting for the device.
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
    """Executor with one thread per stage, which waits only for declared dependencies. Used to test schedules.

    ``delay`` returns the seconds that a stage sleeps before it runs. With random delays an undeclared dependency leads
    to a wrong token or a worse draft. To test that, pairs (stage, predecessor) may be ``forgotten``: the stage then
    does not wait for its predecessor, and the predecessor waits for the stage.
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

        for name in TopologicalSorter(waits).static_order():  # each waits only for stages submitted before it
            running[name] = self._pool.submit(one, name)
        wait(running.values())  # also if a stage failed: no other may still be using ``state``
        for name, future in running.items():
            times[name] += future.result()


def _waits(schedule: Schedule, forgotten: Collection[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the stages for which each stage waits. Forgotten pairs are reversed unless that makes a cycle."""
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
    """Executor in order, with stage times on the GPU's timeline, which include waiting for work.

    The host waits once, at the end of an iteration. ``make_event`` creates a timing event, such as torch.cuda.Event.
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
