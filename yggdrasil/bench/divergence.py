"""The first difference of two runs of one prompt: a near tie that rounding decides, or a fault."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.engine.decoder import Decoder

# Without a measured tolerance, a tie is a difference of at most 8 units in the last place of the largest value.
_LAST_PLACES, _EPSILON = 8, {"bfloat16": 2.0**-8, "float32": 2.0**-24}


@dataclass(frozen=True)
class Divergence:
    """The first token where a run differs from plain decoding, and a plain step after that prefix."""

    position: int
    plain_token: int | None  # None if the plain run had ended
    tree_token: int | None  # None if the other run had ended
    replayed_token: int  # chosen by the plain step
    margin: float  # difference of the two log-probabilities in the plain step; inf if a run had ended
    tolerance: float  # the largest margin of a tie
    verdict: Literal["tie", "fault"]


def first_divergence(plain: Sequence[int], tree: Sequence[int]) -> int | None:
    """Return the index of the first token at which two runs of one prompt differ.

    If one run is a prefix of the other, this is the length of the shorter run. The result is None if the runs are
    equal.
    """
    if list(plain) == list(tree):
        return None
    length = min(len(plain), len(tree))
    return next((i for i in range(length) if plain[i] != tree[i]), length)


def judge_divergence(
    decoder: Decoder,
    prompt: Sequence[int],
    plain: Sequence[int],
    tree: Sequence[int],
    *,
    is_ours: bool = True,
    sampling: SamplingParams = GREEDY,
) -> Divergence | None:
    """Find the first token at which two runs of one prompt differ, and judge it by a plain step.

    A difference is a tie if the two tokens' log-probabilities differ by at most the tolerance. It is a fault if they
    differ by more, if one run ends before the other, or if a token is not among the 100 most probable. A difference of
    sampled tokens is a fault: random numbers decide between them. The result is None if the runs are equal.

    Args:
        decoder: runs the plain step, after ``prompt`` and the tokens in which the runs agree.
        prompt: token ids.
        plain, tree: generated tokens of plain decoding and of the run with a plan.
        is_ours: whether both runs are of this decoder, so that its measured tolerance applies. If False, other kernels
            computed a run, and the tolerance follows from the dtype and the log-probabilities.
        sampling: of both runs.
    """
    position = first_divergence(plain, tree)
    if position is None:
        return None
    pair = [tokens[position] if position < len(tokens) else None for tokens in (plain, tree)]
    result = decoder.generate(
        [*prompt, *plain[:position]], max_new_tokens=1, ignore_eos=True, speculation=False,
        sampling=replace(sampling, logprobs=100),
    )  # fmt: skip
    assert result.logprobs is not None
    known = dict(result.logprobs[0].top)
    best = max(abs(value) for value in known.values())
    dtype = str(decoder.assembly.target.loaded.dtype).removeprefix("torch.")
    tolerance = decoder.tolerance if is_ours else None
    if tolerance is None:
        tolerance = _LAST_PLACES * _EPSILON[dtype] * max(1.0, best)
    values = [known.get(token, float("-inf")) if token is not None else float("-inf") for token in pair]
    is_judged = sampling.is_greedy and all(value > float("-inf") for value in values)
    margin = abs(values[0] - values[1]) if is_judged else float("inf")
    return Divergence(
        position, pair[0], pair[1], result.tokens[0], margin, tolerance, "tie" if margin <= tolerance else "fault"
    )
