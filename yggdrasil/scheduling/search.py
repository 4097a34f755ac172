"""Grid search over schedules and shapes for the least predicted latency per token (paper section 5.2).

Deterministic: the same costs and acceptance give the same ranking. Uses numpy, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from yggdrasil.policy.objective import Objective, objective_value
from yggdrasil.scheduling.costs import LOOP, StageCosts
from yggdrasil.scheduling.stages import Schedule, all_variants
from yggdrasil.scheduling.timeline import ExecutorKind, critical_path, predict_timeline
from yggdrasil.tree.shape import TreeShape

Array: TypeAlias = npt.NDArray[np.floating[Any]]
_BLOCK = 32  # shapes per call of predict_timeline
_DIGITS = 9  # decimals to which equal predictions agree


class AcceptedLengths:
    """Accepted lengths of every tree shape, from a calibration's traces.

    Args:
        mean_survival: [D] P(accepted length >= d), the mean over the calibration's text.
        ratios: draft width -> [D depth budget, D level, V] survival of a shape relative to ``mean_survival``.
        verify_widths: the V verify widths.
    """

    def __init__(self, mean_survival: Array, ratios: Mapping[int, Array], verify_widths: Sequence[int]) -> None:
        self._survival = np.asarray(mean_survival, dtype=np.float64)
        self._ratios = {width: np.asarray(table, dtype=np.float64) for width, table in ratios.items()}
        self._columns = {width: column for column, width in enumerate(verify_widths)}
        self.max_depth = len(self._survival)
        self.draft_widths = tuple(sorted(self._ratios))
        self.verify_widths = tuple(verify_widths)

    def survival(self, shape: TreeShape) -> Array:
        """Return P(accepted length >= d) of trees of ``shape`` for d = 1 .. depth, [depth]."""
        levels = self._ratios[shape.width][shape.depth - 1]  # [D level, V] of [D depth budget, D level, V]
        reached: Array = (self._survival * levels[:, self._columns[shape.verify_width]])[: shape.depth]
        return np.minimum(reached, 1.0)

    def aal(self, shape: TreeShape) -> float:
        """Return the average accepted length of trees of ``shape``: tokens a target pass, bonus token included."""
        return 1.0 + float(self.survival(shape).sum())

    def leaf_share(self, shape: TreeShape) -> float:
        """Return the probability that the accepted length of a tree of ``shape`` is its depth, the most possible."""
        return float(self.survival(shape)[-1])


class Candidate(NamedTuple):
    """A schedule and shape, with predicted AAL and milliseconds per iteration."""

    stages: tuple[str, ...]
    shape: TreeShape
    aal: float
    iteration_ms: float

    @property
    def ms_per_token(self) -> float:
        """Predicted milliseconds per token."""
        return 1.0 / objective_value(self.aal, self.iteration_ms)


@dataclass(frozen=True)
class Space:
    """The search space: every schedule of ``variants`` (stage -> variant) with every tree shape."""

    shapes: tuple[TreeShape, ...]
    variants: tuple[Mapping[str, str], ...]
    executor: ExecutorKind

    @classmethod
    def of(
        cls, lengths: AcceptedLengths, executor: ExecutorKind, *, reads_head: bool = False, reads_states: bool = False
    ) -> Space:
        """Return the search space of all stage variants and all calibrated tree shapes with a verify width above 1.

        Args:
            executor: ``"captured"`` steps accept on the device, so they leave out ``accept=host``.
            reads_head: whether the depth predictor reads the candidates of the head draft. If True, only schedules that
                run the head draft before depth prediction are included; if False, only schedules that do not.
            reads_states: whether the drafter is a head on the target's hidden states, which cannot draft ahead of time.
        """
        shapes = tuple(
            TreeShape(width, depth, verify_width)
            for width in lengths.draft_widths
            for depth in range(1, lengths.max_depth + 1)
            for verify_width in lengths.verify_widths
            if verify_width > 1
        )
        variants = all_variants(reads_states=reads_states)
        fitting = (
            each
            for each in variants
            if (each["depth_prediction"] == "informed") == reads_head
            and not (executor == "captured" and each["accept"] == "host")
        )
        return cls(shapes, tuple(fitting), executor)

    def schedules(self) -> Iterator[Schedule]:
        """Yield every schedule of the space once; orders with the same sequence on each resource count as one.

        For an in-order executor, this yields one schedule per combination of variants.
        """
        for chosen in self.variants:
            seen = set()
            for schedule in Schedule.of(chosen).orders():
                sequences = tuple(sorted((stage.resource, i, stage.name) for i, stage in enumerate(schedule.stages)))
                key = tuple((resource, name) for resource, _, name in sequences)
                if key not in seen:
                    seen.add(key)
                    yield schedule
                if self.executor == "in-order":
                    break


def predict_ms(
    schedule: Schedule, shapes: Sequence[TreeShape], costs: StageCosts, lengths: AcceptedLengths, executor: ExecutorKind
) -> Array:
    """Return the predicted milliseconds of one iteration of ``schedule`` for each of N tree shapes, [N].

    Raises:
        YggdrasilError: a cost was not measured.
    """
    shares = np.array([lengths.leaf_share(shape) for shape in shapes])
    durations = costs.durations(schedule, shapes, shares)
    makespan: Array = predict_timeline(schedule, durations, executor).makespan_ms + durations[LOOP]
    return makespan


def search(
    space: Space,
    costs: StageCosts,
    lengths: AcceptedLengths,
    objective: Objective = "latency",
    *,
    keep: int = 10,
) -> list[Candidate]:
    """Return the best ``keep`` combinations of schedule and tree shape, best prediction first.

    Of equal predictions of one shape only the simplest schedule is listed. Shapes that, by their bound, cannot rank
    above the worst kept candidate are skipped, which does not change the result.

    Args:
        space: schedules and shapes to combine.
        costs: measured costs of the stages.
        lengths: accepted lengths of every tree shape.
        objective: ``"latency"`` ranks by milliseconds per token, ``"aal"`` by the average accepted length.
        keep: the most combinations to return.
    """
    schedules = list(space.schedules())
    best: list[Candidate] = []
    bounds = _bounds(space, schedules, costs, lengths)
    order = sorted(range(len(bounds)), key=lambda i: _bound_rank(bounds[i], objective))
    for start in range(0, len(order), _BLOCK):
        block = [space.shapes[i] for i in order[start : start + _BLOCK]]
        floor = _bound_rank(bounds[order[start]], objective)
        if len(best) == keep and floor > _rank(best[-1], objective)[: len(floor)]:
            break
        best = sorted(
            [*best, *_lay_out_block(block, schedules, costs, lengths, space.executor)],
            key=lambda candidate: _rank(candidate, objective),
        )[:keep]
    return best


class _Bound(NamedTuple):
    aal: float
    ms_per_token: float


def _bounds(space: Space, schedules: Sequence[Schedule], costs: StageCosts, lengths: AcceptedLengths) -> list[_Bound]:
    """Return each shape's lower bound: the shortest critical path over all variants."""
    shares = np.array([lengths.leaf_share(shape) for shape in space.shapes])
    least = np.full(len(space.shapes), np.inf)
    seen = set()
    for schedule in schedules:
        code = tuple(sorted(schedule.variants.items()))
        if code not in seen:
            seen.add(code)
            durations = costs.durations(schedule, space.shapes, shares)
            least = np.minimum(least, critical_path(schedule, durations) + durations[LOOP])
    tokens = [lengths.aal(shape) for shape in space.shapes]
    return [_Bound(aal, 1.0 / objective_value(aal, float(ms))) for aal, ms in zip(tokens, least, strict=True)]


