"""Prints the report's tables in a terminal."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from yggdrasil.reports.facts import Facts
from yggdrasil.reports.schedules import verdict

if TYPE_CHECKING:
    import pandas as pd

TITLES = {
    "considered": "policies that were simulated",
    "costs": "target passes: costs in the plan",
    "latency": "step times, milliseconds",
    "iterations": "stages of the iterations that were timed (model-free trees with the most rows)",
    "prediction": "predicted and measured iterations",
    "objective": "the objective: the best shape of each draft width, and the AAL-optimal one",
    "timelines": "timelines, milliseconds",
    "ranking": "plans",
}
_STYLES = {"root": "bold", "accepted": "bold green", "verified": "yellow", "drafted": "dim"}


def show(facts: Facts, console: Console | None = None) -> None:
    """Print a report on ``facts`` to ``console`` (None: stdout): the plan and its reasons, tables, example trees."""
    console = console or Console()
    plan = facts.plan
    console.print(plan.describe(), style="bold", markup=False)
    for reason in facts.reasons():
        console.print(reason, markup=False)
    if facts.table is not None:
        console.print(facts.table, markup=False)
    if facts.missing_profile is not None:
        console.print(facts.missing_profile, markup=False)
    tables = facts.tables()
    if not tables["objective"].empty:
        tables["objective"] = _best_shapes(tables["objective"])
    for name, title in TITLES.items():
        if not tables[name].empty:
            console.print(_table(title, tables[name]))
    if plan.search is not None:
        for line in verdict(plan.search):
            console.print(line)
    for (prompt, shape, iteration), part in facts.trees.groupby(["prompt", "shape", "iteration"]):
        console.print(_tree(f"prompt {prompt}, tree {shape}, iteration {iteration}", part))


def _best_shapes(table: "pd.DataFrame") -> "pd.DataFrame":
    rows = {*table.groupby("width")["speedup"].idxmax(), table["aal"].idxmax()}
    return table.loc[sorted(rows)]


def _table(title: str, table: "pd.DataFrame") -> Table:
    shown = Table(title=title, title_justify="left")
    for column in table.columns:
        shown.add_column(column.replace("_", " "))
    for row in table.itertuples(index=False):
        shown.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    return shown


def _tree(title: str, part: "pd.DataFrame") -> Tree:
    branches: dict[int, Tree] = {}
    root = Tree(title)
    for row in part.to_dict("records"):
        label = f"[{_STYLES[row['role']]}]{escape(str(row['text']))}[/] {row['role']}"
        branches[row["node"]] = (branches[row["parent"]] if row["node"] else root).add(label)
    return root
