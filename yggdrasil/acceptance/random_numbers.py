"""Random numbers that are functions of a key, a position and a token, on every device: the generator SplitMix64.

There is no state: any number can be computed alone and in any order. Integer arithmetic is exact, so a GPU has the same
bits as a CPU. Number ``i`` of a key is SplitMix64's output number ``i`` from that start; a position's own start is such
a number.

Dims: W rows, V vocabulary.
"""

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64  # int64 arithmetic wraps around, as unsigned words do
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_BITS = 53
_LARGEST = 1.0 - 2.0**-24  # float32's largest number below 1


def random_words(start: Tensor, index: Tensor) -> Tensor:
    """Number ``index`` of the generator that begins at ``start``, both int64 of shapes that broadcast; int64."""
    word = start + (index + 1) * _STEP
    word = (word ^ _shifted(word, 30)) * _FIRST
    word = (word ^ _shifted(word, 27)) * _SECOND
    return word ^ _shifted(word, 31)


def gumbel_noise(key: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Independent Gumbel variables, float32: argmax(log p + noise) follows p.

    ``key``, ``positions`` and ``tokens`` are int64 of shapes that broadcast, such as [1], [W, 1] and [V].
    """
    words = random_words(random_words(key, positions), tokens)
    # Uniform in [0, 1) with the finest steps near 0, where -log(1 - u) is small: the tokens that win lie there.
    uniform = _uniform(words, torch.float32).clamp(max=_LARGEST)
    return -torch.log(-torch.log1p(-uniform))


def uniform_number(key: int, position: int) -> float:
    """One number in [0, 1)."""
    start = random_words(torch.tensor([key]), torch.tensor([position]))
    return float(_uniform(random_words(start, torch.zeros_like(start)), torch.float64))


def key_of(seed: int, stream: int) -> int:
    """The key, as int64, of one of the independent streams of a seed below 2**64."""
    start = random_words(torch.tensor([signed(seed)]), torch.tensor([0]))
    return int(random_words(start, torch.tensor([stream])))


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - 2**64 if word >= 2**63 else word


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shifted to the right as unsigned words."""
    shifted: Tensor = (words >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    # Half a step above 0: the logarithm of 0 is infinite.
    return (_shifted(words, 64 - _BITS).to(dtype) + 0.5) * 2.0**-_BITS
