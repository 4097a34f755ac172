"""A decode that gives other tokens than expected: where its KV cache first differs from that of a fresh pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuda_check.notes import DiffersError
from yggdrasil.engine.decoder import Decoder

TOLERANCE = 1e-3  # of keys and values, relative and absolute; rounding of wide passes stays far below


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The index of the first token that differs, or the length of the shorter text."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def check_tokens(
    decoder: Decoder, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int],
    model: Callable[[], Any] | None,
) -> None:  # fmt: skip
    """Raise DiffersError if ``found``, which ``decoder`` has just written, is not ``expected``.

    The tensors of the error are the keys or values of the first layer that differ at the tokens before the difference;
    if none do, the tokens.

    Args:
        model: returns the target as transformers has it, float32 on the processor; None: only the tokens are compared.
    """
    if list(found) == list(expected):
        return
    same = first_difference(found, expected)
    what = f"token {same} of {list(found)}, which should be {list(expected)}"
    tokens = _padded(found, expected), _padded(expected, found)
    if model is None:
        raise DiffersError(what, *tokens)
    from tiny_pair import cache_rows

    text = [*prompt, *expected[: max(0, same - 1)]]  # the last token is read by the next pass
    fresh, cached = (
        cache_rows(model(), text),
        [rows.cpu()[:, : len(text)] for rows in decoder.assembly.target.cache.rows()],
    )
    layers = len(fresh) // 2
    for number in range(layers):
        for name, index in (("keys", number), ("values", layers + number)):
            if not torch.allclose(cached[index].float(), fresh[index], TOLERANCE, TOLERANCE):
                raise DiffersError(f"{what}; of layer {number} the {name}", cached[index], fresh[index])
    raise DiffersError(f"{what}; keys and values are right; the text", *tokens)


def _padded(tokens: Sequence[int], other: Sequence[int]) -> torch.Tensor:
    return torch.tensor([*tokens, *[-1] * (len(other) - len(tokens))])
