"""Figures 12 to 14: what each part of the method gives, and how it depends on the tree's shape."""

from dataclasses import replace

import pandas as pd

from yggdrasil.bench.figures.context import PLAIN, Figure, FigureContext, mean_over_sets
from yggdrasil.bench.policies import PrunedPolicy
from yggdrasil.bench.systems import EngineSystem, System
from yggdrasil.bench.trees import Arrangement, TreeBench, TreeSystem
from yggdrasil.tree.objective import TreeShape

BASELINE_DEPTH, BASELINE_WIDTH = 16, 8  # the paper's fixed tree; here as far as the plan's shapes allow
PAPER_GAIN = {"O2 compilation": 2.78, "O3 pruning": 1.07, "O4 schedule": 1.21, "O5 depth predictor": 1.10}


def breakdown(context: FigureContext) -> list[Figure]:
    """Figure 12: the fixed Equal-Growth Tree eager (O1), compiled, pruned, scheduled, and with the plan's policy.

    O1 to O3 run the stages in their plain order, O4 and O5 as the plan orders them.
    """
    bench, shapes = context.trees, context.plan.shapes
    width = max(w for w in shapes.draft_widths if w <= BASELINE_WIDTH)
    depth = min(BASELINE_DEPTH, shapes.max_depth)
    nodes = 1 + width * depth
    whole = next((w for w in shapes.verify_widths if w >= nodes), shapes.verify_widths[-1])
    fixed = Arrangement(None, TreeShape(width, depth, whole), is_calibrated=True)
    pruned = PrunedPolicy(fixed.shape, context.costs)
    eager = TreeBench(context.decoder, bench.budgets, context.costs, backend="eager")
    systems: list[System] = [
        TreeSystem("O1 tree, eager", eager, fixed),
        TreeSystem("O2 compilation", bench, fixed),
        TreeSystem("O3 pruning", bench, replace(fixed, policy=pruned)),
        EngineSystem("O4 schedule", context.decoder, pruned),
        EngineSystem("O5 depth predictor", context.decoder),
        EngineSystem(PLAIN, context.decoder, is_plain=True),
    ]
    found = context.rows("breakdown", systems, "O5 depth predictor")
    frame = mean_over_sets(found, ["system"], {"tpot_ms": "mean", "aal": "mean"})
    steps = frame["system"].str.startswith("O")
    frame["gain"] = (frame["tpot_ms"].shift(1) / frame["tpot_ms"]).where(steps)
    frame["gain_in_paper"] = frame["system"].map(PAPER_GAIN)
    frame["baseline"] = f"depth {depth}, width {width}, verify width {whole}"
    return [Figure("figure-12", "Breakdown", frame, "system", ("tpot_ms", "gain"))]


def sensitivity(context: FigureContext) -> list[Figure]:
    """Figure 13: token latency over depth, width and verify width, each fixed; on the first prompt set."""
    bench, shapes = context.trees, context.plan.shapes
    depths = sorted({min(d, shapes.max_depth) for d in (2, 4, 8, 16)})
    grid = [
        TreeShape(width, depth, verify_width)
        for depth in depths
        for width in shapes.draft_widths
        for verify_width in context.budgets
    ]
    systems: list[System] = [
        TreeSystem(f"{s.depth} x {s.width} x {s.verify_width}", bench, Arrangement(None, s, is_calibrated=True))
        for s in grid
    ]
    rows = context.rows("sensitivity", systems, systems[0].name, context.sets[:1])
    mean = mean_over_sets(rows, ["system"], {"tpot_ms": "mean", "aal": "mean"})
    frame = pd.concat([pd.DataFrame(grid).reset_index(drop=True), mean.drop(columns="system")], axis=1)
    frame["tree"] = [f"depth {s.depth}, width {s.width}" for s in grid]
    return [Figure("figure-13", "Sensitivity", frame, "verify_width", ("tpot_ms", "aal"), series="tree", is_line=True)]


def objective(context: FigureContext) -> list[Figure]:
    """Figure 14: shapes chosen for latency against shapes chosen for AAL, and depth without the predictor."""
    systems: list[System] = [
        context.variant("latency"),
        context.variant("aal", objective="aal"),
        context.variant("latency, mean depth", with_predictor=False),
        EngineSystem(PLAIN, context.decoder, is_plain=True),
    ]
    found = context.rows("objective", systems, "latency")
    frame = found[["set", "system", "tpot_ms", "aal", "prompts", "same_as_ours"]]
    return [Figure("figure-14", "Objective", frame, "set", ("tpot_ms", "aal"), series="system")]
