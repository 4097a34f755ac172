"""The weights of a GGUF file where they lie: mapped, and read once on their way to packed layers.

Names and the order of rows are those of llama.cpp's conversion, for models whose layers are a decoder's usual ones.
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
_TURNS_NEIGHBOURS = ("llama", "smollm3", "granite")  # rows of queries and keys lie so that neighbours turn
_ADDS_ONE = ("gemma", "gemma2", "gemma3")  # to its norms, before they are written
_PLACES = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_BEHIND_ATTENTION = "post_attention_layernorm"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by GGUF's numbers


def keeps_blocks(header: GgufHeader) -> bool:
    """Whether the layers of the file are in formats that the kernels read."""
    return any(tensor.kind in FORMATS for name, tensor in header.tensors.items() if name.startswith("blk."))


class MappedGguf:
    """A file's weights by the names that checkpoints have for them."""

    def __init__(self, header: GgufHeader, shapes: Mapping[str, tuple[int, ...]], heads: tuple[int, int]) -> None:
        """``heads``: of queries and of keys. YggdrasilError where tensors and ``shapes`` are not of one model."""
        self._header, self._heads = header, heads
        self._places = _places(header, shapes)
        with header.path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # tensors over it are writable; none is

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def blocks(self, name: str) -> QuantisedRows | None:
        """The weight [N, K] as blocks that steps read; None where it is stored in another way."""
        place = self._places[name]
        if place.kind not in FORMATS or len(place.shape) != 2:
            return None
        rows = self._bytes(place).view(place.shape[0], -1)
        order = self._order(place)
        # NumPy's, which wakes no threads: PyTorch's would spin on the cores that packing runs on.
        return QuantisedRows(Format(place.kind), rows if order is None else torch.from_numpy(rows.numpy()[order]))

    def values(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weight in ``dtype``, in memory of its own."""
        place = self._places[name]
        if place.kind in _DTYPES:
            values = self._bytes(place).view(_DTYPES[place.kind]).view(place.shape)
        else:
            values = torch.from_numpy(values_of(self._header, place))
        order = self._order(place)
        values = values if order is None else values[torch.from_numpy(order)]
        if self._header.architecture in _ADDS_ONE and place.name.endswith("norm.weight"):
            values = values.float() - 1
        return values.to(dtype, copy=True)

    def release(self, name: str) -> None:
        """Give up the memory of the mapped weight: a process holds the file's pages no longer than it reads them."""
        place = self._places[name]
        begin = -(-place.start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (place.start + place.num_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, begin, size)

    def _bytes(self, place: GgufTensor) -> Tensor:
        with memoryview(self._data) as view, view[place.start : place.start + place.num_bytes] as part:
            return torch.frombuffer(part, dtype=torch.uint8)

    def _order(self, place: GgufTensor) -> npt.NDArray[np.int64] | None:
        """Which of the file's rows each of the model's is; None where they are in one order."""
        part = place.name.rpartition(".")[0].rpartition(".")[2]
        if self._header.architecture not in _TURNS_NEIGHBOURS or part not in ("attn_q", "attn_k"):
            return None
        heads = self._heads[part == "attn_k"]
        return np.arange(place.shape[0]).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _places(header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, GgufTensor]:
    """Where each weight lies; those that a file may lack are the caller's to leave out of ``shapes``."""
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
        if tensor.shape != shapes[ours]:
            raise YggdrasilError(
                f"{shown(header.path)}: the tensor {theirs} has the shape {list(tensor.shape)} where the model "
                f"({ours}) has {list(shapes[ours])}; the file is damaged or its facts are of another model"
            )
    return {ours: header.tensors[theirs] for theirs, ours in names.items()}


def _name(name: str, behind_attention: str) -> str:
    """What GGUF calls the weight ``name``."""
    stem, _, kind = name.rpartition(".")
    found = _LAYER.match(stem)
    if found is None:
        return f"{_PLACES[stem]}.{kind}"
    part = behind_attention if found[2] == _BEHIND_ATTENTION else _PARTS[found[2]]
    return f"blk.{found[1]}.{part}.{kind}"
