"""Computes the usage and timings of a request from the results of its answers."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from yggdrasil.engine.request import Generation
from yggdrasil.scheduling.plan import Plan
from yggdrasil.serving.replies import FinishReason, PromptDetails, Timings, Usage


def finish_reason(result: Generation) -> FinishReason:
    """Return OpenAI's ``finish_reason`` of an answer: "stop" for an end token or stop string, else "length"."""
    return "stop" if result.finish_reason in ("eos", "stop") else "length"


def usage_of(results: Sequence[Generation], choices: int) -> Usage:
    """Return the token counts of a request; each prompt counts once.

    Args:
        results: all answers of the request; the answers to one prompt are adjacent.
        choices: number of answers per prompt.
    """
    prompts = results[::choices]
    read, written = sum(each.prompt_tokens for each in prompts), sum(len(each.tokens) for each in results)
    cached = sum(each.metrics.reused_tokens for each in prompts)
    details = PromptDetails(cached_tokens=cached)
    return Usage(
        prompt_tokens=read, completion_tokens=written, total_tokens=read + written, prompt_tokens_details=details
    )


def timings_of(results: Sequence[Generation], plan: Plan | None) -> Timings:
    """Return the timings of a request in milliseconds, summed over its answers.

    Args:
        plan: gives the cost of a plain step; None: the time without speculation is not estimated.
    """
    metrics = [each.metrics for each in results]
    stages: Counter[str] = Counter()
    for each in metrics:
        stages.update(each.stage_ms)
    after_first = sum(max(0, len(each.tokens) - 1) for each in results)
    decode_ms = sum(each.metrics.tpot_ms * max(0, len(each.tokens) - 1) for each in results)
    iterations = sum(each.iterations for each in metrics)
    cached = sum(each.reused_tokens for each in metrics)
    per_token = decode_ms / after_first if after_first else 0.0
    read, prompt_ms = sum(each.prompt_tokens for each in results) - cached, sum(each.ttft_ms for each in metrics)
    plain = [plain_ms(each, plan) for each in results]
    decoding = metrics[0].decoding
    return Timings(
        prompt_n=read, cache_n=cached, prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / max(read, 1), prompt_per_second=1e3 * read / prompt_ms if prompt_ms else 0.0,
        predicted_n=sum(len(each.tokens) for each in results), predicted_ms=decode_ms,
        predicted_per_token_ms=per_token, predicted_per_second=1e3 / per_token if per_token else 0.0,
        draft_n=sum(each.proposed for each in metrics), draft_n_accepted=sum(each.accepted for each in metrics),
        iterations=iterations, accepted_length=after_first / iterations if iterations else 0.0,
        stage_ms=dict(stages), plain_ms=sum(each for each in plain if each is not None) if plan else None,
        rule=decoding.rule, lossless=decoding.lossless,
    )  # fmt: skip


def plain_ms(result: Generation, plan: Plan | None) -> float | None:
    """Estimate the milliseconds that all tokens but the first would take without speculation; None without a plan.

    The plan's cost of a plain step is interpolated at the context length of each token.
    """
    if plan is None:
        return None
    contexts = [costs.context for costs in plan.costs]
    lengths = result.prompt_tokens + np.arange(1, max(1, len(result.tokens)))
    return float(np.interp(lengths, contexts, [costs.plain_ms for costs in plan.costs]).sum())
