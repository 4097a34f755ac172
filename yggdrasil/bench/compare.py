"""Plans against plain compiled decoding, and against each other: prompt by prompt, in turns, in one process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from yggdrasil.bench.divergence import Divergence, replay
from yggdrasil.bench.guard import nothing_built
from yggdrasil.bench.systems import encode_one
from yggdrasil.engine.decoder import Decoder, Generation
from yggdrasil.errors import YggdrasilError
from yggdrasil.predictor.repeats import foretold
from yggdrasil.prompts import Prompt

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

    texts = [encode_one(decoder, prompt, max_prompt_tokens) for prompt in prompts]  # before any of them is timed

    def run(way: _Way, number: int) -> Generation:
        way.decoder.forget()  # each reads the whole prompt
        return way.decoder.generate(
            texts[number], max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, speculation=way.speculates
        )

    def timed(way: _Way, number: int) -> Generation:
        with nothing_built(f"prompt {prompts[number].id}") if warm_up else nullcontext():
            return run(way, number)

    if warm_up:
        for way in ways:
            run(way, 0)
    results = []
    for number, prompt in enumerate(prompts):
        runs = {way.name: timed(way, number) for way in _in_turn(ways, number)}
        plain, known = runs[_PLAIN], foretold(texts[number], runs[_PLAIN].tokens)
        found = {}
        for way in ways[1:]:
            parting = replay(decoder, texts[number], plain.tokens, runs[way.name].tokens)
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


def _request_ms(generation: Generation) -> float:
    return generation.metrics.ttft_ms + decode_ms(generation)


def decode_ms(generation: Generation) -> float:
    """All milliseconds behind the first token."""
    return generation.metrics.tpot_ms * max(len(generation.tokens) - 1, 0)
