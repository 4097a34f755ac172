"""Quantised weights: rows of a pass times GGUF blocks, also of experts, against the portable operators, and T(W)."""

import json
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuda_check.correctness import _equal
from cuda_check.machine import time_calls
from cuda_check.notes import Notes
from yggdrasil.checkpoints.formats.kinds import BLOCKS, Format
from yggdrasil.native import portable_quantised
from yggdrasil.runtime.graphs import Recorder

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
TIMED = (Format.Q4_K, Format.Q6_K, Format.Q4_0, Format.Q8_0)
EXPERTS = (Format.Q4_K, Format.MXFP4)
_EXPERTS = (128, 8, 2048, 768)  # experts, experts of a row, hidden size and inner size of Qwen3-30B-A3B
_NUM_WEIGHTS = 8  # different ones follow each other, so that no cache holds them


def quantised(notes: Notes, device: torch.device, *, tiny: bool) -> None:
    formats = [Format(number) for number in portable_quantised.FORMATS]
    for form in formats[-1:] if tiny else formats:
        notes.attempt(f"{form.name} equals", partial(_check, form, device), seconds=3)
    for form in EXPERTS[-1:] if tiny else EXPERTS:
        notes.attempt(f"experts in {form.name} equals", partial(_check_experts, form, device), seconds=4)
    outputs, inputs = (64, 256) if tiny else (11008, 4096)
    for form in TIMED[:1] if tiny else TIMED:
        timed = partial(_times, form, device, (outputs, inputs), WIDTHS[:2] if tiny else WIDTHS)
        notes.attempt(f"T(W) {form.name}", timed, seconds=4)
    timed = partial(_times_of_experts, device, (4, 2, 256, 256) if tiny else _EXPERTS, WIDTHS[:2] if tiny else WIDTHS)
    notes.attempt("T(W) experts Q4_K", timed, seconds=4)


