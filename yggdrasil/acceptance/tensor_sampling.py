"""Sampling as tensor code of static shapes, for captured steps: the equivalent of ``Sampler`` for all rows at once.

Dims: W rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.acceptance.coins import draw_key
from yggdrasil.acceptance.random_numbers import gumbel_noise
from yggdrasil.acceptance.sampling import GREEDY, SamplingParams


@dataclass(frozen=True)
class SamplingKind:
    """Which sampling operations a request needs; steps are compiled and captured once for each kind in use."""

    shapes: bool  # whether it has biases or penalties
    truncates: bool  # whether it has top-k or top-p, which sort the vocabulary

    @property
    def name(self) -> str:
        """Suffix of the names of steps compiled for this sampling kind."""
        return f"{'-shaped' if self.shapes else ''}{'-truncated' if self.truncates else ''}-sampled"


def kind_on_device(params: SamplingParams) -> SamplingKind | None:
    """Return the sampling kind of a request that captured steps can serve, else None: the host needs the logits.

    The host needs them for constraints, log-probabilities, ``typical_p``, ``bad_words``, ``min_new_tokens`` and
    ``logits_processors``.
    """
    if (
        params.constraint is not None
        or params.logprobs is not None
        or (params.typical_p < 1.0 and not params.is_greedy)
        or params.bad_words
        or params.min_new_tokens
        or params.logits_processors
    ):
        return None
    has_penalties = bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0
    truncates = not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0)
    return SamplingKind(has_penalties or bool(params.logit_bias), truncates)


class SamplingTensors:
    """Sampling parameters and token counts of one request, in tensors that captured steps read.

    The host writes them between requests only: committed tokens are counted on the device (``count``).
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        def floats(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        self._vocab_size = vocab_size
        self._integers = torch.zeros(2, dtype=torch.int64, device=device)  # key, top_k
        self._numbers = floats(7)
        # NOTE: read from memory, not made by the step. Products with them wrap around. Where they are a loop's counter,
        # a C++ compiler rules that out, and TorchInductor's code for a CPU then wrote past its buffers.
        self._tokens = torch.arange(vocab_size, device=device)
        self._bias, self._in_prompt, self._counts = floats(vocab_size), floats(vocab_size), floats(vocab_size)
        self.begin(GREEDY, 0, ())

    def tensors(self) -> list[Tensor]:
        """Return the sampling parameters and counts as tensors, the last argument of ``choose``."""
        return [self._integers, self._numbers, self._tokens, self._bias, self._in_prompt, self._counts]

    def begin(self, params: SamplingParams, seed: int, prompt: Sequence[int]) -> None:
        """Set the parameters, seed and prompt of the next request and reset its token counts."""
        top_k = min(params.top_k, self._vocab_size) or self._vocab_size
        self._integers.copy_(torch.tensor([draw_key(seed), top_k]))
        is_drawn = not params.is_greedy
        self._numbers.copy_(
            torch.tensor(
                [
                    params.temperature if is_drawn else 1.0, float(is_drawn), 1.0 - params.top_p,
                    params.min_p if is_drawn else 0.0, params.repetition_penalty, params.presence_penalty,
                    params.frequency_penalty,
                ],
                dtype=torch.float32,
            )
        )  # fmt: skip
        bias, in_prompt = torch.zeros(self._vocab_size), torch.zeros(self._vocab_size)
        for token, value in params.logit_bias.items():
            bias[token] = value
        in_prompt[list(prompt)] = 1.0
        self._bias.copy_(bias)
        self._in_prompt.copy_(in_prompt)
        self._counts.zero_()

    def count(self, tokens: Tensor, exist: Tensor) -> None:
        """Add generated ``tokens`` [W] int64 to the counts; ``exist`` [W] bool selects those that count."""
        self._counts.index_add_(0, tokens, exist.to(torch.float32))


def choose(
    kind: SamplingKind, logits: Tensor, positions: Tensor, path_counts: Tensor | None, tensors: Sequence[Tensor]
) -> Tensor:
    """Return the token chosen after each row, [W] int64.

    Args:
        logits: [W, V].
        positions: [W] int64, the index in the text of the chosen token.
        path_counts: [W, V] float32, number of occurrences of each token on the row's path below the root, or None.
        tensors: those of ``SamplingTensors.tensors``.
    """
    integers, numbers, tokens, *text = tensors
    key, top_k = integers[:1], integers[1:]
    temperature, is_drawn, refused_mass, min_p, *penalties = numbers.split(1)
    scores = logits.float()
    if kind.shapes:
        scores = _shaped(scores, path_counts, text, penalties)
    scores = scores / temperature
    if kind.truncates:
        scores = _truncated(scores, top_k, refused_mass)
    best = scores.amax(-1, keepdim=True)
    scores = torch.where(torch.exp(scores - best) < min_p, float("-inf"), scores)
    noise = gumbel_noise(key, positions[:, None], tokens)
    return torch.where(is_drawn > 0, scores + noise, scores).argmax(-1)


def counts_on_path(tokens: Tensor, ancestors: Tensor, vocab_size: int) -> Tensor:
    """Count the occurrences of each token on each row's path below the root (row 0), [W, V] float32.

    ``tokens`` [W] int64; ``ancestors`` [W, W] bool, true also on the diagonal.
    """
    width = tokens.shape[0]
    below = ancestors & (torch.arange(width, device=tokens.device) > 0)
    counts = torch.zeros(width, vocab_size, dtype=torch.float32, device=tokens.device)
    return counts.scatter_add(1, tokens.expand(width, width), below.to(torch.float32))


def _shaped(scores: Tensor, path_counts: Tensor | None, text: Sequence[Tensor], penalties: Sequence[Tensor]) -> Tensor:
    """Apply the bias, then transformers' repetition penalty, then presence and frequency penalties."""
    (bias, in_prompt, counts), (repetition, presence, frequency) = text, penalties
    if path_counts is not None:
        counts = counts + path_counts
    scores = scores + bias
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(in_prompt + counts > 0, repeated, scores)
    return torch.where(counts > 0, scores - (presence + frequency * counts), scores)


def _truncated(scores: Tensor, top_k: Tensor, refused_mass: Tensor) -> Tensor:
    """Apply top-k, then top-p: keep the fewest highest scores whose probability is at least 1 - ``refused_mass``.

    Scores equal to the lowest one kept are kept too, so their order does not matter. Others become -inf.
    """
    size = scores.shape[-1]
    ascending = scores.sort(-1).values
    least = ascending.index_select(-1, size - top_k)  # [W, 1]
    kept = torch.where(ascending < least, float("-inf"), ascending)
    refused = kept.softmax(-1).cumsum(-1) <= refused_mass
    first = refused.sum(-1, keepdim=True).clamp(max=size - 1)
    return torch.where(scores < torch.maximum(least, ascending.gather(-1, first)), float("-inf"), scores)
