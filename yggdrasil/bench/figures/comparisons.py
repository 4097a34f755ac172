"""Figures 6, 10 and 11: trees and systems of the field beside ours."""

import pandas as pd

from yggdrasil.bench.figures.context import OURS, PLAIN, Figure, FigureContext, mean_over_sets

# The tree each of the paper's baselines drafts; here all run on our engine, so only the trees differ.
FIELD = {"SpecInfer": ("k-ary", "merged"), "vLLM-Spec": ("sequence",), "Sequoia": ("sequoia", "sequoia-by-costs"),
         "OPT-Tree": ("opt-tree", "opt-tree-by-costs"), "EAGLE-2": ("eagle-2",)}  # fmt: skip


def best_of_field(found: pd.DataFrame) -> pd.DataFrame:
    """Each baseline at its own fastest budget and form on each set, ours by plan, and plain; one row each and set."""
    parts = [found[found["system"].isin([OURS, PLAIN])].assign(name=lambda rows: rows["system"])]
    for name, trees in FIELD.items():
        rows = found[found["tree"].isin(trees)]
        parts.append(rows.loc[rows.groupby("set")["tpot_ms"].idxmin()].assign(name=name))
    best = pd.concat(parts, ignore_index=True)
    return best.assign(step_ms=best["aal"] * best["tpot_ms"])


def systems(context: FigureContext) -> list[Figure]:
    """Figure 6: a tree that accepts more may cost more a step; only the quotient counts."""
    mean = {"aal": "mean", "step_ms": "mean", "tpot_ms": "mean"}
    frame = mean_over_sets(best_of_field(context.tree_rows), ["name"], mean)
    return [Figure("figure-06", "AAL, step latency, token latency", frame, "name", tuple(mean))]


def end_to_end(context: FigureContext) -> list[Figure]:
    """Figure 10: token latency on each set, over that of SpecInfer's trees."""
    best = best_of_field(context.tree_rows)
    base = best[best["name"] == "SpecInfer"].set_index("set")["tpot_ms"]
    best = best.assign(speedup_over_specinfer=best["set"].map(base) / best["tpot_ms"])
    frame = best[["set", "name", "tpot_ms", "aal", "speedup_over_specinfer", "repeats", "prompts", "same_as_ours"]]
    return [Figure("figure-10", "End to end", frame, "set", ("speedup_over_specinfer", "tpot_ms"), series="name")]


def trees(context: FigureContext) -> list[Figure]:
    """Figure 11: AAL and theoretical speed-up (equation 3 with overhead) of each tree at equal verify budget."""
    found = context.tree_rows.dropna(subset=["tree"])
    values = {"aal": "mean", "theoretical_speedup": "mean", "tpot_ms": "mean"}
    frame = mean_over_sets(found, ["tree", "budget"], values).astype({"budget": int})
    figures = []
    for letter, column, title in (("a", "aal", "AAL by tree"), ("b", "theoretical_speedup", "Theoretical speed-up")):
        part = frame[["tree", "budget", column]]
        figures.append(Figure(f"figure-11{letter}", title, part, "budget", (column,), series="tree", is_line=True))
    return figures
