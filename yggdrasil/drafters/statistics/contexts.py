"""Contexts of n-gram statistics: their sizes, which are those of the native counts, and their keys in a table."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

LONGEST = 6  # the most tokens of a context of the text
TABLE_LENGTH = 3  # the most tokens of a context of a table
NUM_CONTEXTS = LONGEST + TABLE_LENGTH
BRANCHES = 8  # the most continuations per context of a table, and the most children per node
HIDDEN = 16  # hidden units of a scorer
TOKEN_BITS = 21  # bits per token in a context's key
MOST_TOKEN = (1 << TOKEN_BITS) - 2

Tokens = TypeVar("Tokens", int, npt.NDArray[np.int64])


def table_key(context: Sequence[Tokens]) -> Tokens:
    """Return the int64 key of a context of one to three tokens in an n-gram table.

    Args:
        context: token ids, each up to ``MOST_TOKEN``, in text order. For many contexts of one length: an array for each
            index in the context.
    """
    key = context[0] + 1
    for token in context[1:]:
        key = key << TOKEN_BITS | token + 1
    return key


def has_one_token(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return for each key of an n-gram table whether its context has one token.

    Every counted token is counted in exactly one such context.
    """
    found: npt.NDArray[np.bool_] = keys < 1 << TOKEN_BITS
    return found


def is_longest(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return for each key of an n-gram table whether its context has three tokens, the longest."""
    found: npt.NDArray[np.bool_] = keys >= 1 << TOKEN_BITS * (TABLE_LENGTH - 1)
    return found
