"""The dimensions that decide what a model costs, and the shape that sizes and named dimensions ask for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from yggdrasil.errors import YggdrasilError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions that decide what a Llama-family model costs."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int


_LLAMA_1B = ModelShape(2048, 16, 32, 8, 64, 8192, vocab_size=0)
_LLAMA_7B = ModelShape(4096, 32, 32, 32, 128, 11008, vocab_size=0)
SIZES: Mapping[str, ModelShape] = {  # vocab_size 0: the source's own
    "100M": ModelShape(768, 14, 12, 12, 64, 2048, vocab_size=0),
    "350M": ModelShape(1024, 24, 16, 16, 64, 3328, vocab_size=0),
    "1B": _LLAMA_1B,
    "7B": _LLAMA_7B,
    "llama-68m": ModelShape(768, 2, 12, 12, 64, 3072, vocab_size=32000),
    "llama2-7b": replace(_LLAMA_7B, vocab_size=32000),
    "llama3-1b": replace(_LLAMA_1B, vocab_size=128256),
    "llama3-8b": ModelShape(4096, 32, 32, 8, 128, 14336, vocab_size=128256),
}


def resolve_shape(source: ModelShape, size: str | None, dimensions: Mapping[str, int | None]) -> ModelShape:
    """Return the shape asked for: named dimensions over those of ``size`` over the source's own.

    A size that is too small for the source in a dimension is made just large enough there. Key and value heads not
    named follow ``num_heads`` at the source's group size, or are those of ``size``.
    """
    given = {name: value for name, value in dimensions.items() if value is not None}
    if size is None:
        if not given:
            raise YggdrasilError("Nothing to widen: give --size or at least one dimension such as --hidden-size.")
        base = source
        if "num_heads" in given:
            group = source.num_heads // source.num_kv_heads
            given.setdefault("num_kv_heads", max(1, given["num_heads"] // group))
    elif size in SIZES:
        base = _fitted(SIZES[size], source)
    else:
        raise YggdrasilError(f"There is no size {size!r}; the sizes are {', '.join(SIZES)}.")
    return replace(base, **given)


def _fitted(size: ModelShape, source: ModelShape) -> ModelShape:
    """``size``, each dimension raised to the least that can hold ``source``."""
    num_heads = max(size.num_heads, source.num_heads)
    head_dim = -(-size.head_dim // source.head_dim) * source.head_dim
    return ModelShape(
        hidden_size=-(-max(size.hidden_size, source.hidden_size) // num_heads) * num_heads,
        num_layers=max(size.num_layers, source.num_layers),
        num_heads=num_heads,
        num_kv_heads=least_kv_heads(source, num_heads, size.num_kv_heads),
        head_dim=head_dim,
        intermediate_size=max(size.intermediate_size, source.intermediate_size),
        vocab_size=max(size.vocab_size, source.vocab_size),
    )


def least_kv_heads(source: ModelShape, num_heads: int, at_least: int = 1) -> int:
    """The fewest key-value heads, ``at_least`` so many, whose groups can hold every group of the source."""
    group = source.num_heads // source.num_kv_heads
    return next(
        count
        for count in range(at_least, num_heads + 1)
        if num_heads % count == 0 and source.num_kv_heads * math.ceil(group * count / num_heads) <= count
    )
