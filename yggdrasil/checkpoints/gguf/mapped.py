"""Reads weights from a memory-mapped GGUF file, to pack them without a second copy in memory.

The module translates tensor names and row orders of llama.cpp's conversion, for decoders with standard layers.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.checkpoints.formats.kinds import FORMATS
from yggdrasil.checkpoints.formats.rows import PackedRows
from yggdrasil.checkpoints.gguf.packing import packer_of
from yggdrasil.checkpoints.gguf.values import ROPE_FACTORS, other_shape, refuse_other_tensors, values_of

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
_FEW_BYTES = 1 << 20
_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by GGUF's type numbers


def has_quantised_layers(header: GgufHeader) -> bool:
    """Return whether a GGUF file has layer weights in a quantised format that the CPU's kernels read directly.

    Embedding and LM head do not count.
    """
    return any(tensor.kind in FORMATS for name, tensor in header.tensors.items() if name.startswith("blk."))


class MappedGguf:
    """The memory-mapped weights of a GGUF file, by their names in Hugging Face checkpoints."""

    def __init__(self, header: GgufHeader, shapes: Mapping[str, tuple[int, ...]], heads: tuple[int, int]) -> None:
        """Map the file. ``shapes`` are expected shapes by weight name, ``heads`` the counts (query heads, key heads).

        Raises:
            YggdrasilError: if a tensor is missing, unknown or has another shape.
        """
        self._header, self._shapes = header, shapes
        self._packer = packer_of(header, heads)
        self._places = _places(header, shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def packed(self, name: str) -> PackedRows | None:
        """Return the quantised weight ``name`` [N, K] in the layout of the CPU's kernels, in the model's row order.

        The result is None if the weight is not stored in a quantised format that the kernels read.
        """
        place = self._places[name]
        found = self._packer.packed(place)
        if found is None:
            return None
        region, begin, *shape = found
        packed = torch.frombuffer(region, dtype=torch.uint8, count=shape[0] * shape[1], offset=begin)
        outputs, inputs = place.shape
        return PackedRows(place.kind, outputs, inputs, packed.view(*shape))

    def stop_packing(self) -> None:
        """Let the thread that packs weights in advance end, because the loader needs them unpacked; do not wait."""
        self._packer.stop()

    def values(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a dequantised copy of the weight ``name`` in ``dtype``, in the model's row order.

        Raises:
            YggdrasilError: the weight's format is unsupported.
        """
        place = self._places[name]
        if place.kind in _DTYPES:
            values = self._bytes(place).view(_DTYPES[place.kind]).view(place.shape)
        else:
            values = torch.from_numpy(values_of(self._header, place))
        order = self._packer.order(place)
        values = values if order is None else values[torch.from_numpy(order)]
        if self._header.architecture in _ADDS_ONE and place.name.endswith("norm.weight"):
            values = values.float() - 1
        return values.to(dtype, copy=True).view(self._shapes.get(name, values.shape))

    def release(self, name: str) -> None:
        """Drop the memory pages of the mapped weight ``name``; a later access reads the file again."""
        place = self._places[name]
        self._packer.release(place.start, place.num_bytes)

    def _bytes(self, place: GgufTensor) -> Tensor:
        """Return the stored bytes, uint8 [num_bytes]: a copy of at most 1 MiB, otherwise a view of the mapped file.

        Reading a mapped page also maps its neighbours, so views of some hundred norms would keep tens of megabytes
        mapped.
        """
        if place.num_bytes <= _FEW_BYTES:
            with self._header.path.open("rb") as file:
                file.seek(place.start)
                return torch.frombuffer(bytearray(file.read(place.num_bytes)), dtype=torch.uint8)
        with memoryview(self._packer.data) as view, view[place.start : place.start + place.num_bytes] as part:
            return torch.frombuffer(part, dtype=torch.uint8)


def _places(header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, GgufTensor]:
    """Return the file's tensor of every weight in ``shapes``. Callers omit weights that the file may lack.

    Raises:
        YggdrasilError: if a tensor is missing, unknown or has another shape.
    """
    has_four = any("pre_feedforward_layernorm" in name for name in shapes)
    is_behind = has_four or not any("input_layernorm" in name for name in shapes)
    names = {_name(name, "post_attention_norm" if is_behind else "ffn_norm"): name for name in shapes}
    refuse_other_tensors(header, names, (ROPE_FACTORS,))
    for theirs, ours in names.items():
        tensor = header.tensors[theirs]
        if tensor.shape != tuple(size for size in shapes[ours] if size != 1):  # a depthwise convolution is [C, 1, K]
            raise other_shape(header, tensor, ours, shapes[ours])
    return {ours: header.tensors[theirs] for theirs, ours in names.items()}


def _name(name: str, behind_attention: str) -> str:
    """Return the GGUF name of the weight ``name``. The norm after attention has the name ``behind_attention``."""
    stem, _, kind = name.rpartition(".")
    found = _LAYER.match(stem)
    if found is None:
        return f"{_PLACES[stem]}.{kind}"
    part = behind_attention if found[2] == _BEHIND_ATTENTION else _PARTS[found[2]]
    return f"blk.{found[1]}.{part}.{kind}"
