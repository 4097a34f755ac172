"""Stateless random numbers as functions of a key, a position and a token, by the generator SplitMix64.

Numbers can be computed in any order. Integer arithmetic is exact, so CPU and GPU give the same bits. The random word of
(key, position) is output ``position`` of SplitMix64 seeded with ``key``; it seeds the generator whose outputs are
indexed by token.

Dims: W rows, V vocabulary.
"""

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64  # int64 arithmetic wraps around, as unsigned words do
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_BITS = 52  # with the half step added a float64 holds the number exactly, so it stays below 1
_LARGEST = 1.0 - 2.0**-24  # float32's largest number below 1


def random_words(start: Tensor, index: Tensor) -> Tensor:
    """Return output ``index`` (from 0) of the generator SplitMix64 seeded with ``start``; int64, shapes broadcast."""
    word = start + (index + 1) * _STEP
    word = (word ^ _shifted(word, 30)) * _FIRST
    word = (word ^ _shifted(word, 27)) * _SECOND
    return word ^ _shifted(word, 31)


def gumbel_noise(key: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return independent standard Gumbel variables, float32; argmax(log p + noise) over tokens is a sample from p.

    Args:
        key: int64, the key of a request (``key_of``). Equal arguments give equal noise.
        positions: int64 indices of the tokens to draw, counted from the first prompt token.
        tokens: int64 token ids. All three broadcast to the result's shape: [1], [W, 1] and [V] to [W, V].
    """
    return _gumbel(random_words(random_words(key, positions), tokens))


def gumbel_noise_at(key: int, position: int, tokens: Tensor) -> Tensor:
    """Return the noise of ``gumbel_noise`` at one position, [n] float32, with fewer tensor operations.

    Args:
        key: the key of a request, an int64.
        position: index of the token to draw, counted from the first prompt token.
        tokens: [n] int64 token ids on the CPU.
    """
    return _gumbel(random_words(torch.tensor([signed(_word(key, position))]), tokens))


def _gumbel(words: Tensor) -> Tensor:
    # Uniform in (0, 1), finest near 0, where -log(1 - u) is small and the noise largest: the argmax tokens are there.
    uniform = _uniform(words, torch.float32).clamp(max=_LARGEST)
    return -torch.log(-torch.log1p(-uniform))


def uniform_number(key: int, position: int) -> float:
    """Return the pseudo-random float64 of ``key`` and ``position``, uniform between 0 and 1, both excluded."""
    return ((_word(_word(key, position), 0) >> 64 - _BITS) + 0.5) * 2.0**-_BITS


def key_of(seed: int, stream: int) -> int:
    """Return the int64 key of random stream number ``stream`` of ``seed`` (0 to 2**64 - 1). Streams are independent."""
    return signed(_word(_word(seed, 0), stream))


def signed(word: int) -> int:
    """Return the int64 with the bits of the unsigned 64-bit integer ``word``."""
    return word - 2**64 if word >= 2**63 else word


def _word(start: int, index: int) -> int:
    """Return output ``index`` of SplitMix64 seeded with ``start`` as an unsigned integer, as ``random_words`` does."""
    word = (start + (index + 1) * _STEP) % 2**64
    word = (word ^ word >> 30) * _FIRST % 2**64
    word = (word ^ word >> 27) * _SECOND % 2**64
    return word ^ word >> 31


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift int64 ``words`` right by ``bits`` as unsigned integers."""
    shifted: Tensor = (words >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Map int64 ``words`` to uniform numbers in ``dtype`` above 0 and up to 1; in float64, 1 is excluded."""
    # Half a step above 0: the logarithm of 0 is infinite.
    return (_shifted(words, 64 - _BITS).to(dtype) + 0.5) * 2.0**-_BITS
