"""What each stage costs by variant and size, read from measured samples. Milliseconds; pandas, no torch.

Means (the outer twentieths left out) add up to an iteration where medians do not; quantiles are kept for the spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from yggdrasil.errors import YggdrasilError
from yggdrasil.scheduling.stages import STAGES, Schedule
from yggdrasil.tree.shape import TreeShape

if TYPE_CHECKING:
    import pandas as pd

Array: TypeAlias = npt.NDArray[np.floating[Any]]
LOOP = "loop"  # what an iteration spends between stages
TIMES = ("iteration", LOOP, *STAGES)  # milliseconds; nothing for a stage that did not run
COLUMNS = ("context", "cycle", "schedule", "width", "depth", "verify_width", *TIMES)  # one row an iteration
_MEASURE = "run `yggdrasil search` with --prompts and --measure-again to measure it"
_QUANTILES = np.linspace(0.0, 1.0, 21)


def _any_shape(_: TreeShape) -> tuple[int, ...]:
    return ()


# Which of a shape's sizes a cost follows; everything else costs the same for every shape.
_SIZES: dict[str, Callable[[TreeShape], tuple[int, ...]]] = {
    "draft_steps": lambda shape: (shape.width, shape.depth),
    "verify": lambda shape: (shape.verify_width,),
    "accept=device": lambda shape: (shape.verify_width,),
    "accept=host": lambda shape: (shape.verify_width,),
    "head_draft=ahead": lambda shape: (shape.verify_width,),
    "tail_draft=ahead": lambda shape: (shape.width,),
}
_NO_COST = ("tail_draft=superset",)
_DERIVED = {"tail_draft=conditional": "tail_draft=ahead"}  # of which it is a share


class Spread(NamedTuple):
    """One measured cost."""

    mean_ms: float
    quantiles_ms: Array  # [21], from the least to the greatest sample


def schedule_code(schedule: Schedule) -> str:
    """How samples name the schedule they were taken under."""
    return " ".join(f"{name}={variant}" for name, variant in sorted(schedule.variants.items()))


def cost_key(schedule: Schedule, stage: str) -> str:
    """The table in which a stage's cost stands; a few stages do other work where another stage's variant differs."""
    variants = schedule.variants
    if stage == "head_draft" and variants[stage] == "after":
        return "head_draft of the path" if variants["tail_draft"] == "superset" else "head_draft of the bonus"
    if stage == "commit" and variants["head_draft"] == "ahead":
        return "commit and plant"
    if stage == "commit" and variants["tail_draft"] != "superset":
        return "commit and keep"
    is_same_work = stage in ("depth_prediction", "bookkeeping")  # whenever it is done
    return stage if is_same_work or stage not in variants else f"{stage}={variants[stage]}"


@dataclass(frozen=True)
class StageCosts:
    """Tables of costs: key -> sizes -> spread. ``executor`` overheads between stages are the key "loop"."""

    tables: Mapping[str, Mapping[tuple[int, ...], Spread]]
    plain_ms: float
    source: str = "the profile"  # what a sentence about a missing cost names

    @classmethod
    def from_samples(cls, frame: pd.DataFrame, source: str = "the profile") -> StageCosts:
        """Read samples with ``COLUMNS`` at one context; rows of depth 0 are plain steps. ``source`` is their file.

        Raises:
            YggdrasilError: there are no samples of iterations, or none of plain steps.
        """
        plain = frame.loc[frame["depth"] == 0, "iteration"]
        drafted = frame[frame["depth"] > 0]
        if plain.empty or drafted.empty:
            raise YggdrasilError(f"{source} holds no iterations; {_MEASURE}")
        collected: dict[str, dict[tuple[int, ...], list[Array]]] = {}
        for names, samples in drafted.groupby(["schedule", "width", "depth", "verify_width"]):
            code, width, depth, verify_width = cast("tuple[str, int, int, int]", names)
            schedule, shape = _schedule_of(code), TreeShape(int(width), int(depth), int(verify_width))
            for stage in (*schedule.predecessors, LOOP):
                key = LOOP if stage == LOOP else cost_key(schedule, stage)
                if key == "head_draft=ahead" and schedule.variants["tail_draft"] != "ahead":
                    continue  # the leaves' share is in it; the sum of its parts stands for it
                ran = samples[stage].dropna()
                if not ran.empty:
                    size = _SIZES.get(key, _any_shape)(shape)
                    collected.setdefault(key, {}).setdefault(size, []).append(ran.to_numpy())
        tables = {
            key: {size: _spread(np.concatenate(parts)) for size, parts in sorted(sizes.items())}
            for key, sizes in collected.items()
        }
        return cls(tables, _spread(plain.to_numpy()).mean_ms, source)

    def knows(self, schedule: Schedule) -> bool:
        """Whether all that its stages cost was measured: what runs ahead of time never is with a head."""
        keys = {cost_key(schedule, stage) for stage in schedule.predecessors} - {*_NO_COST}
        return {_DERIVED.get(key, key) for key in keys} <= self.tables.keys()

    def durations(
        self, schedule: Schedule, shapes: Sequence[TreeShape], leaf_shares: Array, quantile: Array | None = None
    ) -> dict[str, Array]:
        """Duration of every stage for every shape, [N]; ``LOOP`` has its own entry.

        ``leaf_shares`` [N] is how often the accepted path ends in a node of the last level: how often a conditional
        tail draft runs. With ``quantile`` [S], one shape and one of each stage's quantiles a draw.

        Raises:
            YggdrasilError: a cost was never measured.
        """
        draws = None if quantile is None else np.asarray(quantile)
        stages = [stage.name for stage in schedule.stages]
        durations = {}
        for i, stage in enumerate([*stages, LOOP]):
            at = None if draws is None else np.roll(draws, 7 * i)  # stages vary independently
            durations[stage] = self._stage(schedule, stage, shapes, leaf_shares, at)
        return durations

    def _stage(
        self, schedule: Schedule, stage: str, shapes: Sequence[TreeShape], leaf_shares: Array, at: Array | None
    ) -> Array:
        key = LOOP if stage == LOOP else cost_key(schedule, stage)
        if key in _NO_COST:
            return np.zeros(len(shapes) if at is None else len(at))
        if key in _DERIVED:
            narrowest = [shape._replace(width=min(self._sizes(_DERIVED[key]))[0]) for shape in shapes]
            return leaf_shares * self._values(_DERIVED[key], narrowest, at)
        values = self._values(key, shapes, at)
        if key == "head_draft=ahead" and schedule.variants["tail_draft"] == "superset":
            values = values + self._values("tail_draft=ahead", shapes, at)
        return values

    def _values(self, key: str, shapes: Sequence[TreeShape], at: Array | None) -> Array:
        table, size_of = self._sizes(key), _SIZES.get(key, _any_shape)
        try:
            if key == "draft_steps":
                spreads = [_along_depth(table, shape) for shape in shapes]
            else:
                spreads = [table[size_of(shape)] for shape in shapes]
        except KeyError as missing:
            raise YggdrasilError(
                f"{self.source} has no cost of {key!r} at {missing.args[0]}, only at {sorted(table)}; {_MEASURE}"
            ) from None
        if at is None:
            return np.array([spread.mean_ms for spread in spreads])
        return np.interp(at, _QUANTILES, spreads[0].quantiles_ms)

    def _sizes(self, key: str) -> Mapping[tuple[int, ...], Spread]:
        if key not in self.tables:
            raise YggdrasilError(f"{self.source} has no cost of {key!r}; {_MEASURE}")
        return self.tables[key]


def _along_depth(table: Mapping[tuple[int, ...], Spread], shape: TreeShape) -> Spread:
    """The line through the shallowest and the deepest measured draft of this width; KeyError where there is none."""
    depths = [depth for width, depth in table if width == shape.width]
    if not depths:
        raise KeyError((shape.width, shape.depth))
    low, high = min(depths), max(depths)
    first, last = table[shape.width, low], table[shape.width, high]
    share = (shape.depth - low) / (high - low) if high > low else 0.0
    if high == low:  # one depth measured: every level costs the same
        scale = max(shape.depth - 1, 0.2) / max(low - 1, 0.2)
        return Spread(first.mean_ms * scale, first.quantiles_ms * scale)
    floor = 0.2 * first.mean_ms / low  # a line may cross zero, a cost may not
    mean = max(first.mean_ms + share * (last.mean_ms - first.mean_ms), floor)
    near = first if abs(shape.depth - low) < abs(shape.depth - high) else last
    return Spread(mean, near.quantiles_ms * (mean / near.mean_ms))


def _spread(samples: Array) -> Spread:
    ordered = np.sort(samples)
    cut = len(ordered) // 20
    return Spread(float(ordered[cut : len(ordered) - cut].mean()), np.quantile(ordered, _QUANTILES))


def _schedule_of(code: str) -> Schedule:
    return Schedule.of(dict(part.split("=", 1) for part in code.split()))
