"""The facts of a report: what a name's profile, predictor and plan say, as tables. No figures here.

Every table is there whatever the folder holds; one without data is empty.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from yggdrasil.artifacts import parse_json, read_csv, shown
from yggdrasil.calibration.backends import KEYS as BACKEND_KEYS
from yggdrasil.calibration.backends import compare_backends
from yggdrasil.calibration.measure import COLUMNS as SAMPLE_COLUMNS
from yggdrasil.calibration.measure import without_drift
from yggdrasil.calibration.schedules import PLAN_COLUMNS, at_profiles_speed
from yggdrasil.calibration.written import REPORT_VERSION
from yggdrasil.errors import YggdrasilError
from yggdrasil.predictor.bundle import Learned
from yggdrasil.reports.schedules import changed_variants
from yggdrasil.scheduling.costs import COLUMNS as COST_COLUMNS
from yggdrasil.scheduling.costs import LOOP, StageCosts
from yggdrasil.scheduling.plan import Plan, Searched
from yggdrasil.scheduling.search import AcceptedLengths, predict_ms
from yggdrasil.scheduling.stages import STAGES, Schedule
from yggdrasil.scheduling.timeline import lay_out
from yggdrasil.tree.objective import TreeShape

PREDICTOR_COLUMNS = ("reads", "depth", "scorer", "auc", "brier")
CURVE_COLUMNS = ("reads", "depth", "predicted", "reached", "positions")
TREE_COLUMNS = ("prompt", "iteration", "node", "parent", "depth", "role", "text", "probability", "bonus", "shape")


@dataclass(frozen=True)
class Facts:
    """One plan with its folders; ``trees`` holds example iterations (``TREE_COLUMNS``)."""

    plan: Plan
    learned: Learned | None  # of the plan's drafter
    profile: Path
    predictor: Path
    trees: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(TREE_COLUMNS)))

    @classmethod
    def load(cls, plan_path: Path) -> "Facts":
        """Read what lies beside a plan; ArtifactError where plan or predictor is missing or damaged."""
        plan = Plan.load(plan_path)
        predictor = plan_path.parent / plan.predictor
        profile = plan_path.parents[2] / "profiles" / plan_path.parent.name / plan_path.stem
        if not profile.is_dir():  # a plan saved under another name: the predictor's name is the profile's
            profile = plan_path.parents[2] / "profiles" / predictor.resolve().parent.name / plan_path.stem
        trees = _optional(profile / "example_trees.csv", "example-trees", TREE_COLUMNS)
        learned = None if plan.drafter is None else Learned.load(predictor)
        return cls(plan, learned, profile, predictor, trees)

    @cached_property
    def lengths(self) -> AcceptedLengths:
        assert self.learned is not None, "no pass drafts here"
        return AcceptedLengths(self.learned.mean_survival, self.learned.ratios, self.plan.shapes.verify_widths)

    @cached_property
    def stage_costs(self) -> StageCosts | None:
        """Costs of all variants, where a search has measured them."""
        path = self.profile / "schedule_samples.csv"
        frame = _optional(path, "schedule-samples", COST_COLUMNS, version=2)
        return None if frame.empty else StageCosts.from_samples(frame, shown(path))

    def tables(self) -> dict[str, pd.DataFrame]:
        """Every table by name, in the order of the page."""
        return {
            "latency": self.latency(),
            "roofline": self.roofline(),
            "backends": self.backends(),
            "other_ways": self.other_ways(),
            "iterations": self.iterations(),
            "prediction": self.prediction(),
            "benchmarks": self.benchmarks(),
            "objective": self.objective(),
            "predictor": self.predictor_scores(),
            "calibration": self.calibration(),
            "acceptance": self.acceptance(),
            "timelines": self.timelines(),
            "ranking": self.ranking(),
            "variants": self.variants(),
            "trees": self.trees,
        }

    def latency(self) -> pd.DataFrame:
        """Milliseconds of a step by model, context and width: median, first and last tenth."""
        frame = _optional(self.profile / "stage_samples.csv", "stage-samples", SAMPLE_COLUMNS)
        if frame.empty:
            return pd.DataFrame(columns=["model", "context", "width", "ms", "p10_ms", "p90_ms", "samples"])
        frame = without_drift(frame)
        verify = frame[(frame["stage"] == "verify") & (frame["depth"] > 0)].assign(model="target")
        verify = verify.assign(size=verify["verify_width"])
        plain = frame[(frame["stage"] == "plain") & (frame["depth"] == 0)].assign(model="target", size=1)
        deepest = max(int(frame["depth"].max()), 2)  # where what is not a step counts least
        draft = frame[(frame["stage"] == "draft_steps") & (frame["depth"] == deepest)].assign(model="drafter")
        draft = draft.assign(size=draft["width"], ms=draft["ms"] / (draft["depth"] - 1))
        rows = []
        for (model, context, width), part in pd.concat([plain, verify, draft]).groupby(["model", "context", "size"]):
            low, middle, high = np.quantile(part["ms"], [0.1, 0.5, 0.9])
            rows.append((model, context, width, middle, low, high, len(part)))
        return pd.DataFrame(rows, columns=["model", "context", "width", "ms", "p10_ms", "p90_ms", "samples"])

    def roofline(self) -> pd.DataFrame:
        """What `yggdrasil profile` found: measured steps and the least that this machine allows."""
        return _optional(self.profile / "roofline.csv", "roofline", ("model", "width", "context", "ms", "least_ms"))

    def backends(self) -> pd.DataFrame:
        """Each step as a package, which decodes, and eagerly; medians."""
        samples = _optional(self.profile / "backend_samples.csv", "backend-samples", (*BACKEND_KEYS, "backend", "ms"))
        return samples if samples.empty else compare_backends(samples)

    def other_ways(self) -> pd.DataFrame:
        """Ways to build the target's steps that do not decode, against the one that does."""
        return _optional(self.profile / "variants.csv", "variants", ("variant", "width", "ms", "against_own"))

    def iterations(self) -> pd.DataFrame:
        """Milliseconds of an iteration by stage: of the chosen plan, else of whole requests, else of mixed shapes."""
        timelines = self.timelines()
        own = timelines[(timelines["plan"] == "chosen") & (timelines["kind"] == "measured")]
        if not own.empty:
            spent = (own["end_ms"] - own["start_ms"]).astype(float)
            return pd.DataFrame({"stage": own["stage"], "ms_an_iteration": spent, "share": spent / spent.sum()})
        found = _optional(self.profile / "iterations.csv", "iterations", ("stage", "ms_an_iteration"))
        if not found.empty:
            return found
        frame = _optional(self.profile / "stage_samples.csv", "stage-samples", SAMPLE_COLUMNS)
        if frame.empty:
            return pd.DataFrame(columns=["stage", "ms_an_iteration", "share"])
        drafted = frame[(frame["depth"] > 0) & (frame["context"] == frame["context"].min())]
        drafted = drafted[~drafted["stage"].isin(["overhead", "iteration", "plain"])]
        mean = drafted.groupby("stage", sort=False)["ms"].median().rename("ms_an_iteration").reset_index()
        table: pd.DataFrame = mean.assign(share=mean["ms_an_iteration"] / mean["ms_an_iteration"].sum())
        return table

    def prediction(self) -> pd.DataFrame:
        """Predicted and measured figures of every plan that a search measured."""
        columns = ["plan", "predicted_iteration_ms", "measured_iteration_ms", "error", "predicted_ms_per_token",
                   "measured_ms_per_token"]  # fmt: skip
        rows = [
            (
                entry.name, entry.predicted_iteration_ms, entry.measured_iteration_ms,
                entry.predicted_iteration_ms / entry.measured_iteration_ms - 1, entry.predicted_ms_per_token,
                entry.measured_ms_per_token,
            )
            for entry in self._entries
            if entry.measured_iteration_ms and entry.shape[1]  # plain steps are what predictions are scaled by
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=columns)

    def benchmarks(self) -> pd.DataFrame:
        """Benches against plain decoding that were kept beside the profile."""
        rows = []
        for path in sorted(self.profile.glob("bench-*.json")):
            record = parse_json(path.read_text(encoding="utf-8"))
            speedup = record.get("speedup") or {}
            rows.append(
                {
                    "prompts": path.stem.removeprefix("bench-"),
                    "matched": f"{record.get('matched')} of {record.get('prompts')}",
                    "aal": record.get("aal"),
                    "plain_ms": record.get("baseline_tpot_ms"),
                    "ours_ms": record.get("tpot_ms"),
                    "speedup": speedup.get("median"),
                    "low": speedup.get("low"),
                    "high": speedup.get("high"),
                    "predicted_speedup": record.get("predicted_speedup"),
                    "repeats": record.get("repeats"),
                }
            )
        return pd.DataFrame(rows)

    def objective(self) -> pd.DataFrame:
        """AAL, iteration and speed-up over a plain step (equation 3 with overhead) of every drafted shape."""
        costs = self.plan.costs[0].steps()
        rows = []
        for width in () if self.learned is None else self.lengths.draft_widths:
            for depth in range(1, self.lengths.max_depth + 1):
                for verify_width in self.lengths.verify_widths:
                    shape = TreeShape(width, depth, verify_width)
                    aal, ms = self.lengths.aal(shape), costs.iteration_ms(*shape)
                    rows.append((*shape, aal, ms, ms / aal, aal * costs.plain_ms / ms))
        names = [*TreeShape._fields, "aal", "iteration_ms", "ms_per_token", "speedup"]
        return pd.DataFrame(rows, columns=names)

    def best_tree(self) -> TreeShape:
        """The chosen shape of the search, else the fastest that verifies more than the root."""
        search = self.plan.search
        chosen = search.entry(search.chosen) if search is not None else None
        if chosen is not None and chosen.shape[1]:
            return TreeShape(*chosen.shape)
        table = self.objective().sort_values("ms_per_token")
        row = table[table["verify_width"] > 1].iloc[0]
        return TreeShape(int(row["width"]), int(row["depth"]), int(row["verify_width"]))

    def best_pruned_tree(self) -> TreeShape:
        """The fastest shape of which at least twice as much is drafted as verified, else ``best_tree``."""
        table = self.objective().sort_values("ms_per_token")
        pruned = table[(table["verify_width"] > 1) & (table["width"] * table["depth"] >= 2 * table["verify_width"])]
        if pruned.empty:
            return self.best_tree()
        row = pruned.iloc[0]
        return TreeShape(int(row["width"]), int(row["depth"]), int(row["verify_width"]))

    def predictor_scores(self) -> pd.DataFrame:
        """AUC and Brier score of the depth predictor and its rivals by depth, on held-out documents."""
        return _optional(self.predictor / "report.csv", "predictor-report", PREDICTOR_COLUMNS, REPORT_VERSION)

    def calibration(self) -> pd.DataFrame:
        """What the depth predictors said on held-out documents, in ten parts by what they said, and what came true."""
        return _optional(self.predictor / "calibration.csv", "predictor-calibration", CURVE_COLUMNS)

    def acceptance(self) -> pd.DataFrame:
        """The monotone map from the drafter's probability to acceptance."""
        if self.learned is None:
            return pd.DataFrame(columns=["drafter_probability", "acceptance"])
        knots = np.asarray(self.learned.acceptance.knots, dtype=np.float64)
        probability = np.exp(np.linspace(-12.0, 0.0, len(knots)))
        return pd.DataFrame({"drafter_probability": probability, "acceptance": np.exp(knots)})

    def timelines(self) -> pd.DataFrame:
        """Stages of an iteration, naive and chosen plan, predicted and measured, with start and end."""
        columns = ["plan", "kind", "stage", "resource", "start_ms", "end_ms"]
        search, costs = self.plan.search, self.stage_costs
        if search is None or costs is None:
            return pd.DataFrame(columns=columns)
        rows: list[tuple[Any, ...]] = []
        measured = _optional(self.profile / "schedule_measured.csv", "schedule-measured", PLAN_COLUMNS)
        for title, entry in (("naive", search.entry("naive")), ("chosen", search.entry(search.chosen))):
            if entry is None:
                continue
            schedule, shape = Schedule.parse(entry.stages), TreeShape(*entry.shape)
            share = np.array([self.lengths.leaf_share(shape)])
            predicted = {stage: float(ms[0]) for stage, ms in costs.durations(schedule, [shape], share).items()}
            rows += _gantt(title, "predicted", schedule, predicted)
            if not measured.empty and entry.name in set(measured["plan"]):
                rows += _gantt(title, "measured", schedule, _measured_stages(measured, entry.name, costs.plain_ms))
        return pd.DataFrame(rows, columns=columns)

    def ranking(self) -> pd.DataFrame:
        """All plans of the search with what they promise and what they gave."""
        rows = []
        for place, entry in enumerate(self._entries, start=1):
            width, depth, verify_width = entry.shape
            rows.append(
                {
                    "rank": place,
                    "plan": entry.name,
                    "chosen": self.plan.search is not None and entry.name == self.plan.search.chosen,
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

    def variants(self) -> pd.DataFrame:
        """What each variant of a stage would change in the chosen plan's predicted iteration, as far as is known."""
        columns = ["stage", "variant", "chosen", "iteration_ms", "against_chosen_ms", "against_chosen"]
        search, costs = self.plan.search, self.stage_costs
        chosen = search.entry(search.chosen) if search is not None else None
        if chosen is None or costs is None:
            return pd.DataFrame(columns=columns)
        own, shape = Schedule.parse(chosen.stages).variants, TreeShape(*chosen.shape)
        rows = []
        base = float(predict_ms(Schedule.of(own), [shape], costs, self.lengths, "in-order")[0])
        for stage, variant in (
            (name, each) for name, choices in STAGES.items() if len(choices) > 1 for each in choices
        ):
            schedule = Schedule.of({**own, stage: variant})
            if not costs.knows(schedule):
                continue
            ms = float(predict_ms(schedule, [shape], costs, self.lengths, "in-order")[0])
            rows.append((stage, variant, own[stage] == variant, ms, ms - base, ms / base - 1))
        return pd.DataFrame(rows, columns=columns)

    @property
    def _entries(self) -> list[Searched]:
        return [] if self.plan.search is None else self.plan.search.entries


def _gantt(title: str, kind: str, schedule: Schedule, durations: dict[str, float]) -> list[tuple[Any, ...]]:
    timeline = lay_out(schedule, durations, "in-order")
    resource = {stage.name: stage.resource for stage in schedule.stages}
    rows = [(title, kind, e.stage, resource[e.stage], e.start_ms, e.end_ms) for e in timeline.events]
    end = float(timeline.makespan_ms)
    return [*rows, (title, kind, "between stages", "host", end, end + durations[LOOP])]


def _measured_stages(frame: pd.DataFrame, plan: str, plain_ms: float) -> dict[str, float]:
    """Usual stage times of a measured plan at the profile's speed."""
    scaled = at_profiles_speed(frame, plain_ms)
    usual = scaled[scaled["plan"] == plan][[*STAGES, LOOP]].median()
    return {str(name): float(ms) for name, ms in usual.items()}


def _optional(path: Path, kind: str, columns: tuple[str, ...], version: int = 1) -> pd.DataFrame:
    """A table, empty where there is no such file; a damaged one is an error."""
    return read_csv(path, kind, version, columns) if path.exists() else pd.DataFrame(columns=list(columns))


def write_tables(tables: dict[str, pd.DataFrame], folder: Path) -> None:
    """Every table as plain CSV; YggdrasilError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            table.to_csv(folder / f"{name}.csv", index=False)
    except OSError as error:
        raise YggdrasilError(f"cannot write the tables to {folder} ({error.strerror}); give another folder") from error
