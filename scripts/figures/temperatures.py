"""Figure 15: our plan and the static tree at several sampling temperatures."""

import pandas as pd
from bench_systems import EngineSystem, System
from rivals.trees import tree_systems

from figures.context import OURS, PLAIN, Figure, FigureContext, mean_over_sets
from yggdrasil.acceptance.sampling import SamplingParams

SEED = 0  # random numbers depend on seed and position only, so every system samples the same text
STATIC = "Sequoia"
PAPER_RATIO = 1.49


def temperatures(context: FigureContext) -> list[Figure]:
    """Figure 15: speed-up over plain decoding and AAL of the plan and of the static tree, with the rule "match".

    The static tree is calibrated at each temperature and set, and its fastest size is used. The plan's calibration is
    that of temperature 0.
    """
    rows = pd.concat([_rows_at(context, value) for value in context.effort.temperatures], ignore_index=True)
    means = dict.fromkeys(["speedup", "aal", "tpot_ms", "over_static", "repeats"], "mean")
    frame = mean_over_sets(rows, ["temperature", "system"], means)
    same = rows.groupby(["temperature", "system"], sort=False)[["prompts", "same_as_ours"]].sum().reset_index()
    frame = frame.merge(same, on=["temperature", "system"])
    mean = float(rows["over_static"].mean())
    frame = frame.assign(mean_over_static=mean, mean_in_paper=PAPER_RATIO)
    title = f"Temperature: ours {mean:.2f} times as fast as the static tree in the mean (paper: {PAPER_RATIO})"
    panels = ("speedup", "aal")
    return [Figure("figure-15", title, frame, "temperature", panels, series="system", is_line=True, is_log=False)]


def _rows_at(context: FigureContext, temperature: float) -> pd.DataFrame:
    """Return one row for our plan and one for the static tree per set; ``over_static`` is the ratio of speeds."""
    sampling = SamplingParams(temperature=temperature, seed=SEED)
    parts = []
    for prompt_set in context.sets:
        context.trees.calibrate(context.held_back(prompt_set), sampling=sampling)
        systems: list[System] = [
            EngineSystem(OURS, context.decoder, sampling=sampling),
            EngineSystem(PLAIN, context.decoder, is_plain=True, sampling=sampling),
            *tree_systems(context.trees, ["sequoia"], context.budgets, sampling),
            *tree_systems(context.trees, ["sequoia-by-costs"], context.budgets[-1:], sampling),
        ]
        found = context.rows(f"temperature-{temperature:g}", systems, OURS, [prompt_set])
        own = found[found["system"] == OURS]
        trees = found[~found["system"].isin([OURS, PLAIN])]
        static = trees[trees["tpot_ms"] == trees["tpot_ms"].min()].iloc[:1]
        both = pd.concat([own, static.assign(system=STATIC, tree=static["system"])], ignore_index=True)
        plain_ms = float(found.loc[found["system"] == PLAIN, "tpot_ms"].iloc[0])
        both["speedup"] = plain_ms / both["tpot_ms"]
        both["over_static"] = (both["tpot_ms"].shift(-1) / both["tpot_ms"]).where(both["system"] == OURS)
        parts.append(both.assign(temperature=temperature))
    rows: pd.DataFrame = pd.concat(parts, ignore_index=True)
    return rows


__all__ = ["PAPER_RATIO", "STATIC", "temperatures"]
