"""Predicts the timeline of a schedule's iteration from the durations of its stages (paper section 5.2).

Each resource runs its stages one at a time, in the schedule's order. A stage starts when its resource is free and its
inputs exist. An in-order executor has one resource for all stages. Captured steps have two: the host's thread, and one
stream of the device for both models. Durations are milliseconds, as floats or numpy arrays that broadcast, for a whole
grid of shapes or many draws of measured durations. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from yggdrasil.scheduling.stages import Schedule, Stage

Milliseconds: TypeAlias = float | npt.NDArray[np.floating[Any]]
ExecutorKind = Literal["in-order", "captured"]
THREAD = "thread"  # the one resource of an in-order executor
STREAM = "stream"  # of captured steps, for the stages of both models


class Event(NamedTuple):
    """One stage on the timeline."""

    stage: str
    resource: str
    start_ms: Milliseconds
    end_ms: Milliseconds


@dataclass(frozen=True)
class Timeline:
    """Events in launch order, and the time at which the last one ends."""

    events: tuple[Event, ...]
    makespan_ms: Milliseconds


def predict_timeline(schedule: Schedule, durations: Mapping[str, Milliseconds], executor: ExecutorKind) -> Timeline:
    """Predict when each stage of one iteration starts and ends, in milliseconds since the iteration began.

    Args:
        durations: stage name -> milliseconds >= 0, one number or an array for many tree shapes.
        executor: decides which stages share a resource: all ("in-order"), or those of both models ("captured").
    """
    ends: dict[str, Milliseconds] = {}
    free: dict[str, Milliseconds] = {}
    events = []
    makespan: Milliseconds = 0.0
    for stage in schedule.stages:
        resource = _resource(stage, executor)
        start = free.get(resource, 0.0)
        for predecessor in sorted(schedule.predecessors[stage.name]):
            start = _later(start, ends[predecessor])
        end = start + durations[stage.name]
        ends[stage.name] = free[resource] = end
        makespan = _later(makespan, end)
        events.append(Event(stage.name, resource, start, end))
    return Timeline(tuple(events), makespan)


def critical_path(schedule: Schedule, durations: Mapping[str, Milliseconds]) -> Milliseconds:
    """Return the milliseconds of the longest chain of dependent stages, a lower bound of an iteration.

    Args:
        durations: name of every stage -> milliseconds, one number or an array for many tree shapes.
    """
    ends: dict[str, Milliseconds] = {}
    longest: Milliseconds = 0.0
    for stage in schedule.stages:
        start: Milliseconds = 0.0
        for predecessor in schedule.predecessors[stage.name]:
            start = _later(start, ends[predecessor])
        ends[stage.name] = start + durations[stage.name]
        longest = _later(longest, ends[stage.name])
    return longest


def _resource(stage: Stage, executor: ExecutorKind) -> str:
    if executor == "in-order":
        return THREAD
    return stage.resource if stage.resource == "host" else STREAM


def _later(first: Milliseconds, second: Milliseconds) -> Milliseconds:
    if isinstance(first, float) and isinstance(second, float):
        return max(first, second)
    later: npt.NDArray[np.floating[Any]] = np.maximum(first, second)
    return later
