"""Tree attention at the same shapes by our kernels, PyTorch's own with a mask, FlexAttention and FlashInfer.

Each writes the new rows to a static cache and attends to the context and to a tree, as a captured layer must: what
depends on the context's length is computed on the device, in the measured launch. FlashInfer takes the length from the
host, so its figure is that of a pass that could not be captured for other lengths.

Dims: W rows, Hq query heads, Hkv key heads, D head size, S cache capacity, T tree slots.
"""

import importlib.util
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from cuda_check.correctness import TOLERANCE, _equal
from cuda_check.machine import time_calls
from cuda_check.notes import Notes
from yggdrasil.native import portable
from yggdrasil.runtime.graphs import Recorder

WIDTHS, CONTEXTS = (1, 16, 64), (128, 2048)
_SHAPE, _NUM_LAYERS = (32, 8, 128), 16  # Hq, Hkv, D of the 8B shape; caches that follow each other, larger than the L2
_TINY_SHAPE = 4, 2, 16
_KEY_BLOCK = 128


@dataclass
class TreePass:
    """Inputs of a pass over a chain of trees: row r sees the context, row r // 2 and all that this one sees."""

    query: Tensor  # [1, Hq, W, D]
    key: Tensor  # [1, Hkv, W, D]
    value: Tensor
    caches: list[tuple[Tensor, Tensor]]  # of each layer, [Hkv, S, D]
    offsets: Tensor  # [2] int64: context length, first slot written
    mask: Tensor  # [W, T] bool
    context: int

    @property
    def slots(self) -> Tensor:
        """Slots that the pass writes, [W] int64."""
        return self.offsets[1] + torch.arange(self.mask.shape[0], device=self.mask.device)

    def write(self, keys: Tensor, values: Tensor) -> None:
        slots = self.slots
        keys.index_copy_(1, slots, self.key[0])
        values.index_copy_(1, slots, self.value[0])


Attend = Callable[[Tensor, Tensor], Tensor]  # (keys, values of a layer) -> [1, W, Hq, D]


def attention(notes: Notes, device: torch.device, *, tiny: bool) -> None:
    widths, contexts = ((4,), (16,)) if tiny else (WIDTHS, CONTEXTS)
    for name, make in IMPLEMENTATIONS.items():
        if name == "flashinfer" and importlib.util.find_spec(name) is None:
            notes.note(name, "not installed")
            continue
        for width in widths:
            for context in contexts:
                measure = partial(_microseconds, make, device, width, context, tiny=tiny)
                notes.attempt(f"{name} W{width} S{context}", measure, seconds=_SECONDS.get(name, 3.0))


