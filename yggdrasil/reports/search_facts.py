"""The results of a schedule search as tables: predicted and measured plans, and their timelines."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from yggdrasil.artifacts import shown
from yggdrasil.calibration.measurement.schedules import PLAN_COLUMNS, at_profiles_speed
from yggdrasil.reports.folder import read_csv_if_any
from yggdrasil.reports.schedules import changed_variants
from yggdrasil.scheduling.costs import COLUMNS as COST_COLUMNS
from yggdrasil.scheduling.costs import LOOP, StageCosts
from yggdrasil.scheduling.plan import Searched, SearchResult
from yggdrasil.scheduling.search import AcceptedLengths
from yggdrasil.scheduling.stages import STAGES, Schedule
from yggdrasil.scheduling.timeline import predict_timeline
from yggdrasil.tree.shape import TreeShape


class SearchFacts:
    """Tables of one plan's search; they are empty if ``result`` is None.

    ``timelines`` is also empty if ``profile`` has no stage samples, or ``lengths``, the accepted lengths of the
    drafter's trees, is None.
    """

    def __init__(self, result: SearchResult | None, lengths: AcceptedLengths | None, profile: Path) -> None:
        self._result, self._lengths, self._profile = result, lengths, profile

    @cached_property
    def _costs(self) -> StageCosts | None:
        """Costs of the stages from the search's samples; None if there are no samples."""
        path = self._profile / "schedule_samples.csv"
        frame = read_csv_if_any(path, "schedule-samples", COST_COLUMNS, version=2)
        return None if frame.empty else StageCosts.from_samples(frame, shown(path))

    def prediction(self) -> pd.DataFrame:
        """Return predicted and measured times of every tree plan that the search measured, one row per plan, as ranked.

        Columns: plan, predicted_iteration_ms, measured_iteration_ms, error (their ratio minus 1),
        predicted_ms_per_token, measured_ms_per_token. Plain decoding is left out.
        """
        columns = ["plan", "predicted_iteration_ms", "measured_iteration_ms", "error", "predicted_ms_per_token",
                   "measured_ms_per_token"]  # fmt: skip
        rows = [
            (
                entry.name, entry.predicted_iteration_ms, entry.measured_iteration_ms,
                entry.predicted_iteration_ms / entry.measured_iteration_ms - 1, entry.predicted_ms_per_token,
                entry.measured_ms_per_token,
            )
            for entry in self._entries
            if entry.measured_iteration_ms and entry.shape[1]  # predictions are scaled by the plain steps
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=columns)

    def timelines(self) -> pd.DataFrame:
        """Return when the stages of one iteration run, for the naive and the chosen plan, one row per stage.

        Columns: plan ("naive" or "chosen"), kind ("predicted" or "measured"), stage, resource, start_ms, end_ms.

        Raises:
            ArtifactError: the file of the samples is damaged.
        """
        columns = ["plan", "kind", "stage", "resource", "start_ms", "end_ms"]
        search, lengths, costs = self._result, self._lengths, self._costs
        if search is None or lengths is None or costs is None:
            return pd.DataFrame(columns=columns)
        rows: list[tuple[Any, ...]] = []
        measured = read_csv_if_any(self._profile / "schedule_measured.csv", "schedule-measured", PLAN_COLUMNS)
        for title, entry in (("naive", search.entry("naive")), ("chosen", search.entry(search.chosen))):
            if entry is None:
                continue
            schedule, shape = Schedule.parse(entry.stages), TreeShape(*entry.shape)
            share = np.array([lengths.leaf_share(shape)])
            predicted = {stage: float(ms[0]) for stage, ms in costs.durations(schedule, [shape], share).items()}
            rows += _gantt(title, "predicted", schedule, predicted)
            if not measured.empty and entry.name in set(measured["plan"]):
                rows += _gantt(title, "measured", schedule, _measured_stages(measured, entry.name, costs.plain_ms))
        return pd.DataFrame(rows, columns=columns)

    def ranking(self) -> pd.DataFrame:
        """Return all plans of the search, one row per plan in the order of ``SearchResult.entries``.

        Columns: rank (from 1), plan, chosen, differs_in (changed stage variants), width, depth, verify_width,
        predicted_aal, measured_aal, predicted_ms_per_token, measured_ms_per_token, measured_speedup (over plain
        decoding). Measured values are missing for plans that were only predicted.
        """
        rows = []
        for place, entry in enumerate(self._entries, start=1):
            width, depth, verify_width = entry.shape
            rows.append(
                {
                    "rank": place,
                    "plan": entry.name,
                    "chosen": self._result is not None and entry.name == self._result.chosen,
                    "differs_in": "plain steps" if depth == 0 else changed_variants(entry),
                    "width": width,
                    "depth": depth,
                    "verify_width": verify_width,
                    "predicted_aal": entry.predicted_aal,
                    "measured_aal": entry.measured_aal,
                    "predicted_ms_per_token": entry.predicted_ms_per_token,
                    "measured_ms_per_token": entry.measured_ms_per_token,
                    "measured_speedup": entry.measured_speedup,
                }
            )
        return pd.DataFrame(rows)

    @property
    def _entries(self) -> list[Searched]:
        return [] if self._result is None else self._result.entries


def _gantt(title: str, kind: str, schedule: Schedule, durations: dict[str, float]) -> list[tuple[Any, ...]]:
    timeline = predict_timeline(schedule, durations, "in-order")
    resource = {stage.name: stage.resource for stage in schedule.stages}
    rows = [(title, kind, e.stage, resource[e.stage], e.start_ms, e.end_ms) for e in timeline.events]
    end = float(timeline.makespan_ms)
    return [*rows, (title, kind, "between stages", "host", end, end + durations[LOOP])]


def _measured_stages(frame: pd.DataFrame, plan: str, plain_ms: float) -> dict[str, float]:
    """Return the median stage times of a measured plan, in milliseconds, scaled to the profile's speed."""
    scaled = at_profiles_speed(frame, plain_ms)
    usual = scaled[scaled["plan"] == plan][[*STAGES, LOOP]].median()
    return {str(name): float(ms) for name, ms in usual.items()}