def _blocks(form: Format, outputs: int, inputs: int, device: torch.device) -> Tensor:
    """Rows of blocks [N, bytes] of any bits, but for their scales: those are small numbers."""
    size, num_bytes = BLOCKS[form]
    blocks = torch.randint(0, 256, (outputs, inputs // size, num_bytes), dtype=torch.uint8)
    if form == Format.MXFP4:
        blocks[..., 0] = 121  # the exponent of 2 ** -7
        return blocks.flatten(1).to(device)
    has_least = form in (Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K)
    for place in (208,) if form == Format.Q6_K else (0, 2) if has_least else (0,):
        blocks[..., place : place + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return blocks.flatten(1).to(device)


def _check(form: Format, device: torch.device) -> str:
    """Rows of the weight and products in float32; a row has the same bits at every width."""
    inputs, outputs = 768, 200
    blocks = _blocks(form, outputs, inputs, device)
    weight = portable_quantised.dequantise(blocks.cpu(), form, inputs)
    x = torch.randn(70, inputs)
    ids = torch.tensor([3, 199, 0])
    operators = torch.ops.yggdrasil
    rows = operators.quantised_rows(ids.to(device), blocks, int(form), inputs, outputs, torch.float32)
    _equal("rows", rows, weight[ids], 0.0)
    found = operators.quantised_linear(x.to(device), blocks, None, outputs, int(form), 1).cpu()
    scale = (x.abs() @ weight.abs().T).max()
    _equal("products", found / scale, x @ weight.T / scale, 1e-5)
    if device.type == "cuda":
        for part in (slice(1), slice(3, 20), slice(6, 70)):
            again = operators.quantised_linear(x[part].to(device), blocks, None, outputs, int(form), 1)
            _equal("bits at another width", again, found[part], 0.0)
    return "equal"


def _experts(form: Format, device: torch.device, sizes: Sequence[int]) -> list[Tensor]:
    """Gate, up and down of every expert, rows of blocks."""
    count, _, hidden, inner = sizes
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return [_blocks(form, count * rows, inputs, device).unflatten(0, (count, rows)) for rows, inputs in shapes]


def _check_experts(form: Format, device: torch.device) -> str:
    """Sums of experts in float32; a row has the same bits in any company."""
    sizes = 6, 3, 256, 512
    packed = _experts(form, device, sizes)
    x, shares = torch.randn(40, 256), torch.rand(40, 3)
    chosen = torch.rand(40, 6).argsort(1)[:, :3]
    settings = [int(form)] * 3, [], 512, 0, [], 1
    expected = portable_quantised.quantised_experts(x, chosen, shares, [each.cpu() for each in packed], *settings)
    given = [each.to(device) for each in (x, chosen, shares)]
    found = torch.ops.yggdrasil.quantised_experts(*given, packed, *settings).cpu()
    scale = expected.abs().max()
    _equal("sums of experts", found / scale, expected / scale, 1e-5)
    if device.type == "cuda":
        for part in (slice(1), slice(3, 30)):
            again = torch.ops.yggdrasil.quantised_experts(*(each[part] for each in given), packed, *settings)
            _equal("bits of experts in other company", again, found[part], 0.0)
    return "equal"


def _times_of_experts(device: torch.device, sizes: Sequence[int], widths: Sequence[int]) -> dict[str, Any]:
    """Median milliseconds of a layer's experts in bfloat16 by width, rows choosing at random."""
    packed, (count, per_row, hidden, inner) = _experts(Format.Q4_K, device, sizes), sizes
    found: dict[str, Any] = {"ms": {}}
    for width in widths:
        x = torch.zeros(width, hidden, dtype=torch.bfloat16, device=device)
        chosen = torch.rand(width, count).argsort(1)[:, :per_row].to(device)
        shares = torch.ones(width, per_row, dtype=torch.bfloat16, device=device)
        given = x, chosen, shares, packed, [int(Format.Q4_K)] * 3, [], inner, 0, [], 1
        capture = Recorder(device).capture(lambda given=given: [torch.ops.yggdrasil.quantised_experts(*given)])
        capture.prepare()
        found["ms"][width] = round(
            statistics.median(time_calls(capture, device, 3 if device.type != "cuda" else 20)), 5
        )
    read = sum(each.nbytes for each in packed) * per_row / count
    found |= {"gb_per_s": round(read / found["ms"][widths[0]] / 1e6, 1), "bfloat16 ms": "not measured"}
    return found


def _times(form: Format, device: torch.device, shape: tuple[int, int], widths: Sequence[int]) -> dict[str, Any]:
    """Median milliseconds of one product in bfloat16 by width, and of the dequantised weight's."""
    outputs, inputs = shape
    weights = [_blocks(form, outputs, inputs, device) for _ in range(_NUM_WEIGHTS)]
    full = [torch.zeros(outputs, inputs, dtype=torch.bfloat16, device=device) for _ in range(_NUM_WEIGHTS)]
    found: dict[str, Any] = {"ms": {}, "bfloat16 ms": {}}
    for width in widths:
        x = torch.zeros(width, inputs, dtype=torch.bfloat16, device=device)
        multiply = partial(torch.ops.yggdrasil.quantised_linear, x, bias=None, out_features=outputs, format=int(form))
        works = {
            "ms": lambda x=x, multiply=multiply: [multiply(packed=weight, num_threads=1) for weight in weights],
            "bfloat16 ms": lambda x=x: [torch.nn.functional.linear(x, weight) for weight in full],
        }
        for name, work in works.items():
            capture = Recorder(device).capture(work)
            capture.prepare()
            median = statistics.median(time_calls(capture, device, 3 if device.type != "cuda" else 20))
            found[name][width] = round(median / _NUM_WEIGHTS, 5)
    found["gb_per_s"] = round(weights[0].nbytes / found["ms"][widths[0]] / 1e6, 1)
    return found


def summary(results: dict[str, Any]) -> list[str]:
    """Lines for a person: formats that are equal, and milliseconds by width."""
    equal = [name.removesuffix(" equals") for name, value in results.items() if value == "equal"]
    lines = [f"  equal: {', '.join(equal) or 'none'}"]
    for name, value in results.items():
        if isinstance(value, dict) and "gb_per_s" in value:
            times = json.dumps(value["ms"]).replace('"', "")
            lines.append(f"  {name}: {times} ms, {value['gb_per_s']} GB/s, bfloat16 {value['bfloat16 ms']}")
    return lines