def tree_pass(device: torch.device, width: int, context: int, *, tiny: bool) -> TreePass:
    num_heads, num_key_heads, head_dim = _TINY_SHAPE if tiny else _SHAPE
    generator = torch.Generator().manual_seed(width + context)

    def rows(heads: int, count: int) -> Tensor:
        return torch.randn(heads, count, head_dim, generator=generator).to(device, torch.bfloat16)

    mask = torch.eye(width, dtype=torch.bool)
    for row in range(1, width):
        mask[row] |= mask[row // 2]
    capacity = -(-(context + width) // _KEY_BLOCK) * _KEY_BLOCK + _KEY_BLOCK  # some are free, as in a request
    layers = 1 if tiny else _NUM_LAYERS
    first = rows(num_key_heads, capacity), rows(num_key_heads, capacity)
    caches = [first, *((first[0].clone(), first[1].clone()) for _ in range(layers - 1))]
    new = [rows(heads, width)[None] for heads in (num_heads, num_key_heads, num_key_heads)]
    return TreePass(*new, caches, torch.tensor([context, context], device=device), mask.to(device), context)


def _microseconds(
    make: Callable[[TreePass], Attend], device: torch.device, width: int, context: int, *, tiny: bool
) -> float:
    """Median microseconds of a layer, once its output is that of the portable operator in float32."""
    if make is _by_flex and device.type != "cuda":  # FlexAttention knows no stand-in
        device = torch.device("cpu")
    step = tree_pass(device, width, context, tiny=tiny)
    attend = make(step)
    _equal("output", attend(*step.caches[0]), _expected(step), TOLERANCE[torch.bfloat16])
    capture = Recorder(device).capture(lambda: [attend(*layer) for layer in step.caches])
    capture.prepare()
    return round(statistics.median(time_calls(capture, device, 1 if tiny else 30)) / len(step.caches) * 1e3, 2)


def _expected(step: TreePass) -> Tensor:
    inputs = [each.cpu().float() for each in (step.query, step.key, step.value, *step.caches[0])]
    scale = step.query.shape[-1] ** -0.5
    return portable.tree_attention(*inputs, step.offsets.cpu(), step.mask.cpu(), scale, 0, 0.0, None, 1)


def _ours(step: TreePass) -> Attend:
    scale = step.query.shape[-1] ** -0.5

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        given = step.query, step.key, step.value, keys, values, step.offsets, step.mask
        output: Tensor = torch.ops.yggdrasil.tree_attention(*given, scale, 0, 0.0, None, 1)
        return output

    return attend


def _by_sdpa(step: TreePass) -> Attend:
    """PyTorch's own: a mask over the whole capacity, and the query heads of a key head as further rows."""
    num_key_heads, width, head_dim = step.key.shape[1:]

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        step.write(keys, values)
        slots = torch.arange(keys.shape[1], device=keys.device)
        node = slots - step.offsets[0]
        in_tree = (node >= 0) & (node < step.mask.shape[1])
        mask = (slots < step.offsets[0]) | (step.mask[:, node.clamp(0, step.mask.shape[1] - 1)] & in_tree)
        query = step.query.reshape(1, num_key_heads, -1, head_dim)
        mask = mask.repeat(query.shape[2] // width, 1)
        output = torch.nn.functional.scaled_dot_product_attention(query, keys[None], values[None], attn_mask=mask)
        return output.view(step.query.shape).transpose(1, 2)

    return attend


def _by_flex(step: TreePass) -> Attend:
    """FlexAttention: whole blocks of the context need no mask, and those behind the tree are not read."""
    from torch.nn.attention.flex_attention import BlockMask

    device, num_blocks = step.mask.device, step.caches[0][0].shape[1] // _KEY_BLOCK
    counts = [torch.zeros(1, 1, 1, dtype=torch.int32, device=device) for _ in range(2)]  # partial, whole blocks
    whole = torch.arange(num_blocks, dtype=torch.int32, device=device).expand(1, 1, 1, num_blocks).contiguous()
    part = torch.zeros_like(whole)
    offsets, tree_mask, last = step.offsets, step.mask, step.mask.shape[1] - 1

    def visible(_batch: Tensor, _head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        node = slot - offsets[0]
        return (node < 0) | ((node <= last) & tree_mask[row, node.clamp(0, last)])

    blocks = BlockMask.from_kv_blocks(
        counts[0], part, counts[1], whole, BLOCK_SIZE=_KEY_BLOCK, mask_mod=visible,
        seq_lengths=(step.mask.shape[0], step.caches[0][0].shape[1]),
    )  # fmt: skip
    attend_flexibly = _flex(device.type == "cuda")

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        step.write(keys, values)
        first = step.offsets[0] // _KEY_BLOCK
        counts[1].fill_(0).add_(first)
        counts[0].fill_(0).add_((step.offsets[1] + step.mask.shape[0] + _KEY_BLOCK - 1) // _KEY_BLOCK - first)
        part.copy_((whole + first).clamp(max=num_blocks - 1))
        output: Tensor = attend_flexibly(step.query, keys[None], values[None], block_mask=blocks, enable_gqa=True)
        return output.transpose(1, 2)

    return attend


@cache
def _flex(compiles: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiles else flex_attention


def _by_flashinfer(step: TreePass) -> Attend:
    import flashinfer

    end = step.context + step.mask.shape[0]
    query = step.query[0].transpose(0, 1).contiguous()
    mask = torch.cat([torch.ones_like(step.mask[:, :1]).expand(-1, step.context), step.mask], 1)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        step.write(keys, values)
        given = query, keys[:, :end], values[:, :end]
        output: Tensor = flashinfer.single_prefill_with_kv_cache(*given, custom_mask=mask, kv_layout="HND")
        return output[None]

    return attend


IMPLEMENTATIONS = {"ours": _ours, "sdpa": _by_sdpa, "flex": _by_flex, "flashinfer": _by_flashinfer}
_SECONDS = {"flex": 6.0, "flashinfer": 15.0}  # they compile


def summary(results: Mapping[str, Any]) -> list[str]:
    """A line for each width and context: microseconds of a layer, the fastest first."""
    rows: dict[str, list[tuple[float, str]]] = {}
    for key, value in results.items():
        if isinstance(value, float):
            name, case = key.split(" ", 1)
            rows.setdefault(case, []).append((value, name))
    return [f"  {case}: " + ", ".join(f"{name} {us:g} us" for us, name in sorted(row)) for case, row in rows.items()]
