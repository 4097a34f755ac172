"""Plans against plain compiled decoding, and against each other: prompt by prompt, in turns, in one process."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from yggdrasil.bench.divergence import Divergence, replay
from yggdrasil.bench.guard import nothing_built
from yggdrasil.bench.repeats import foretold
from yggdrasil.bench.spread import spread
from yggdrasil.engine.decoder import Decoder, Generation
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import Prompt, encode_prompt

_PLAIN, _OURS = "plain decoding", "the plan"  # no names that a plan can have


@dataclass(frozen=True)
class Comparison:
    """Both ways of decoding one prompt."""

    id: str
    plain: Generation
    tree: Generation
    foretold: int  # plain tokens that an earlier place of the text gives away
    divergence: Divergence | None = None  # where they part, judged by a plain replay
    category: str | None = None  # the prompt's
    beside: Mapping[str, "Comparison"] = field(default_factory=dict)  # the same of other plans, by name

    @property
    def matched(self) -> bool:
        return self.plain.tokens == self.tree.tokens

    @property
    def repeats(self) -> float:
        """Share of the plain tokens that an earlier place of the text gives away."""
        return self.foretold / len(self.plain.tokens)

    @property
    def decode_ratio(self) -> float:
        """Plain milliseconds a token over ours, the first token excluded."""
        return self.plain.metrics.tpot_ms / self.tree.metrics.tpot_ms

    @property
    def end_to_end_ratio(self) -> float:
        """Plain request time over ours, prefill included."""
        return _request_ms(self.plain) / _request_ms(self.tree)


def compare(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    on_result: Callable[[Comparison], None],
    *,
    max_prompt_tokens: int | None = None,
    ignore_eos: bool = True,
    warm_up: bool = True,
    beside: Mapping[str, Decoder] | None = None,
) -> list[Comparison]:
    """Decode every prompt plainly, with ``decoder`` and with those ``beside`` it, in an order that turns.

    Without ``ignore_eos`` a text ends where the model ends it, and lengths differ from prompt to prompt. ``warm_up``
    decodes the first prompt each way beforehand, uncounted: it loads the steps.

    Raises:
        YggdrasilError: a step was built after the warm-up, so times do not compare; or a decoder of ``beside`` has
            another target.
    """
    others = beside or {}
    for name, other in others.items():
        _check_same_target(decoder, other, name)
    ways = [_Way(_PLAIN, decoder, False), _Way(_OURS, decoder, True)]
    ways += [_Way(name, other, True) for name, other in others.items()]

    def kept(prompt: Prompt) -> list[int]:
        tokens = encode_prompt(decoder.tokenizer, prompt)
        return tokens[-max_prompt_tokens:] if max_prompt_tokens else tokens

    def run(way: _Way, prompt: Prompt) -> Generation:
        way.decoder.forget()  # each reads the whole prompt
        return way.decoder.generate(
            kept(prompt), max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, speculation=way.speculates
        )

    def timed(way: _Way, prompt: Prompt) -> Generation:
        with nothing_built(f"prompt {prompt.id}") if warm_up else nullcontext():
            return run(way, prompt)

    if warm_up:
        for way in ways:
            run(way, prompts[0])
    results = []
    for number, prompt in enumerate(prompts):
        runs = {way.name: timed(way, prompt) for way in _in_turn(ways, number)}
        plain, known = runs[_PLAIN], foretold(kept(prompt), runs[_PLAIN].tokens)
        found = {}
        for way in ways[1:]:
            parting = replay(decoder, kept(prompt), plain.tokens, runs[way.name].tokens)
            found[way.name] = Comparison(prompt.id, plain, runs[way.name], known, parting, prompt.category)
        ours = found.pop(_OURS)
        results.append(replace(ours, beside=found))
        on_result(results[-1])
    return results


class _Way(NamedTuple):
    """One way of decoding the prompts."""

    name: str
    decoder: Decoder
    speculates: bool


def _in_turn(ways: Sequence[_Way], number: int) -> Sequence[_Way]:
    """Their order at a prompt: each begins as often as the others, and comes before each other as often as after it."""
    first = number % len(ways)
    turned = [*ways[first:], *ways[:first]]
    return turned if (number // len(ways)) % 2 == 0 else turned[::-1]


def _check_same_target(decoder: Decoder, other: Decoder, name: str) -> None:
    def target(of: Decoder) -> tuple[object, ...]:
        model = of.plan.target if of.plan else None
        return model and model.fingerprint, model and model.weights, of.assembly.target.loaded.dtype

    if target(decoder) != target(other):
        raise YggdrasilError(
            f"the plan {name} decodes another target, or the same with other weights or dtype; "
            "only plans of one can be compared"
        )


def summarise(results: Sequence[Comparison]) -> dict[str, Any]:
    """The figures of a comparison.

    ``speedup`` is a ratio per prompt, then the median, with quartiles as spread; ``total_speedup`` is the ratio of the
    times a token of all prompts together, and ``predicted_speedup`` the same of the times that the plan promised.
    ``repeats`` is the share of generated tokens that the text so far gives away.
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
        "faults": _num_judged(results, "fault"),
        "not_judged": _num_judged(results, "not judged"),
        "aal": tokens / iterations if iterations else 0.0,
        "tokens_per_target_step": tokens / iterations if iterations else 0.0,
        "proposed": proposed,
        "accepted": accepted,
        "acceptance_rate": accepted / proposed if proposed else 0.0,
        "tpot_ms": tpot,
        "baseline_tpot_ms": baseline,
        "predicted_tpot_ms": predicted_tpot,
        "speedup": spread([result.decode_ratio for result in decoded]),
        "total_speedup": _ratio(_mean_ms([r.plain for r in decoded]), _mean_ms([r.tree for r in decoded])),
        "repeats": _ratio(sum(r.foretold for r in results), sum(len(r.plain.tokens) for r in results)),
        "end_to_end_speedup": spread([result.end_to_end_ratio for result in results]),
        "predicted_speedup": _predicted_speedup([r for r in decoded if r.tree.metrics.predicted_tpot_ms]),
        "overhead_share": _median([m.overhead_share for m in tree]),
        "plain_overhead_share": _median([m.overhead_share for m in plain]),
    }


