"""Figures 4 and 5: the effect of compilation, and the cost and gain of verify widths."""

import pandas as pd
from bench_systems import EngineSystem, System
from sample_store import model_drafter

from figures.context import PLAIN, Figure, FigureContext, mean_over_sets
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.loading import DTYPES


def runtimes(context: FigureContext) -> list[Figure]:
    """Figure 4: plain decoding, eager and compiled, in transformers and here."""
    from transformers_systems import transformers_systems

    plan, decoder = context.plan, context.decoder
    target, drafter = decoder.assembly.target.loaded, decoder.assembly.drafter
    assert drafter is not None
    eager = Decoder(
        assemble(target, drafter.loaded, plan.shapes, "eager", model_free=decoder.assembly.engine.model_free),
        decoder.tokenizer,
        decoder.policy,
        decoder.eos_tokens,
    )
    paths = plan.target.path(), model_drafter(plan).path()
    plain = transformers_systems(*paths, DTYPES[plan.dtype], plan.target.threads, plan.shapes.max_length, [4])[:2]
    systems: list[System] = [
        *plain,
        EngineSystem("our steps, eager", eager, is_plain=True),
        EngineSystem(PLAIN, decoder, is_plain=True),
    ]
    frame = mean_over_sets(context.rows("runtimes", systems, PLAIN), ["system"], {"tpot_ms": "mean"})
    frame["speedup_over_eager"] = frame["tpot_ms"].iloc[0] / frame["tpot_ms"]
    return [Figure("figure-04", "Runtimes: plain decoding", frame, "system", ("tpot_ms", "speedup_over_eager"))]


def widths(context: FigureContext) -> list[Figure]:
    """Figure 5: the cost of a verify width, and AAL and speed-up by verify budget."""
    rows = [
        {"context": str(costs.context), "width": width, "verify_ms": ms, "over_width_1": ms / costs.verify_ms[1]}
        for costs in context.plan.costs
        for width, ms in costs.verify_ms.items()
    ]
    latency = Figure(
        "figure-05a", "Latency of verification", pd.DataFrame(rows), "width", ("verify_ms", "over_width_1"),
        series="context", is_line=True,
    )  # fmt: skip
    found = context.tree_rows
    egt = found[found["tree"] == "egt"]
    plain = found[found["system"] == PLAIN].set_index("set")["tpot_ms"]
    egt = egt.assign(time=egt["set"].map(plain) / egt["tpot_ms"])
    mean = mean_over_sets(egt, ["budget"], {"aal": "mean", "time": "mean"})
    both = mean.melt("budget", ["aal", "time"], "speedup in", "speedup").replace({"aal": "tokens a pass"})
    speedup = Figure(
        "figure-05b",
        "Speed-up of an Equal-Growth Tree",
        both,
        "budget",
        ("speedup",),
        series="speedup in",
        is_line=True,
    )
    return [latency, speedup]
