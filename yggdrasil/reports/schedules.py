"""Describes the result of a schedule search in sentences."""

from yggdrasil.scheduling.plan import Searched, SearchResult
from yggdrasil.scheduling.stages import Schedule


def changed_variants(entry: Searched) -> str:
    """Return the stage variants in which a searched plan differs from the default schedule, such as "accept=host".

    Several are joined by ", "; without any the text is "default".
    """
    default = Schedule.of({}).variants
    variants = Schedule.parse(entry.stages).variants
    return ", ".join(f"{name}={variant}" for name, variant in variants.items() if variant != default[name]) or "default"


def verdict(result: SearchResult) -> list[str]:
    """Return sentences on a search: the errors of its predictions, and the chosen plan's speed over the named plans'.

    Regret is the share by which the plan with the best prediction is slower than the fastest measured plan. If nothing
    was measured, the only sentence says so.
    """
    chosen = result.entry(result.chosen)
    measured = [entry for entry in result.entries if entry.measured_ms_per_token and entry.shape[1]]
    if chosen is None or not measured or not chosen.measured_ms_per_token:
        return ["nothing was measured; give --prompts to compare predictions with the engine"]
    errors = sorted(
        abs(entry.predicted_iteration_ms / entry.measured_iteration_ms - 1)
        for entry in measured
        if entry.measured_iteration_ms
    )
    best = min(entry.measured_ms_per_token or 0.0 for entry in measured)
    regret = (measured[0].measured_ms_per_token or 0.0) / best - 1
    lines = [
        f"predicted iteration time: off by {errors[len(errors) // 2]:.1%} in the median, {errors[-1]:.1%} at most",
        f"regret of the best prediction against the best measured: {regret:.1%}; chosen: {result.chosen}",
    ]
    for entry in result.entries:
        if not entry.name.startswith("top") and entry.measured_ms_per_token:
            ratio = entry.measured_ms_per_token / chosen.measured_ms_per_token
            lines.append(f"the chosen plan is {ratio:.3f} x as fast as {entry.name}")
    return lines
