"""Explains a plan: the alternatives that were simulated, their predicted speed, and a drafter that was left out."""

import pandas as pd

from yggdrasil.scheduling.plan import Expectation, Plan


def considered(plan: Plan) -> pd.DataFrame:
    """Return a table of the policies that a calibration simulated: the chosen one, then the others, fastest first.

    A drafter that was left out is the last row. Columns: policy, speedup, aal, ms_a_token, time_over_chosen (time per
    token divided by the chosen policy's), chosen. The table is empty for the provisional plan of a model's first use,
    for which nothing was simulated.
    """
    rows = [] if plan.is_provisional else [_row(plan, plan.predicted, chosen=True)]
    rows += [_row(plan, other, chosen=False) for other in sorted(plan.rejected, key=lambda each: each.tpot_ms)]
    if plan.left_out is not None:
        named = f"with {plan.left_out.drafter.source}, left out"
        rows.append(_row(plan, plan.left_out.drafting, chosen=False) | {"policy": named})
    columns = ["policy", "speedup", "aal", "ms_a_token", "time_over_chosen", "chosen"]
    return pd.DataFrame(rows, columns=columns)


def _row(plan: Plan, found: Expectation, *, chosen: bool) -> dict[str, object]:
    return {
        "policy": found.policy, "speedup": found.speedup, "aal": found.aal, "ms_a_token": found.tpot_ms,
        "time_over_chosen": round(found.tpot_ms / plan.predicted.tpot_ms, 3), "chosen": chosen,
    }  # fmt: skip


def reasons(plan: Plan) -> list[str]:
    """Return sentences that explain why a plan was chosen, the most important first."""
    if plan.is_provisional:
        found = [
            "This plan was made at the first use of the model: step times were measured for a few seconds, acceptance "
            "starts from shipped statistics, and answers refine both. `yggdrasil calibrate` compares alternatives."
        ]
    else:
        found = [f"Chosen: {plan.predicted.policy}, {plan.predicted.describe()} (simulated)."]
        if plan.rejected:
            found.append(_compared(plan, min(plan.rejected, key=lambda each: each.tpot_ms)))
    if plan.left_out is not None:
        found.append(f"Left out: {plan.left_out.describe()}.")
    passes = plan.costs[0].verify_ms
    widest = max(passes)
    found.append(
        f"A pass that verifies {widest} tokens takes {passes[widest] / passes[1]:.2f} times as long as a plain one: "
        "such trees pay off if more than that many tokens are accepted per pass."
    )
    return found


def _compared(plan: Plan, best: Expectation) -> str:
    """Return a sentence about the fastest alternative; if it is faster than the chosen policy, with the reason."""
    why = ""
    if best.tpot_ms < plan.predicted.tpot_ms:
        if best.policy.endswith(" alone"):
            why = "; the drafter was kept as `--keep-drafter` asks"
        elif best.policy.startswith("depth from "):
            why = "; that is too little for a predictor"
    change = best.tpot_ms / plan.predicted.tpot_ms - 1
    return (
        f"The best of {len(plan.rejected)} alternatives, {best.policy}, would change the time per token by "
        f"{change:+.1%}{why}."
    )


def costs(plan: Plan) -> pd.DataFrame:
    """Return the costs of a target pass, one row per context length and width.

    Columns: context (tokens in the cache), width (rows), ms, over_one_row (ratio to the cost of one row).
    """
    rows = [
        (entry.context, width, ms, ms / entry.verify_ms[1])
        for entry in plan.costs
        for width, ms in sorted(entry.verify_ms.items())
    ]
    return pd.DataFrame(rows, columns=["context", "width", "ms", "over_one_row"])
