"""Build logits processors from sampling parameters: transformers' own, in transformers' order, and count penalties.

Dims: V vocabulary, L tokens of the prefix.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.errors import YggdrasilError

Process: TypeAlias = Callable[..., Tensor]  # (prefix [1, L] int64, scores [1, V] float32) -> scores


class Processors(NamedTuple):
    """Processors that turn logits into scores; ``truncating`` (temperature to typical-p) is empty if greedy."""

    shaping: list[Process]
    truncating: list[Process]


class CountPenaltyLogitsProcessor:
    """The OpenAI API's penalties: subtract presence + frequency * count from the logits of generated tokens."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return new scores [1, V] from ``input_ids`` [1, L] int64 and ``scores`` [1, V] float32."""
        tokens, counts = input_ids[0, self._prompt_length :].unique(return_counts=True)
        penalised = scores.clone()
        penalised[0, tokens] -= self._presence + self._frequency * counts.to(scores.dtype)
        return penalised


class TopPLogitsProcessor:
    """Keep the fewest highest scores whose probability together is at least ``top_p``; set all other scores to -inf.

    It does what transformers' ``TopPLogitsWarper`` does, but sorts the whole vocabulary only if ``top_p`` reaches
    beyond the 1,024 likeliest tokens: sorting 262,144 scores takes longer than a pass of a small model. Scores that
    equal the lowest one kept are kept too.
    """

    _FEW = (64, 1024)  # tokens to sort, before all are sorted

    def __init__(self, top_p: float, in_full: Process) -> None:
        """``in_full`` is transformers' processor for the same ``top_p``."""
        self._top_p, self._in_full = top_p, in_full

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return new scores [1, V] from ``scores`` [1, V] float32; ``input_ids`` are not read."""
        total = scores[0].logsumexp(0)
        for few in self._FEW:
            highest = scores[0].topk(min(few, scores.shape[-1])).values
            probabilities = (highest - total).double().exp()
            is_kept = probabilities.cumsum(0) - probabilities < self._top_p
            if len(highest) == scores.shape[-1] or not is_kept[-1]:
                least = highest[is_kept.sum().clamp(min=1) - 1]
                return scores.masked_fill(scores < least, float("-inf"))
        return self._in_full(input_ids, scores)


def build_processors(
    params: SamplingParams, prompt_length: int, eos: Collection[int], bad_words: Sequence[Sequence[int]]
) -> Processors:
    """Return the logits processors of one request, in the order to apply them; the grammar is not among them.

    The processors cannot be shared between requests, because some store ``prompt_length``.

    Args:
        prompt_length: number of tokens of the prompt.
        eos: end-of-text token ids; without any, ``min_new_tokens`` has no effect.
        bad_words: ``params.bad_words`` as token sequences, from ``tokenize_bad_words``.
    """
    from transformers.generation import logits_process as theirs  # imported late: plain greedy requests need none

    shaping: list[Process] = []
    eos_tokens = sorted(eos)
    if params.logit_bias:
        biases: list[list[list[int] | float]] = [[[token], float(bias)] for token, bias in params.logit_bias.items()]
        shaping.append(theirs.SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1.0:
        shaping.append(theirs.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        shaping.append(CountPenaltyLogitsProcessor(prompt_length, params.presence_penalty, params.frequency_penalty))
    if bad_words:
        shaping.append(theirs.NoBadWordsLogitsProcessor([list(word) for word in bad_words], eos_tokens or None))
    if params.min_new_tokens and eos_tokens:
        shaping.append(
            theirs.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, torch.tensor(eos_tokens))
        )
    shaping.extend(params.logits_processors)
    return Processors(shaping, [] if params.is_greedy else _truncating(params))


def _truncating(params: SamplingParams) -> list[Process]:
    from transformers.generation import logits_process as theirs

    warpers: tuple[tuple[bool, Callable[[], Process]], ...] = (
        (params.temperature != 1.0, lambda: theirs.TemperatureLogitsWarper(float(params.temperature))),
        (params.top_k > 0, lambda: theirs.TopKLogitsWarper(params.top_k)),
        (params.top_p < 1.0, lambda: TopPLogitsProcessor(params.top_p, theirs.TopPLogitsWarper(params.top_p))),
        (params.min_p > 0.0, lambda: theirs.MinPLogitsWarper(params.min_p)),
        (params.typical_p < 1.0, lambda: theirs.TypicalLogitsWarper(params.typical_p)),
    )
    return [make() for is_wanted, make in warpers if is_wanted]


def tokenize_bad_words(words: Sequence[str | Sequence[int]], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Return the token sequences of ``words``, in their order and without repetitions.

    A string gives two sequences: its own tokens and its tokens after a space, both without special tokens. Items that
    are token sequences are returned as they are.

    Raises:
        YggdrasilError: a word has no tokens, or tokens outside the vocabulary.
    """
    sequences: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in words:
        spellings = [word, " " + word] if isinstance(word, str) else [word]
        for spelling in spellings:
            tokens = (
                tokenizer.encode(spelling, add_special_tokens=False) if isinstance(spelling, str) else list(spelling)
            )
            if not tokens or not all(0 <= token < vocab_size for token in tokens):
                raise YggdrasilError(f"bad_words holds {word!r}, which is no sequence of tokens of this vocabulary")
            sequences[tuple(tokens)] = None
    return [list(tokens) for tokens in sequences]


def completing_tokens(words: Sequence[Sequence[int]], text: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of ``words``, token sequences, if they followed the tokens ``text``.

    The tokens are in the order of ``words``; a word of one token always gives this token.
    """
    return [word[-1] for word in words if list(word[:-1]) == list(text[len(text) - len(word) + 1 :])]


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Check that ``logit_bias`` of ``params`` names only tokens of the vocabulary.

    Raises:
        YggdrasilError: a token is outside the vocabulary.
    """
    wrong = next((token for token in params.logit_bias if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise YggdrasilError(f"logit_bias has token {wrong}, but the vocabulary ends at {vocab_size - 1}")
