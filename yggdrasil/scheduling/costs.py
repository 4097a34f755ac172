"""Costs of the stages by variant and size, in milliseconds, from measured samples. Uses pandas, no torch.

Costs are means without the lowest and highest 5 %, because means add up to an iteration and medians do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from yggdrasil.errors import YggdrasilError
from yggdrasil.scheduling.stages import STAGES, Schedule
from yggdrasil.tree.shape import TreeShape

if TYPE_CHECKING:
    import pandas as pd

Array: TypeAlias = npt.NDArray[np.floating[Any]]
LOOP = "loop"  # time of an iteration between stages
TIMES = ("iteration", LOOP, *STAGES)  # milliseconds; NaN for a stage that did not run
COLUMNS = ("context", "cycle", "schedule", "width", "depth", "verify_width", *TIMES)  # one row per iteration
_MEASURE = "run `yggdrasil search` with --prompts and --measure-again to measure it"


def _any_shape(_: TreeShape) -> tuple[int, ...]:
    return ()


# The sizes of a shape on which a cost depends. Other costs are the same for every shape.
_SIZES: dict[str, Callable[[TreeShape], tuple[int, ...]]] = {
    "draft_steps": lambda shape: (shape.width, shape.depth),
    "verify": lambda shape: (shape.verify_width,),
    "accept=device": lambda shape: (shape.verify_width,),
    "accept=host": lambda shape: (shape.verify_width,),
    "head_draft=ahead": lambda shape: (shape.verify_width,),
    "tail_draft=ahead": lambda shape: (shape.width,),
}
_NO_COST = ("tail_draft=superset",)
_DERIVED = {"tail_draft=conditional": "tail_draft=ahead"}  # a share of another cost


def schedule_code(schedule: Schedule) -> str:
    """Return a schedule's variants as text, such as "accept=host bookkeeping=inline ...".

    It has ``stage=variant`` for each stage with several variants, sorted by stage. Samples of a profile are stored
    under this text, so it must not change.
    """
    return " ".join(f"{name}={variant}" for name, variant in sorted(schedule.variants.items()))


def cost_key(schedule: Schedule, stage: str) -> str:
    """Return the key of a stage's costs in ``StageCosts.tables``, such as ``"accept=host"``.

    The work of some stages depends on other stages' variants, and so does their key.

    Args:
        stage: name of one of the schedule's stages.
    """
    variants = schedule.variants
    if stage == "head_draft" and variants[stage] == "after":
        return "head_draft of the path" if variants["tail_draft"] == "superset" else "head_draft of the bonus"
    if stage == "commit" and variants["head_draft"] == "ahead":
        return "commit and plant"
    if stage == "commit" and variants["tail_draft"] != "superset":
        return "commit and keep"
    is_same_work = stage in ("depth_prediction", "bookkeeping")  # in every variant
    return stage if is_same_work or stage not in variants else f"{stage}={variants[stage]}"


def _measured_keys(code: str) -> dict[str, str]:
    """Return stage -> cost key of the costs that samples of a schedule give, "loop" included.

    Args:
        code: the schedule's ``schedule_code``.
    """
    schedule = Schedule.of(dict(part.split("=", 1) for part in code.split()))
    keys = {stage: cost_key(schedule, stage) for stage in schedule.predecessors}
    if keys["head_draft"] == "head_draft=ahead" and schedule.variants["tail_draft"] != "ahead":
        del keys["head_draft"]  # its samples include the tail draft; ``StageCosts._stage`` adds both instead
    return {**keys, LOOP: LOOP}


@dataclass(frozen=True)
class StageCosts:
    """Measured costs of the stages: key (``cost_key``) -> sizes -> milliseconds.

    The sizes are those on which a cost depends, such as (draft width, depth). The executor's time between stages has
    the key "loop".
    """

    tables: Mapping[str, Mapping[tuple[int, ...], float]]
    plain_ms: float
    source: str = "the profile"  # name of the samples' file in error messages

    @classmethod
    def from_samples(cls, frame: pd.DataFrame, source: str = "the profile") -> StageCosts:
        """Build the cost tables from timed iterations at one context length: means without the lowest and highest 5 %.

        Args:
            frame: one row per iteration with the columns ``COLUMNS``; rows of depth 0 are plain steps.
            source: name of the samples' file, for error messages.

        Raises:
            YggdrasilError: there are no samples of drafted iterations, or none of plain steps.
        """
        plain = frame.loc[frame["depth"] == 0, "iteration"]
        drafted = frame[frame["depth"] > 0]
        if plain.empty or drafted.empty:
            raise YggdrasilError(f"{source} holds no iterations; {_MEASURE}")
        columns = {stage: drafted[stage].to_numpy(dtype=float) for stage in (*STAGES, LOOP)}
        keys_of = {code: _measured_keys(code) for code in drafted["schedule"].unique()}
        collected: dict[str, dict[tuple[int, ...], list[Array]]] = {}
        for names, rows in sorted(drafted.groupby(["schedule", "width", "depth", "verify_width"]).indices.items()):
            code, width, depth, verify_width = cast("tuple[str, int, int, int]", names)
            shape = TreeShape(int(width), int(depth), int(verify_width))
            for stage, key in keys_of[code].items():
                samples = columns[stage][rows]
                ran = samples[~np.isnan(samples)]
                if len(ran):
                    size = _SIZES.get(key, _any_shape)(shape)
                    collected.setdefault(key, {}).setdefault(size, []).append(ran)
        tables = {
            key: {size: _trimmed_mean(np.concatenate(parts)) for size, parts in sorted(sizes.items())}
            for key, sizes in collected.items()
        }
        return cls(tables, _trimmed_mean(plain.to_numpy()), source)

    def durations(self, schedule: Schedule, shapes: Sequence[TreeShape], leaf_shares: Array) -> dict[str, Array]:
        """Return the milliseconds of each stage for N tree shapes: stage name -> [N].

        The key "loop" (``LOOP``) has the time between stages.

        Args:
            leaf_shares: [N] probability that the accepted path has as many nodes as draft steps: then a conditional
                tail draft runs, which computes the leaf's KV entry.

        Raises:
            YggdrasilError: a cost was not measured.
        """
        stages = [stage.name for stage in schedule.stages]
        return {stage: self._stage(schedule, stage, shapes, leaf_shares) for stage in [*stages, LOOP]}

    def _stage(self, schedule: Schedule, stage: str, shapes: Sequence[TreeShape], leaf_shares: Array) -> Array:
        key = LOOP if stage == LOOP else cost_key(schedule, stage)
        if key in _NO_COST:
            return np.zeros(len(shapes))
        if key in _DERIVED:
            narrowest = [shape._replace(width=min(self._sizes(_DERIVED[key]))[0]) for shape in shapes]
            return leaf_shares * self._values(_DERIVED[key], narrowest)
        values = self._values(key, shapes)
        if key == "head_draft=ahead" and schedule.variants["tail_draft"] == "superset":
            values = values + self._values("tail_draft=ahead", shapes)
        return values

    def _values(self, key: str, shapes: Sequence[TreeShape]) -> Array:
        table, size_of = self._sizes(key), _SIZES.get(key, _any_shape)
        try:
            if key == "draft_steps":
                return np.array([_along_depth(table, shape) for shape in shapes])
            return np.array([table[size_of(shape)] for shape in shapes])
        except KeyError as missing:
            raise YggdrasilError(
                f"{self.source} has no cost of {key!r} at {missing.args[0]}, only at {sorted(table)}; {_MEASURE}"
            ) from None

    def _sizes(self, key: str) -> Mapping[tuple[int, ...], float]:
        if key not in self.tables:
            raise YggdrasilError(f"{self.source} has no cost of {key!r}; {_MEASURE}")
        return self.tables[key]


def _along_depth(table: Mapping[tuple[int, ...], float], shape: TreeShape) -> float:
    """Interpolate linearly between the shallowest and the deepest measured draft of the shape's width.

    Raises:
        KeyError: no draft of this width was measured.
    """
    depths = [depth for width, depth in table if width == shape.width]
    if not depths:
        raise KeyError((shape.width, shape.depth))
    low, high = min(depths), max(depths)
    first, last = table[shape.width, low], table[shape.width, high]
    if high == low:  # only one depth measured: cost proportional to the levels
        return first * max(shape.depth - 1, 0.2) / max(low - 1, 0.2)
    share = (shape.depth - low) / (high - low)
    return max(first + share * (last - first), 0.2 * first / low)  # extrapolated costs must stay positive


def _trimmed_mean(samples: Array) -> float:
    ordered = np.sort(samples)
    cut = len(ordered) // 20
    return float(ordered[cut : len(ordered) - cut].mean())
