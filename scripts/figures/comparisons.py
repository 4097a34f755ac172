"""Figures 6, 10 and 11: comparison with other systems and their trees."""

import pandas as pd

from figures.context import OURS, PLAIN, Figure, FigureContext, mean_over_sets

# The trees of the paper's baselines. All run on our engine, so only the trees differ.
FIELD = {"SpecInfer": ("k-ary", "merged"), "vLLM-Spec": ("sequence",), "Sequoia": ("sequoia", "sequoia-by-costs"),
         "OPT-Tree": ("opt-tree", "opt-tree-by-costs"), "EAGLE-2": ("eagle-2",)}  # fmt: skip


def best_of_field(found: pd.DataFrame) -> pd.DataFrame:
    """Return one row per system and set: each baseline with its fastest tree and budget, our plan, and plain."""
    parts = [found[found["system"].isin([OURS, PLAIN])].assign(name=lambda rows: rows["system"])]
    for name, trees in FIELD.items():
        rows = found[found["tree"].isin(trees)]
        parts.append(rows.loc[rows.groupby("set")["tpot_ms"].idxmin()].assign(name=name))
    best = pd.concat(parts, ignore_index=True)
    return best.assign(step_ms=best["aal"] * best["tpot_ms"])


def systems(context: FigureContext) -> list[Figure]:
    """Figure 6: AAL, time per step, and time per token, which is their quotient."""
    mean = {"aal": "mean", "step_ms": "mean", "tpot_ms": "mean"}
    frame = mean_over_sets(best_of_field(context.tree_rows), ["name"], mean)
    return [Figure("figure-06", "AAL, step latency, token latency", frame, "name", tuple(mean))]


def end_to_end(context: FigureContext) -> list[Figure]:
    """Figure 10: speed-up over SpecInfer's trees, and time per token, on each set."""
    best = best_of_field(context.tree_rows)
    base = best[best["name"] == "SpecInfer"].set_index("set")["tpot_ms"]
    best = best.assign(speedup_over_specinfer=best["set"].map(base) / best["tpot_ms"])
    frame = best[["set", "name", "tpot_ms", "aal", "speedup_over_specinfer", "repeats", "prompts", "same_as_ours"]]
    return [Figure("figure-10", "End to end", frame, "set", ("speedup_over_specinfer", "tpot_ms"), series="name")]


def trees(context: FigureContext) -> list[Figure]:
    """Figure 11: AAL and theoretical speed-up (equation 3 with overhead) of each tree at equal verify budgets."""
    found = context.tree_rows.dropna(subset=["tree"])
    values = {"aal": "mean", "theoretical_speedup": "mean", "tpot_ms": "mean"}
    frame = mean_over_sets(found, ["tree", "budget"], values).astype({"budget": int})
    figures = []
    for letter, column, title in (("a", "aal", "AAL by tree"), ("b", "theoretical_speedup", "Theoretical speed-up")):
        part = frame[["tree", "budget", column]]
        figures.append(Figure(f"figure-11{letter}", title, part, "budget", (column,), series="tree", is_line=True))
    return figures
