"""Summaries of compared prompts: of all, of each category, and of further plans."""

import statistics
from collections.abc import Sequence
from typing import Any

from yggdrasil.bench.compare import Comparison, decode_ms
from yggdrasil.bench.spread import spread
from yggdrasil.engine.request import Generation


def summarise(results: Sequence[Comparison]) -> dict[str, Any]:
    """Return the figures of a comparison of a plan with plain decoding over all prompts, by name.

    Counts: ``prompts``, ``matched`` (prompts with equal tokens), ``verify_decode_mismatches`` (prompts with different
    tokens), ``faults`` (mismatches that are no ties), ``proposed`` and ``accepted`` drafted tokens. Shares:
    ``acceptance_rate``; ``repeats``, of generated tokens that repeat an earlier part of their text; ``overhead_share``,
    ``plain_overhead_share`` (medians). ``aal`` is tokens per iteration. ``tpot_ms``, ``baseline_tpot_ms`` (plain
    decoding) and ``predicted_tpot_ms`` are medians in milliseconds.

    ``speedup`` and ``end_to_end_speedup`` (prefill included) are medians and quartiles of the prompts' ratios, as
    ``spread`` returns them; ``total_speedup`` is the ratio of the times per token over all prompts together, and
    ``predicted_speedup`` the same with the times that the plan predicted. ``predicted_tpot_ms`` and
    ``predicted_speedup`` are None if there are no predictions.
    """
    decoded = [result for result in results if result.tree.metrics.iterations]
    tree = [result.tree.metrics for result in decoded]
    plain = [result.plain.metrics for result in decoded]
    iterations = sum(m.iterations for m in tree)
    tokens = sum(len(result.tree.tokens) - 1 for result in decoded)
    proposed, accepted = sum(m.proposed for m in tree), sum(m.accepted for m in tree)
    predicted = [m.predicted_tpot_ms for m in tree if m.predicted_tpot_ms]
    tpot = _median([m.tpot_ms for m in tree])
    baseline = _median([m.tpot_ms for m in plain])
    predicted_tpot = _median(predicted) if predicted else None
    return {
        "prompts": len(results),
        "matched": sum(result.matched for result in results),
        "verify_decode_mismatches": sum(result.divergence is not None for result in results),
        "faults": sum(each.divergence is not None and each.divergence.verdict == "fault" for each in results),
        "aal": tokens / iterations if iterations else 0.0,
        "proposed": proposed,
        "accepted": accepted,
        "acceptance_rate": accepted / proposed if proposed else 0.0,
        "tpot_ms": tpot,
        "baseline_tpot_ms": baseline,
        "predicted_tpot_ms": predicted_tpot,
        "speedup": spread([result.decode_ratio for result in decoded]),
        "total_speedup": _ratio(_mean_ms([r.plain for r in decoded]), _mean_ms([r.tree for r in decoded])),
        "repeats": _ratio(sum(r.num_repeated for r in results), sum(len(r.plain.tokens) for r in results)),
        "end_to_end_speedup": spread([result.end_to_end_ratio for result in results]),
        "predicted_speedup": _predicted_speedup([r for r in decoded if r.tree.metrics.predicted_tpot_ms]),
        "overhead_share": _median([m.overhead_share for m in tree]),
        "plain_overhead_share": _median([m.overhead_share for m in plain]),
    }


def summarise_beside(results: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """Return the figures of each further compared plan, by the plan's name: those of ``summarise`` and two more.

    ``time_over_first`` has median and quartiles, over the prompts, of the plan's time per token divided by the first
    plan's. ``total_time_over_first`` is this ratio for all prompts together. Above 1 the first plan is faster.

    Args:
        results: at least one.
    """
    found = {}
    for name in results[0].beside:
        others = [result.beside[name] for result in results]
        pairs = [
            (other, r)
            for other, r in zip(others, results, strict=True)
            if other.tree.metrics.iterations and r.tree.metrics.iterations  # else one has the prefill's token only
        ]
        found[name] = {
            **summarise(others),
            "time_over_first": spread([other.tree.metrics.tpot_ms / r.tree.metrics.tpot_ms for other, r in pairs]),
            "total_time_over_first": _ratio(_mean_ms([o.tree for o, _ in pairs]), _mean_ms([r.tree for _, r in pairs])),
        }
    return found


def summarise_categories(results: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """Return the figures of ``summarise`` of each category's prompts, by category; empty if there is only one.

    Prompts without a category form the category "none".
    """
    names = dict.fromkeys(result.category or "none" for result in results)
    if len(names) < 2:
        return {}
    return {name: summarise([result for result in results if (result.category or "none") == name]) for name in names}


def _predicted_speedup(results: Sequence[Comparison]) -> float | None:
    """Return the time of plain decoding divided by the predicted time, over all prompts; None without predictions.

    A ratio of medians would compare two different prompts.
    """
    predicted = sum((r.tree.metrics.predicted_tpot_ms or 0.0) * (len(r.tree.tokens) - 1) for r in results)
    tokens = sum(len(r.tree.tokens) - 1 for r in results)
    return _ratio(_mean_ms([r.plain for r in results]), predicted / tokens) if predicted else None


def _mean_ms(answers: Sequence[Generation]) -> float:
    """Return milliseconds per token over all answers, without their first tokens."""
    return _ratio(sum(map(decode_ms, answers)), sum(len(answer.tokens) - 1 for answer in answers))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
