"""The dimensions that decide what a model costs, and the shape that sizes and named dimensions ask for."""

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

    Key and value heads not named follow ``num_heads`` at the source's group size, or are those of ``size``.
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
        base = replace(SIZES[size], vocab_size=SIZES[size].vocab_size or source.vocab_size)
    else:
        raise YggdrasilError(f"There is no size {size!r}; the sizes are {', '.join(SIZES)}.")
    return replace(base, **given)
