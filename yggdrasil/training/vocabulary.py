"""The tokens that a head can draft: the most frequent ones of the target's own text."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from yggdrasil.training.settings import DRAFT_VOCABULARY
from yggdrasil.training.windows import Window

_PROMPT_WEIGHT = 0.25  # of a prompt's token, where an answer's counts 1: others' text, but what chats are about


def draft_vocabulary(windows: Sequence[Window], vocab_size: int, most: int = DRAFT_VOCABULARY) -> Tensor:
    """The target's tokens that are drafted [draft vocabulary] int64, ascending: all of a vocabulary that is small."""
    if vocab_size <= most:
        return torch.arange(vocab_size)
    counts: Counter[int] = Counter()
    for window in windows:
        answer = window.start + window.answer
        counts.update(window.tokens[answer:])
        for token in window.tokens[:answer]:
            counts[token] += _PROMPT_WEIGHT  # type: ignore[assignment]
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:most]))


def coverage(windows: Sequence[Window], vocabulary: Tensor) -> float:
    """The share of answers' tokens that can be drafted: what agreement cannot exceed."""
    known = set(vocabulary.tolist())
    tokens = [token for window in windows for token in window.tokens[window.start + window.answer :]]
    return sum(token in known for token in tokens) / max(len(tokens), 1)
