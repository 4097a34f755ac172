"""Executors run the stages of a schedule: one after the other, on threads, or on CUDA streams.

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

    A measurement on a GPU has ``after_stage`` wait for the device, so that a stage's time holds its work.
    """

    def __init__(self, after_stage: Callable[[], None] | None = None) -> None:
        self._after_stage = after_stage

    def run(self, schedule: Schedule, actions: Actions[State], state: State, times: Counter[str]) -> None:
        before = perf_counter_ns()
        for name in schedule.names:
            if name not in actions:
                continue
            actions[name](state)
            if self._after_stage is not None:
                self._after_stage()
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


class StreamExecutor:
    """One CUDA stream a model, events between them; the host waits only where a host stage takes a device's value.

    NOTE: tested with fakes for streams and events; it has not run on a GPU yet.
    """

    def __init__(self, streams: Mapping[str, Any], enter: Callable[[Any], Any], current: Callable[[], Any]) -> None:
        self._streams = streams
        self._enter = enter  # context in which work goes to a stream
        self._current = current  # the stream of work launched by host stages
        self._iteration_end: Any = None

    @classmethod
    def on(cls, device: Any) -> "StreamExecutor":
        """Streams for ``device``, a CUDA device."""
        import torch

        streams = {name: torch.cuda.Stream(device) for name in ("target", "drafter")}
        return cls(streams, torch.cuda.stream, lambda: torch.cuda.current_stream(device))

    def run(self, schedule: Schedule, actions: Actions[State], state: State, times: Counter[str]) -> None:
        """Times are those of the launch, except where a stage reads a value back."""
        if self._iteration_end is not None:
            for stream in self._streams.values():
                stream.wait_event(self._iteration_end)
        done: dict[str, Any] = {}
        for stage in schedule.stages:
            start = perf_counter_ns()
            waited = [done[name] for name in sorted(schedule.predecessors[stage.name])]
            stream, action = self._streams.get(stage.resource), actions.get(stage.name, _nothing)
            if stream is None:
                for event in waited:
                    event.synchronize()
                action(state)
                done[stage.name] = self._current().record_event()
            else:
                for event in waited:
                    stream.wait_event(event)
                with self._enter(stream):
                    action(state)
                done[stage.name] = stream.record_event()
            times[stage.name] += perf_counter_ns() - start
        for event in done.values():
            self._current().wait_event(event)
        self._iteration_end = self._current().record_event()


def _nothing(_: object) -> None:
    return
