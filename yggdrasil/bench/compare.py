"""Compares plans with plain decoding and with each other, prompt by prompt, in one process.

The speed of a shared machine changes within seconds, by up to a third. Plans differ by less, so they alternate after a
few iterations of each prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.bench.divergence import Divergence, judge_divergence
from yggdrasil.bench.guard import nothing_built
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.request import Generation, Request
from yggdrasil.errors import YggdrasilError
from yggdrasil.predictor.repetition import count_repeated
from yggdrasil.prompts import NOWHERE, Prompt, check_ids, encode_prompt

_OURS = ""  # key of the first plan; no plan has this name
_STRETCH = 8  # consecutive iterations of a plan, so that most follow an iteration of the same plan


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded plainly and with a plan."""

    id: str
    plain: Generation
    tree: Generation
    num_repeated: int  # plain tokens that repeat an earlier part of the text
    divergence: Divergence | None = None  # the first difference of tokens, judged by a plain step
    category: str | None = None  # the prompt's
    beside: Mapping[str, "Comparison"] = field(default_factory=dict)  # comparisons of further plans, by name

    @property
    def matched(self) -> bool:
        """Whether plain decoding and the plan generated the same tokens."""
        return self.plain.tokens == self.tree.tokens

    @property
    def repeated_share(self) -> float:
        """Share of plainly decoded tokens, 0 to 1, that an n-gram look-up predicts.

        The look-up predicts the token that followed the last earlier occurrence of the text's last three tokens.
        """
        return self.num_repeated / len(self.plain.tokens)

    @property
    def decode_ratio(self) -> float:
        """Speed-up: milliseconds per token of plain decoding divided by the plan's, the first token left out."""
        return self.plain.metrics.tpot_ms / self.tree.metrics.tpot_ms

    @property
    def end_to_end_ratio(self) -> float:
        """Speed-up of the whole request: time of plain decoding divided by the plan's, prefill included."""
        return _request_ms(self.plain) / _request_ms(self.tree)


def encode_prompts(decoder: Decoder, prompts: Sequence[Prompt], max_prompt_tokens: int | None) -> dict[str, list[int]]:
    """Tokenise prompts: return a dictionary from prompt id to the last ``max_prompt_tokens`` token ids (None: all).

    Raises:
        YggdrasilError: a prompt leaves no room to decode in the context, or two share an id.
    """
    check_ids(prompts)
    return {prompt.id: encode_one(decoder, prompt, max_prompt_tokens) for prompt in prompts}


def encode_one(decoder: Decoder, prompt: Prompt, max_prompt_tokens: int | None) -> list[int]:
    """Tokenise a prompt and return its last ``max_prompt_tokens`` token ids (None: all).

    Raises:
        YggdrasilError: the prompt leaves no room to decode in the context.
    """
    try:
        tokens = encode_prompt(decoder.tokenizer, prompt)
        tokens = tokens[-max_prompt_tokens:] if max_prompt_tokens else tokens
        limit = decoder.assembly.engine.max_length
        if len(tokens) > limit - 2:  # the first token is the prefill's, and says nothing of decoding
            raise YggdrasilError(
                f"leaves no room to decode: it has {len(tokens)} tokens, and the context holds {limit}; "
                "keep fewer with --max-prompt-tokens"
            )
        return decoder.encode(tokens)
    except YggdrasilError as error:
        raise YggdrasilError(f"{prompt.place} {error}" if prompt.place != NOWHERE else str(error)) from error


