"""Dequantises tensors of GGUF files."""

import numpy as np
import numpy.typing as npt

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.errors import YggdrasilError

_F32 = 0


def values_of(header: GgufHeader, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """Read one tensor of a GGUF file and return its values, dequantised to float32.

    Raises:
        YggdrasilError: its format is unsupported.
    """
    data = np.fromfile(header.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.start)
    if tensor.kind == _F32:
        return data.view(np.float32).reshape(tensor.shape)
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    rows = data.reshape(*tensor.shape[:-1], -1)
    try:
        values: npt.NDArray[np.float32] = dequantize(rows.view(np.float16) if kind.name == "F16" else rows, kind)
    except NotImplementedError as error:
        raise YggdrasilError(
            f"{shown(header.path)} stores {tensor.name} as {kind.name}, which is unsupported"
        ) from error
    return values.reshape(tensor.shape)