def summarise_beside(results: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """The figures of each plan that stood beside, by its name.

    Two of them are of its time a token over that of the plan whose ``results`` these are: ``time_over_first`` prompt
    by prompt, ``total_time_over_first`` of all together. Above 1, the first plan is faster.
    """
    found = {}
    for name in results[0].beside:
        others = [result.beside[name] for result in results]
        pairs = [(other, r) for other, r in zip(others, results, strict=True) if other.tree.metrics.iterations]
        found[name] = {
            **summarise(others),
            "time_over_first": spread([other.tree.metrics.tpot_ms / r.tree.metrics.tpot_ms for other, r in pairs]),
            "total_time_over_first": _ratio(_mean_ms([o.tree for o, _ in pairs]), _mean_ms([r.tree for _, r in pairs])),
        }
    return found


def summarise_categories(results: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """The same figures of each category, in the order they come; nothing where all prompts are of one."""
    names = dict.fromkeys(result.category or "none" for result in results)
    if len(names) < 2:
        return {}
    return {name: summarise([result for result in results if (result.category or "none") == name]) for name in names}


def _num_judged(results: Sequence[Comparison], verdict: str) -> int:
    return sum(result.divergence is not None and result.divergence.verdict == verdict for result in results)


def _request_ms(generation: Generation) -> float:
    return generation.metrics.ttft_ms + _decode_ms(generation)


def _predicted_speedup(results: Sequence[Comparison]) -> float | None:
    """Plain decoding over what the plan promised, all prompts together; None where no plan made a promise.

    Not of medians: where prompts differ much, the middle of one and of the other are two different prompts.
    """
    promised = sum((r.tree.metrics.predicted_tpot_ms or 0.0) * (len(r.tree.tokens) - 1) for r in results)
    tokens = sum(len(r.tree.tokens) - 1 for r in results)
    return _ratio(_mean_ms([r.plain for r in results]), promised / tokens) if promised else None


def _decode_ms(generation: Generation) -> float:
    return generation.metrics.tpot_ms * max(len(generation.tokens) - 1, 0)


def _mean_ms(answers: Sequence[Generation]) -> float:
    """Milliseconds a token over all answers together, the first token of each left out."""
    return _ratio(sum(map(_decode_ms, answers)), sum(len(answer.tokens) - 1 for answer in answers))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
