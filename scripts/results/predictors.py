"""Where the depth predictor pays, from the plans' simulated policies and the predictors' reports on held-out text."""

import csv
from pathlib import Path
from typing import Any

import yaml

from results.records import TARGETS, table

POLICIES = {  # of a plan: title
    "depth from mean": "mean",
    "depth from predictor": "predictor",
    "depth from head": "predictor with first guesses",
    "fixed": "best fixed tree",
    "accepted lengths known beforehand": "lengths known beforehand",
}
DEPTHS = ("1", "2", "4", "8")
SCORERS = ("constant", "confidence", "predictor")


def policies(root: Path) -> str:
    """Speed over plain decoding of each source of the depth, simulated on held-out traces; the chosen one in bold."""
    rows = []
    for target, path in _by_target(root, "plans/*/*.yaml"):
        plan = yaml.safe_load(path.read_text(encoding="utf-8"))
        chosen = plan["predicted"]["policy"]
        found = {_kind(entry["policy"]): entry for entry in [plan["predicted"], *plan["rejected"]]}
        rows.append([target, path.stem, *(_speedup(found.get(kind), _kind(chosen) == kind) for kind in POLICIES)])
    return table(["plan", "machine", *POLICIES.values()], rows) if rows else ""


def reports(root: Path) -> str:
    """Brier score (less is better) of each scorer by depth: constant rate / drafter's confidence / predictor."""
    rows = []
    for target, path in _by_target(root, "predictors/*/*/report.csv"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        entries = list(csv.DictReader(lines))
        for reads in dict.fromkeys(entry["reads"] for entry in entries):
            score = {(entry["depth"], entry["scorer"]): entry["brier"] for entry in entries if entry["reads"] == reads}
            title = "with first guesses" if reads == "head" else "before drafting"
            rows.append([target, path.parent.name, title, *(_scores(score, depth) for depth in DEPTHS)])
    titles = ["predictor", "machine", "it reads", *(f"depth {depth}" for depth in DEPTHS)]
    return table(titles, rows) if rows else ""


def _by_target(root: Path, pattern: str) -> list[tuple[str, Path]]:
    """Files below ``root`` and what they are of, in shown order; those of other names are of who works here."""
    found = [(path.relative_to(root).parts[1], path) for path in sorted(root.glob(pattern))]
    return [(title, path) for folder, title in TARGETS.items() for name, path in found if name == folder]


def _kind(policy: str) -> str:
    return "fixed" if policy.startswith("fixed ") else policy


def _speedup(entry: dict[str, Any] | None, is_chosen: bool) -> str:
    if entry is None:
        return "-"
    return f"**{entry['speedup']:.3f}**" if is_chosen else f"{entry['speedup']:.3f}"


def _scores(score: dict[tuple[str, str], str], depth: str) -> str:
    found = [score.get((depth, scorer)) for scorer in SCORERS]
    return " / ".join("-" if not value else f"{float(value):.4f}" for value in found) if any(found) else "-"