def _bound_rank(bound: _Bound, objective: Objective) -> tuple[float, ...]:
    ms_per_token = round(bound.ms_per_token, _DIGITS)
    return (-bound.aal, ms_per_token) if objective == "aal" else (ms_per_token,)


def _rank(candidate: Candidate, objective: Objective) -> tuple[Any, ...]:
    ms_per_token = round(candidate.ms_per_token, _DIGITS)
    first = (-candidate.aal, ms_per_token) if objective == "aal" else (ms_per_token,)
    return (*first, _complexity(candidate.stages), candidate.stages, candidate.shape)


def _complexity(stages: tuple[str, ...]) -> int:
    """Return the number of variants that differ from the default schedule."""
    default = Schedule.of({}).variants
    return sum(default[name] != variant for name, variant in Schedule.parse(stages).variants.items())


def _lay_out_block(
    shapes: Sequence[TreeShape],
    schedules: Sequence[Schedule],
    costs: StageCosts,
    lengths: AcceptedLengths,
    executor: ExecutorKind,
) -> list[Candidate]:
    """Return, for every shape, the simplest candidate of each distinct prediction."""
    shares = np.array([lengths.leaf_share(shape) for shape in shapes])
    aal = [lengths.aal(shape) for shape in shapes]
    durations: dict[tuple[tuple[str, str], ...], dict[str, Array]] = {}
    found: dict[tuple[TreeShape, float], Candidate] = {}
    simplest_first = sorted(schedules, key=lambda schedule: (_complexity(schedule.labels), schedule.labels))
    for schedule in simplest_first:
        code = tuple(sorted(schedule.variants.items()))
        if code not in durations:
            durations[code] = costs.durations(schedule, shapes, shares)
        makespans = predict_timeline(schedule, durations[code], executor).makespan_ms + durations[code][LOOP]
        for i, (shape, ms) in enumerate(zip(shapes, makespans.tolist(), strict=True)):
            found.setdefault((shape, round(ms, _DIGITS)), Candidate(schedule.labels, shape, aal[i], ms))
    return list(found.values())
