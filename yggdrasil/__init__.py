"""Yggdrasil: latency-optimal speculative tree decoding of one request, with exactly the target model's output."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Constraint", "Decoder", "SamplingParams", "Speculation", "YggdrasilError", "__version__", "custom_generate"]

if TYPE_CHECKING:
    from yggdrasil.acceptance.sampling import Constraint, SamplingParams
    from yggdrasil.acceptance.speculation import Speculation
    from yggdrasil.errors import YggdrasilError
    from yggdrasil.in_transformers import custom_generate
    from yggdrasil.pretrained import Decoder


def __getattr__(name: str) -> Any:
    # Lazy: packages that need no torch import without it.
    if name in ("Constraint", "SamplingParams"):
        from yggdrasil.acceptance import sampling

        return getattr(sampling, name)
    if name == "Speculation":
        from yggdrasil.acceptance.speculation import Speculation

        return Speculation
    if name == "Decoder":
        from yggdrasil.pretrained import Decoder

        return Decoder
    if name == "custom_generate":
        from yggdrasil.in_transformers import custom_generate

        return custom_generate
    if name == "YggdrasilError":
        from yggdrasil.errors import YggdrasilError

        return YggdrasilError
    raise AttributeError(f"module 'yggdrasil' has no attribute {name!r}")
