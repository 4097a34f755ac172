"""Portable implementations, in PyTorch, of the operators over quantised weights in GGUF's layout, for GPUs.

On GPUs, ``packed`` has a weight's rows of GGUF blocks unchanged, [N, bytes] uint8. The CPU kernels of the native
library read another layout.

Dims: W rows, N outputs, K inputs; for experts: E experts, C experts per row, H hidden size, I intermediate size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from yggdrasil.native.portable import activated

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4 = 2, 3, 6, 7, 8, 12, 13, 14, 39  # GGUF's type numbers
FORMATS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4)
# Twice the numbers that three bits of a 4-bit float stand for; the fourth bit is the sign.
_MXFP4_VALUES = 0, 1, 2, 3, 4, 6, 8, 12


def quantised_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, form: int, num_threads: int
) -> Tensor:
    """Multiply ``x`` [..., K] by a quantised weight [N, K], dequantised as a whole, add ``bias``, and return [..., N].

    Args:
        packed: [N, bytes] uint8, the weight's GGUF blocks.
        bias: [N] or None.
        out_features: N.
        form: GGUF type number of the blocks.
        num_threads: not used here.
    """
    return torch.nn.functional.linear(x, dequantise(packed, form, x.shape[-1]).to(x.dtype), bias)


def quantised_rows(ids: Tensor, packed: Tensor, form: int, inputs: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return the rows ``ids`` [...] of a quantised weight, dequantised to [..., ``inputs``] in ``dtype``.

    Args:
        packed: [N, bytes] uint8, the weight's GGUF blocks.
        form: GGUF type number of the blocks.
        num_rows: not used here; the native operator's packed form pads N.
    """
    return dequantise(packed[ids], form, inputs).to(dtype)


def quantised_experts(  # noqa: PLR0913  (an operator's schema)
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    packed: Sequence[Tensor],
    forms: Sequence[int],
    biases: Sequence[Tensor],
    inner_features: int,
    activation: int,
    clamp: Sequence[float],
    num_threads: int,
) -> Tensor:
    """Return the weighted sums [W, H] of the outputs of each row's experts, whose weights are dequantised as a whole.

    Args:
        x: [W, H].
        chosen: [W, C] int64, expert ids; the id E stands for no expert.
        shares: [W, C], weights of the experts' outputs.
        packed: GGUF blocks of gate (unless experts have none) and up [E, I, bytes], and of down [E, H, bytes], uint8.
        forms: GGUF type numbers of the blocks of each of ``packed``.
        biases: empty, or float32 of gate [E, I], up [E, I] and down [E, H].
        inner_features: I.
        activation: 0 for SiLU, 1 for tanh-approximated GELU, 2 for squared ReLU without a gate.
        clamp: empty, or limit and alpha of gpt-oss's clamped SwiGLU.
        num_threads: not used here.
    """

    def products(part: int, rows: Tensor) -> Tensor:  # [W, C or 1, K] -> [W, C, N]
        weight = dequantise(packed[part], forms[part], rows.shape[-1])
        values = (rows.float() @ weight.to(x.dtype).float()[ids].transpose(-1, -2)).squeeze(-2)
        return (values + biases[part][ids] if biases else values).to(x.dtype)

    ids = chosen.clamp(max=packed[0].shape[0] - 1)
    rows = x[:, None, None].expand(-1, chosen.shape[1], -1, -1)
    firsts = [products(part, rows) for part in range(len(packed) - 1)]
    outputs = products(len(packed) - 1, activated(firsts[0], firsts[-1], activation, clamp)[:, :, None])
    weights = torch.where(chosen < packed[0].shape[0], shares, 0.0)
    return (outputs.float() * weights.float()[..., None]).sum(1).to(x.dtype)


ON_GPUS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (quantised_linear, quantised_rows, quantised_experts)
}


def weights_per_block(form: int) -> int:
    """Return the number of weights in a block of the GGUF type number ``form``: 32 or 256."""
    return 256 if form in (Q4_K, Q5_K, Q6_K) else 32


def dequantise(rows: Tensor, form: int, num_inputs: int) -> Tensor:
    """Return ``rows`` [..., bytes] uint8 of GGUF blocks of type ``form`` as weights [..., ``num_inputs``] float32."""
    size = weights_per_block(form)
    inputs = torch.arange(num_inputs, device=rows.device)
    start, at = inputs // size * (rows.shape[-1] * size // num_inputs), inputs % size

    def byte(place: Tensor) -> Tensor:
        return rows.index_select(-1, (start + place).flatten()).to(torch.int32)

    def half(place: int) -> Tensor:
        pair = torch.stack([rows.index_select(-1, start + place), rows.index_select(-1, start + place + 1)], -1)
        return pair.view(torch.float16).squeeze(-1).float()

    return (_of_32 if size == 32 else _of_256)(form, at, byte, half)


def _of_32(form: int, at: Tensor, byte: Callable[[Tensor], Tensor], half: Callable[[int], Tensor]) -> Tensor:
    if form == Q8_0:
        return _signed(byte(2 + at)).float() * half(0)
    if form == MXFP4:
        code = (byte(1 + at % 16) >> (at // 16 * 4)) & 15
        value = torch.tensor(_MXFP4_VALUES, dtype=torch.float32, device=at.device)[code & 7]
        return torch.where(code > 7, -value, value) * _half_power(byte(0 * at))
    has_least, has_high = form in (Q4_1, Q5_1), form in (Q5_0, Q5_1)
    first = (4 if has_least else 2) + (4 if has_high else 0)
    value = (byte(first + at % 16) >> (at // 16 * 4)) & 15
    if has_high:
        value = value | ((byte(first - 4 + at // 8) >> (at % 8)) & 1) << 4
    if has_least:
        return value.float() * half(0) + half(2)
    return (value - (16 if has_high else 8)).float() * half(0)


def _of_256(form: int, at: Tensor, byte: Callable[[Tensor], Tensor], half: Callable[[int], Tensor]) -> Tensor:
    if form == Q6_K:
        part, rest = at // 128, at % 128
        low = (byte(part * 64 + rest % 64) >> (rest // 64 * 4)) & 15
        high = (byte(128 + part * 32 + rest % 32) >> (rest // 32 * 2)) & 3
        return half(208) * _signed(byte(192 + at // 16)).float() * ((low | high << 4) - 32).float()
    part = at // 32
    is_low = part < 4
    own, other = byte(4 + part), byte(4 + torch.where(is_low, part + 4, part - 4))
    mixed = byte(8 + part)  # of the parts from 4 on: 4 bits of the scale, 4 of the minimum
    scale = torch.where(is_low, own & 63, (mixed & 15) | ((other >> 2) & 48))
    least = torch.where(is_low, other & 63, (mixed >> 4) | ((own >> 2) & 48))
    first = 48 if form == Q5_K else 16
    value = (byte(first + at // 64 * 32 + at % 32) >> (part % 2 * 4)) & 15
    if form == Q5_K:
        value = value | ((byte(16 + at % 32) >> part) & 1) << 4
    return half(0) * scale.float() * value.float() - half(2) * least.float()


def _half_power(exponent: Tensor) -> Tensor:
    """Return 2 ** (``exponent`` - 128), exactly, in float32; int32 ``exponent`` is between 0 and 255."""
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.to(torch.int32).view(torch.float32)


def _signed(byte: Tensor) -> Tensor:
    return torch.where(byte > 127, byte - 256, byte)
