"""The data of a report as tables, read from a plan, its profile and its predictor. Draws nothing.

Every table always exists; a table without data is empty.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from yggdrasil.artifacts import profile_of_plan, shown
from yggdrasil.calibration.measurement.steps import COLUMNS as SAMPLE_COLUMNS
from yggdrasil.drafters.statistics.drafter import table_origin
from yggdrasil.policy.objective import objective_value
from yggdrasil.predictor.bundle import Learned
from yggdrasil.reports.folder import read_csv_if_any
from yggdrasil.reports.reasons import considered, costs, reasons
from yggdrasil.reports.search_facts import SearchFacts
from yggdrasil.scheduling.plan import Plan
from yggdrasil.scheduling.search import AcceptedLengths
from yggdrasil.tree.shape import TreeShape

TREE_COLUMNS = ("prompt", "iteration", "node", "parent", "depth", "role", "text", "probability", "bonus", "shape")


@dataclass(frozen=True)
class Facts:
    """A plan, its folders, and example iterations in ``trees`` (``TREE_COLUMNS``)."""

    plan: Plan
    learned: Learned | None  # tables of the plan's drafter; None if no model drafts or the plan is provisional
    profile: Path
    predictor: Path
    trees: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(TREE_COLUMNS)))

    @classmethod
    def load(cls, plan_path: Path) -> "Facts":
        """Load the data of a report: a plan, its predictor and its profile (measured times), which may be missing.

        Raises:
            ArtifactError: the plan or the predictor is missing or damaged.
        """
        plan = Plan.load(plan_path)
        predictor = plan_path.parent / plan.predictor
        profile = profile_of_plan(plan_path, predictor)
        trees = read_csv_if_any(profile / "example_trees.csv", "example-trees", TREE_COLUMNS)
        learned = None if plan.drafter is None or plan.is_provisional else Learned.load(predictor)
        return cls(plan, learned, profile, predictor, trees)

    @property
    def missing_profile(self) -> str | None:
        """A sentence that the profile (measured times) is missing; None if it exists or the plan is provisional."""
        if self.profile.is_dir() or self.plan.is_provisional:
            return None
        return (
            f"there is no profile {shown(self.profile)}, so tables of what was measured are left out; to have them, "
            "run `yggdrasil calibrate` with this name again"
        )

    @property
    def table(self) -> str | None:
        """One line that names the shipped text counted in the n-gram table; None if there is no table or no such text.

        Raises:
            ArtifactError: the table is damaged.
        """
        return table_origin(self.predictor)

    def reasons(self) -> list[str]:
        """Return sentences that explain why the plan was chosen, the most important first."""
        return reasons(self.plan)

    @cached_property
    def lengths(self) -> AcceptedLengths:
        """Accepted lengths of the drafter's tree shapes; ``learned`` must not be None."""
        assert self.learned is not None, "no pass drafts here"
        return AcceptedLengths(self.learned.mean_survival, self.learned.ratios, self.plan.shapes.verify_widths)

    @cached_property
    def search(self) -> SearchFacts:
        """Tables of the plan's schedule search; they are empty if the plan was not searched."""
        return SearchFacts(self.plan.search, None if self.plan.search is None else self.lengths, self.profile)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return all tables of the report by name, in the order of the page. A table without data is empty.

        Raises:
            ArtifactError: a file of the profile is damaged.
        """
        return {
            "considered": considered(self.plan),
            "costs": costs(self.plan),
            "latency": self.latency(),
            "iterations": self.iterations(),
            "prediction": self.search.prediction(),
            "objective": self.objective(),
            "timelines": self.search.timelines(),
            "ranking": self.search.ranking(),
            "trees": self.trees,
        }

    def latency(self) -> pd.DataFrame:
        """Return measured step times, one row per model, context and width.

        Columns: model ("target" or "drafter"), context (tokens in the cache), width (rows of the step: 1 for a plain
        step, else the verify or draft width), ms (the median), p10_ms, p90_ms (10th and 90th percentile), samples
        (their number).

        Raises:
            ArtifactError: the file of the samples is damaged.
        """
        frame = read_csv_if_any(self.profile / "stage_samples.csv", "stage-samples", SAMPLE_COLUMNS)
        if frame.empty:
            return pd.DataFrame(columns=["model", "context", "width", "ms", "p10_ms", "p90_ms", "samples"])
        target = frame[frame["stage"] == "pass"].assign(model="target", size=frame["verify_width"])
        draft = frame[frame["stage"] == "grow"].assign(model="drafter", size=frame["width"])
        rows = []
        for (model, context, width), part in pd.concat([target, draft]).groupby(["model", "context", "size"]):
            low, middle, high = np.quantile(part["ms"], [0.1, 0.5, 0.9])
            rows.append((model, context, width, middle, low, high, len(part)))
        return pd.DataFrame(rows, columns=["model", "context", "width", "ms", "p10_ms", "p90_ms", "samples"])

    def iterations(self) -> pd.DataFrame:
        """Return the milliseconds of each stage per iteration, one row per stage.

        Columns: stage, ms_an_iteration, share (0 to 1). The times are those measured for the search's chosen plan, else
        medians over the profile's mixed tree shapes.

        Raises:
            ArtifactError: a file is damaged.
        """
        timelines = self.search.timelines()
        own = timelines[(timelines["plan"] == "chosen") & (timelines["kind"] == "measured")]
        if not own.empty:
            spent = (own["end_ms"] - own["start_ms"]).astype(float)
            return pd.DataFrame({"stage": own["stage"], "ms_an_iteration": spent, "share": spent / spent.sum()})
        frame = read_csv_if_any(self.profile / "stage_samples.csv", "stage-samples", SAMPLE_COLUMNS)
        if frame.empty:
            return pd.DataFrame(columns=["stage", "ms_an_iteration", "share"])
        trees = frame[(frame["context"] == frame["context"].min()) & (frame["depth"] > 0)]
        drafted = trees[trees["width"] > 0] if (trees["width"] > 0).any() else trees
        drafted = drafted[~drafted["stage"].isin(["overhead", "iteration", "plain"])]
        mean = drafted.groupby("stage", sort=False)["ms"].median().rename("ms_an_iteration").reset_index()
        table: pd.DataFrame = mean.assign(share=mean["ms_an_iteration"] / mean["ms_an_iteration"].sum())
        return table

    def objective(self) -> pd.DataFrame:
        """Return the predicted speed of every drafted tree shape at the plan's first context length, one row per shape.

        Columns: width, depth, verify_width, aal, iteration_ms, ms_per_token, speedup (over plain decoding). The table
        is empty if no model drafts.
        """
        costs = self.plan.costs[0].steps()
        rows = []
        for width in () if self.learned is None else self.lengths.draft_widths:
            for depth in range(1, self.lengths.max_depth + 1):
                for verify_width in self.lengths.verify_widths:
                    shape = TreeShape(width, depth, verify_width)
                    aal, ms = self.lengths.aal(shape), costs.iteration_ms(*shape)
                    value = objective_value(aal, ms)
                    rows.append((*shape, aal, ms, 1.0 / value, value * costs.plain_ms))
        names = [*TreeShape._fields, "aal", "iteration_ms", "ms_per_token", "speedup"]
        return pd.DataFrame(rows, columns=names)

    def best_tree(self) -> TreeShape:
        """Return the tree shape that the search chose, else the fastest predicted one with a verify width above 1."""
        search = self.plan.search
        chosen = search.entry(search.chosen) if search is not None else None
        if chosen is not None and chosen.shape[1]:
            return TreeShape(*chosen.shape)
        table = self.objective().sort_values("ms_per_token")
        return first_shape(table[table["verify_width"] > 1])

    def best_pruned_tree(self) -> TreeShape:
        """Return the fastest predicted tree shape that drafts at least twice as many nodes as it verifies.

        If there is none, return ``best_tree``.
        """
        table = self.objective().sort_values("ms_per_token")
        pruned = table[(table["verify_width"] > 1) & (table["width"] * table["depth"] >= 2 * table["verify_width"])]
        return self.best_tree() if pruned.empty else first_shape(pruned)


def first_shape(table: pd.DataFrame) -> TreeShape:
    """Return the tree shape (columns width, depth, verify_width) of the first row of ``table``."""
    row = table.iloc[0]
    return TreeShape(int(row["width"]), int(row["depth"]), int(row["verify_width"]))
