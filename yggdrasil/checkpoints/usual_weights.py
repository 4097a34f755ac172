"""Which weights a model is decoded with unless something else is asked for."""

from yggdrasil.artifacts.gguf import read_gguf_header
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.gguf.mapped import keeps_blocks
from yggdrasil.checkpoints.source import Source
from yggdrasil.native import is_native


def usual_weights(model: str | Source, dtype: str, device: str) -> Weights:
    """The blocks of a quantised GGUF file as they are, where there are kernels that read them; else full weights.

    In float32, the arithmetic of comparisons, a model is what transformers makes of it.
    """
    found = Source.find(model)
    has_kernels = device == "cpu" and dtype == "bfloat16" and is_native()
    return "file" if has_kernels and found.gguf and keeps_blocks(read_gguf_header(found.gguf)) else "full"
