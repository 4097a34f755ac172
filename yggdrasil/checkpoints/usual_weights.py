"""The default weight format of a model."""

from yggdrasil.artifacts.gguf import read_gguf_layout
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.gguf.mapped import has_quantised_layers
from yggdrasil.checkpoints.mxfp4 import holds_mxfp4
from yggdrasil.checkpoints.source import Source
from yggdrasil.native import is_native


def usual_weights(model: str | Source, dtype: str, device: str) -> Weights:
    """Return the default weight format of a model: "file" to keep its quantised blocks, or "full".

    The format is "file" if ``dtype`` is "bfloat16", ``device`` is "cpu", and the native kernels read the model's blocks
    (GGUF, MXFP4 experts) directly.

    Raises:
        YggdrasilError: there is no such model, or its GGUF file is damaged or unsupported.
    """
    found = Source.find(model)
    has_kernels = device == "cpu" and dtype == "bfloat16" and is_native()
    has_blocks = has_quantised_layers(read_gguf_layout(found.gguf)) if found.gguf else holds_mxfp4(found.folder)
    return "file" if has_kernels and has_blocks else "full"
