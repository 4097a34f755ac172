#!/usr/bin/env python3
"""Halve and double every tuned number, and see what decoding gives: the run-time policy played over recorded text.

    scripts/tuned_numbers.py --plan smollm2 --traces traces/smollm2 --traces traces/pair --page docs/tuned-numbers.md

Traces are those of ``scripts/record_traces.py``. Nothing is timed: iterations cost what the plan measured, on the
machine that ``scripts/policy_ablation.py`` calls unsteady, the same way for all.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from policy_ablation import Play, plays_of
from rich.progress import track
from tuned import NOT_PLAYED, TUNED, Tuned, changed

from yggdrasil.artifacts import current_machine, resolve_plan, write_atomic
from yggdrasil.cli import run_script
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.scheduling.plan import Plan

SEEDS = 2  # courses of the machine
INTRODUCTION = """# Tuned numbers

This page lists the constants of decoding (`yggdrasil/policy`, `yggdrasil/engine`, `yggdrasil/drafters`,
`yggdrasil/tree`) and measures how much the speed depends on each. It leaves out what a calibration measures or fits.
`scripts/tuned_numbers.py` writes the page; a test compares it with the code.

Each constant is halved and doubled (for a value near 1, its distance from 1). The run-time policy then decodes
recorded text in simulation (`yggdrasil/calibration/replay.py`). A cell has the change of speed in percent for half /
twice the value; positive is faster.

A column is the recorded text of one model (`docs/research/policy-ablation.md`), decoded with n-gram statistics as
drafter; `look-up` uses the `ngram` drafter instead. Iteration times are those in the plan `{plan}`, on a simulated
unsteady machine: they are multiplied by a factor between 0.8 and 1.8 that changes every 250 iterations. The times that
the policy observes also have log-normal noise of 5 %, and one in 300 is three times as long; the pass times that it
starts with have errors of 6 % (standard deviation). A changed constant changes which part of the text meets which
factor, so differences of a few tenths of a percent are noise.

"""


def effects(tuned: Tuned, plays: Sequence[Play], usual: dict[str, float]) -> list[str]:
    """Of half and of twice as much, in percent of the speed, in each play."""
    cells = []
    for play in plays:
        if (tuned.module == "drafters.ngram") != play.name.endswith("look-up"):
            cells.append("–")
            continue
        found = []
        for factor in (0.5, 2.0):
            with changed(tuned, factor):
                found.append(speed(play))
        cells.append(" / ".join(f"{100 * (each / usual[play.name] - 1):+.1f}" for each in found))
    return cells


def speed(play: Play) -> float:
    """Times plain decoding, the mean over courses of the machine."""
    return float(np.mean([play.result("unsteady", seed).speed for seed in range(SEEDS)]))


def main(
    plan: Annotated[str, typer.Option(help="The plan whose measured costs iterations have.")],
    traces: Annotated[list[Path], typer.Option(help="A folder that scripts/record_traces.py wrote; repeat it.")],
    page: Annotated[Path, typer.Option(help="Where the page is written.")],
) -> None:
    """Write the page of tuned numbers."""
    costs = Plan.load(resolve_plan(plan, current_machine())).costs[0].steps()
    plays = [play for folder in traces for play in plays_of(folder, costs)]
    plays.append(plays[0]._replace(name=f"{plays[0].name}, look-up", drafter=lambda: DrafterGroup([NGramDrafter()])))
    usual = {play.name: speed(play) for play in plays}
    speeds = [f"{each:.3f}" for each in usual.values()]
    rows = [
        [f"`{each.name}`", f"{each.value:g}", f"`yggdrasil/{each.module.replace('.', '/')}.py`", each.meaning,
         *effects(each, plays, usual)]
        for each in track(TUNED, "playing")
    ]  # fmt: skip
    first = ["unchanged", "", "", "speed-up over plain decoding", *speeds]
    write_atomic(page, _page([first, *rows], [play.name for play in plays], plan).encode())


def _page(rows: Sequence[Sequence[str]], plays: Sequence[str], plan: str) -> str:
    head = ["number", "value", "file", "what it is", *plays]
    table = [head, ["---"] * len(head), *rows]
    others = [
        f"| `{name}` | `yggdrasil/{module.replace('.', '/')}.py` | {why} |"
        for module, names in NOT_PLAYED.items()
        for name, why in names.items()
    ]
    return INTRODUCTION.format(plan=Path(plan).parent.name if plan.endswith(".yaml") else plan) + "\n".join(
        [*("| " + " | ".join(row) + " |" for row in table), "", "Other constants of these packages:", "",
         "| number | file | why it is not varied |", "|---|---|---|", *others, ""]
    )  # fmt: skip


if __name__ == "__main__":
    run_script(main, "tuned_numbers")
