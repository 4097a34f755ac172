"""Reads weights from a memory-mapped GGUF file, to pack them without a second copy in memory.

Translates tensor names and row orders of llama.cpp's conversion, for decoders with standard layers.
"""

import mmap
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.checkpoints.formats.kinds import FORMATS, Format
from yggdrasil.checkpoints.formats.rows import QuantisedRows
from yggdrasil.checkpoints.gguf.values import values_of
from yggdrasil.errors import YggdrasilError

ROPE_FACTORS = "rope_freqs.weight"
_INTERLEAVED_ROTARY = ("llama", "smollm3", "granite")  # query and key rows are stored for rotary pairs (2i, 2i + 1)
_ADDS_ONE = ("gemma", "gemma2", "gemma3")  # the file stores norm weights plus 1
_PLACES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
}  # fmt: skip
_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up", "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
_BEHIND_ATTENTION = "post_attention_layernorm"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by GGUF's type numbers


def has_quantised_layers(header: GgufHeader) -> bool:
    """Return whether a GGUF file has layer weights in a quantised format that the CPU's kernels read directly.

    Embedding and LM head do not count.
    """
    return any(tensor.kind in FORMATS for name, tensor in header.tensors.items() if name.startswith("blk."))


class MappedGguf:
    """The memory-mapped weights of a GGUF file, by their names in Hugging Face checkpoints."""

    def __init__(self, header: GgufHeader, shapes: Mapping[str, tuple[int, ...]], heads: tuple[int, int]) -> None:
        """Map the file. ``shapes`` are the expected shapes by weight name, ``heads`` the query and key head counts.

        Raises:
            YggdrasilError: if a tensor is missing, unknown or has another shape.
        """
        self._header, self._heads, self._shapes = header, heads, shapes
        self._places = _places(header, shapes)
        with header.path.open("rb") as file:
            # ACCESS_COPY: torch.frombuffer warns about read-only memory; nothing writes to it.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def blocks(self, name: str) -> QuantisedRows | None:
        """Return the weight ``name`` [N, K] as rows of GGUF blocks, in the model's row order.

        None if it is not stored in a quantised format that the kernels read.
        """
        place = self._places[name]
        if place.kind not in FORMATS or len(place.shape) != 2:
            return None
        rows = self._bytes(place).view(place.shape[0], -1)
        order = self._order(place)
        # Indexed by NumPy: PyTorch would wake threads that spin on the cores that packing runs on.
        return QuantisedRows(Format(place.kind), rows if order is None else torch.from_numpy(rows.numpy()[order]))

    def values(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a dequantised copy of the weight ``name`` in ``dtype``, in the model's row order."""
        place = self._places[name]
        if place.kind in _DTYPES:
            values = self._bytes(place).view(_DTYPES[place.kind]).view(place.shape)
        else:
            values = torch.from_numpy(values_of(self._header, place))
        order = self._order(place)
        values = values if order is None else values[torch.from_numpy(order)]
        if self._header.architecture in _ADDS_ONE and place.name.endswith("norm.weight"):
            values = values.float() - 1
        return values.to(dtype, copy=True).view(self._shapes.get(name, values.shape))

    def release(self, name: str) -> None:
        """Drop the memory pages of the mapped weight ``name``; a later access reads the file again."""
        place = self._places[name]
        begin = -(-place.start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (place.start + place.num_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, begin, size)

    def _bytes(self, place: GgufTensor) -> Tensor:
        """Return a uint8 view [num_bytes] of the mapped tensor."""
        with memoryview(self._data) as view, view[place.start : place.start + place.num_bytes] as part:
            return torch.frombuffer(part, dtype=torch.uint8)

    def _order(self, place: GgufTensor) -> npt.NDArray[np.int64] | None:
        """Return the permutation [N] with ``model_rows = file_rows[permutation]``; None if it is the identity."""
        part = place.name.rpartition(".")[0].rpartition(".")[2]
        if self._header.architecture not in _INTERLEAVED_ROTARY or part not in ("attn_q", "attn_k"):
            return None
        heads = self._heads[part == "attn_k"]
        return np.arange(place.shape[0]).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _places(header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, GgufTensor]:
    """Return the file's tensor of every weight in ``shapes``, from which callers omit weights a file may lack.

    Raises:
        YggdrasilError: if a tensor is missing, unknown or has another shape.
    """
    has_four = any("pre_feedforward_layernorm" in name for name in shapes)
    is_behind = has_four or not any("input_layernorm" in name for name in shapes)
    names = {_name(name, "post_attention_norm" if is_behind else "ffn_norm"): name for name in shapes}
    missing = sorted(names.keys() - header.tensors.keys())
    unknown = sorted(header.tensors.keys() - names.keys() - {ROPE_FACTORS})
    if missing or unknown:
        listed = ", ".join((missing or unknown)[:3])
        more = len(missing or unknown) - 3
        listed += f" and {more} more" if more > 0 else ""
        what = f"lacks {listed}" if missing else f"holds {listed}, unknown to this architecture"
        raise YggdrasilError(f"{shown(header.path)} {what}; it cannot be loaded as {header.architecture}")
    for theirs, ours in names.items():
        tensor = header.tensors[theirs]
        if tensor.shape != tuple(size for size in shapes[ours] if size != 1):  # a depthwise convolution is [C, 1, K]
            raise YggdrasilError(
                f"{shown(header.path)}: the tensor {theirs} has the shape {list(tensor.shape)} where the model "
                f"({ours}) has {list(shapes[ours])}; the file is damaged or its metadata is of another model"
            )
    return {ours: header.tensors[theirs] for theirs, ours in names.items()}


def _name(name: str, behind_attention: str) -> str:
    """Return GGUF's name of the weight ``name``; ``behind_attention`` is that of the norm after attention."""
    stem, _, kind = name.rpartition(".")
    found = _LAYER.match(stem)
    if found is None:
        return f"{_PLACES[stem]}.{kind}"
    part = behind_attention if found[2] == _BEHIND_ATTENTION else _PARTS[found[2]]
    return f"blk.{found[1]}.{part}.{kind}"
