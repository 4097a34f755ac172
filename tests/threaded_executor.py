"""An executor with one thread per stage, to test that a schedule declares all dependencies."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from graphlib import CycleError, TopologicalSorter
from time import perf_counter_ns, sleep
from typing import Any

import torch

from yggdrasil.scheduling.stages import STAGES, Schedule


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

    def run(
        self, schedule: Schedule, actions: Mapping[str, Callable[[Any], None]], state: Any, times: Counter[str]
    ) -> None:
        running: dict[str, Future[int]] = {}
        waits = _waits(schedule, self._forgotten)

        def one(name: str) -> int:
            for other in waits[name]:
                running[other].result()
            sleep(self._delay(name))
            start = perf_counter_ns()
            with torch.inference_mode():
                actions.get(name, lambda _: None)(state)
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
