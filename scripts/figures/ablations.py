"""Figures 12 to 14: the contribution of each part of the method, and the dependence on the tree's shape."""

import pandas as pd
from bench_systems import EngineSystem, System
from rivals.policies import PrunedPolicy
from rivals.trees import Arrangement, TreeSystem

from figures.context import PLAIN, Figure, FigureContext, mean_over_sets
from yggdrasil.compiler.compiled import Backend
from yggdrasil.drafters.draft_model import DraftModel
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.passes import fitting_or_widest
from yggdrasil.scheduling.stages import DEFAULT_ORDER, NAMED_VARIANTS, Schedule
from yggdrasil.tree.shape import TreeShape

BASELINE_DEPTH, BASELINE_WIDTH = 16, 8  # the paper's fixed tree, limited to the plan's shapes
PAPER_GAIN = {"O2 compilation": 2.78, "O3 pruning": 1.07, "O4 schedule": 1.21, "O5 depth predictor": 1.10}


def breakdown(context: FigureContext) -> list[Figure]:
    """Figure 12: the fixed Equal-Growth Tree eager (O1), compiled (O2), pruned (O3), scheduled (O4), with policy (O5).

    O1 to O3 run the paper's serial iteration (figure 9 c, naive), the others the plan's schedule. All use the plan's
    shapes. O6, which is not in the paper, adds model-free drafts.
    """
    shapes = context.plan.shapes
    width = max(w for w in shapes.draft_widths if w <= BASELINE_WIDTH)
    depth = min(BASELINE_DEPTH, shapes.max_depth)
    nodes = 1 + width * depth
    whole = fitting_or_widest(shapes.verify_widths, nodes)
    fixed = FixedPolicy(TreeShape(width, depth, whole))
    pruned = PrunedPolicy(context.costs, TreeShape(width, depth, whole))
    compiled = context.decoder.assembly.target.backend
    systems: list[System] = [
        EngineSystem("O1 tree, eager", _serial(context.decoder, "eager"), fixed),
        EngineSystem("O2 compilation", serial := _serial(context.decoder, compiled), fixed),
        EngineSystem("O3 pruning", serial, pruned),
        EngineSystem("O4 schedule", context.decoder, pruned),
        context.variant("O5 depth predictor"),
        EngineSystem("O6 counts", context.decoder),
        EngineSystem(PLAIN, context.decoder, is_plain=True),
    ]
    found = context.rows("breakdown", systems, "O6 counts")
    frame = mean_over_sets(found, ["system"], dict.fromkeys(["tpot_ms", "aal", "repeats"], "mean"))
    steps = frame["system"].str.startswith("O")
    frame["gain"] = (frame["tpot_ms"].shift(1) / frame["tpot_ms"]).where(steps)
    frame["gain_in_paper"] = frame["system"].map(PAPER_GAIN)
    frame["baseline"] = f"depth {depth}, width {width}, verify width {whole}"
    beside = {"gain": ["gain_in_paper"]}
    return [Figure("figure-12", "Breakdown", frame, "system", ("tpot_ms", "aal", "gain"), beside=beside)]


def _serial(decoder: Decoder, backend: Backend) -> Decoder:
    """Return a decoder of the same pair and shapes with serial stages; captured steps accept on the device."""
    assembly = decoder.assembly
    drafter = assembly.engine.drafter
    assert assembly.drafter is not None
    assert isinstance(drafter, DraftModel)
    stages = DEFAULT_ORDER if backend == "cudagraph" else Schedule.of(NAMED_VARIANTS["naive"]).labels
    models = assembly.target.loaded, assembly.drafter.loaded
    free = assembly.engine.model_free
    built = assemble(*models, assembly.shapes, backend, knots=drafter.knots.clone(), stages=stages, model_free=free)
    return Decoder(built, decoder.tokenizer, decoder.policy, decoder.eos_tokens)


def sensitivity(context: FigureContext) -> list[Figure]:
    """Figure 13: time per token by fixed depth, width and verify width, on the first prompt set."""
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
    """Figure 14: shapes chosen for latency, shapes chosen for AAL, and depth without the predictor.

    Without model-free drafts, which would hide the difference.
    """
    systems: list[System] = [
        context.variant("latency"),
        context.variant("aal", objective="aal"),
        context.variant("latency, mean depth", with_predictor=False),
        EngineSystem(PLAIN, context.decoder, is_plain=True),
    ]
    found = context.rows("objective", systems, "latency")
    frame = found[["set", "system", "tpot_ms", "aal", "repeats", "prompts", "same_as_ours"]]
    return [Figure("figure-14", "Objective", frame, "set", ("tpot_ms", "aal"), series="system")]
