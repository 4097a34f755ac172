"""Dequantises tensors of GGUF files, and checks which tensors a file has."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.errors import YggdrasilError, listed

_F32 = 0
ROPE_FACTORS = "rope_freqs.weight"  # tensor with divisors of the rotary frequencies


def values_of(header: GgufHeader, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """Read one tensor of a GGUF file, and return it dequantised to float32.

    The result has the shape ``tensor.shape``, outermost dimension first: [outputs, inputs] for a linear layer. Rows are
    in the order of the file, which for some weights differs from the model's order.

    Raises:
        YggdrasilError: the quantisation format of the tensor is unsupported.
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


def unsupported_fact(header: GgufHeader, name: str, fact: object) -> YggdrasilError:
    """Return the error for metadata ``name`` with an unsupported or missing value."""
    return YggdrasilError(
        f"{shown(header.path)}: its {name} is {fact!r}, which is unsupported; fetch the file again, or give the "
        "checkpoint folder"
    )


def refuse_other_tensors(header: GgufHeader, names: Mapping[str, str], ignored: Collection[str]) -> None:
    """Check that a GGUF file has the tensors of ``names`` (file's name -> model's name) and no others.

    Args:
        ignored: further tensors that the file may have.

    Raises:
        YggdrasilError: a weight has no tensor, or a tensor belongs to no weight.
    """
    missing = sorted(names.keys() - header.tensors.keys())
    unknown = sorted(header.tensors.keys() - names.keys() - {*ignored})
    if missing or unknown:
        what = f"lacks {listed(missing)}" if missing else f"holds {listed(unknown)}, unknown to this architecture"
        raise YggdrasilError(f"{shown(header.path)} {what}; it cannot be loaded as {header.architecture}")


def other_shape(header: GgufHeader, tensor: GgufTensor, name: str, shape: Sequence[int]) -> YggdrasilError:
    """Return the error for a tensor whose shape is not the ``shape`` of the model's weight ``name``."""
    return YggdrasilError(
        f"{shown(header.path)}: the tensor {tensor.name} has the shape {list(tensor.shape)} where the model "
        f"({name}) has {list(shape)}; the file is damaged or its metadata is of another model"
    )