def compare(  # noqa: PLR0913 - what is compared, how it decodes, and where results go
    decoder: Decoder,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    on_result: Callable[[Comparison], None],
    *,
    max_prompt_tokens: int | None = None,
    ignore_eos: bool = True,
    warm_up: bool = True,
    beside: Mapping[str, Decoder] | None = None,
    sampling: SamplingParams = GREEDY,
) -> list[Comparison]:
    """Decode every prompt plainly and with one or more plans, and return one comparison per prompt, in their order.

    Plans alternate every few iterations; their order changes from prompt to prompt, and plain decoding runs before or
    after them. No text grows beyond the shortest of the plans' contexts.

    Args:
        decoder: decoder of the plan to compare with plain decoding.
        on_result: called with each comparison as soon as it is done.
        max_prompt_tokens: number of last tokens of each prompt to use; None: all.
        ignore_eos: whether texts continue after end tokens.
        warm_up: whether to decode the first prompt once in each way beforehand, not counted, which loads the steps.
        beside: decoders of further plans, by name. Their comparisons are in ``beside`` of each result.
        sampling: of all requests. With a temperature it needs a seed; otherwise every run draws other tokens.

    Raises:
        YggdrasilError: a step was built after the warm-up, so times are invalid; or a decoder of ``beside`` has another
            target or is given twice.
    """
    plans = {_OURS: decoder, **(beside or {})}
    _check_comparable(plans)
    shortest = min(plans.values(), key=_context)
    texts = [encode_one(shortest, prompt, max_prompt_tokens) for prompt in prompts]  # before timing

    def start(by: Decoder, number: int, *, speculates: bool) -> Request:
        by.forget()  # so that each reads the whole prompt
        text = texts[number]
        limit = min(max_new_tokens, _context(shortest) - len(text))
        return by.start(text, max_new_tokens=limit, ignore_eos=ignore_eos, speculation=speculates, sampling=sampling)

    def plainly(number: int) -> Generation:
        return start(decoder, number, speculates=False).finished()

    def by_plans(number: int) -> dict[str, Generation]:
        names = _in_turn(list(plans), number // 2)  # plain decoding alternately before and after them
        return _side_by_side({name: start(plans[name], number, speculates=True) for name in names})

    if warm_up:
        plainly(0)
        by_plans(0)
    results = []
    for number, prompt in enumerate(prompts):
        with nothing_built(f"prompt {prompt.id}") if warm_up else nullcontext():
            if number % 2 == 0:
                plain, runs = plainly(number), by_plans(number)
            else:
                runs, plain = by_plans(number), plainly(number)
        known, found = count_repeated(texts[number], plain.tokens), {}
        for name, run in runs.items():
            parting = judge_divergence(decoder, texts[number], plain.tokens, run.tokens, sampling=sampling)
            found[name] = Comparison(prompt.id, plain, run, known, parting, prompt.category)
        ours = found.pop(_OURS)
        results.append(replace(ours, beside=found))
        on_result(results[-1])
    return results


def _side_by_side(requests: Mapping[str, Request]) -> dict[str, Generation]:
    """Decode requests of different decoders alternately: the one with fewest tokens runs ``_STRETCH`` iterations.

    Each request is timed by itself. All requests are ended, also after an exception.
    """
    try:
        under_way = {name: _run_to_first_token(request) for name, request in requests.items()}
        while under_way:
            name = min(under_way, key=lambda each: len(requests[each].tokens))
            if next(under_way[name], None) is None:
                del under_way[name]
    finally:
        results = {name: request.result() for name, request in requests.items()}
    return results


def _run_to_first_token(request: Request) -> Iterator[str]:
    """Run the request to its first token without interruption, so that this is timed alone; return the other pieces."""
    pieces = request.without_streaming(_STRETCH)
    while not request.tokens:
        next(pieces)
    return pieces


def _in_turn(names: Sequence[str], number: int) -> Sequence[str]:
    """Return the order of plans at prompt ``number``: rotated, and every other time reversed."""
    first = number % len(names)
    rotated = [*names[first:], *names[:first]]
    return rotated if (number // len(names)) % 2 == 0 else rotated[::-1]


def _context(of: Decoder) -> int:
    """Return the context length of a decoder in tokens."""
    return of.assembly.engine.max_length


def _check_comparable(plans: Mapping[str, Decoder]) -> None:
    def target(of: Decoder) -> tuple[object, ...]:
        model = of.plan.target if of.plan else None
        return model and model.fingerprint, model and model.weights, of.assembly.target.loaded.dtype

    ours = plans[_OURS]
    for name, other in plans.items():
        if target(ours) != target(other):
            raise YggdrasilError(
                f"the plan {name} decodes another target, or the same with other weights or dtype; "
                "only plans of one can be compared"
            )
    if len({id(plan) for plan in plans.values()}) < len(plans):
        raise YggdrasilError("two of the plans beside each other share a decoder; open it once for each")


def _request_ms(generation: Generation) -> float:
    return generation.metrics.ttft_ms + decode_ms(generation)


def decode_ms(generation: Generation) -> float:
    """Return the milliseconds that a generation took after its first token; 0 if it has at most one token."""
    return generation.metrics.tpot_ms * max(len(generation.tokens) - 1, 0)
