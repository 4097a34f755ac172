"""Quantised weights: rows of a pass times GGUF blocks, against the portable operator, and T(W) of it."""

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
_NUM_WEIGHTS = 8  # different ones follow each other, so that no cache holds them


def quantised(notes: Notes, device: torch.device, *, tiny: bool) -> None:
    formats = [Format(number) for number in portable_quantised.FORMATS]
    for form in formats[-1:] if tiny else formats:
        notes.attempt(f"{form.name} equals", partial(_check, form, device), seconds=3)
    outputs, inputs = (64, 256) if tiny else (11008, 4096)
    for form in TIMED[:1] if tiny else TIMED:
        timed = partial(_times, form, device, (outputs, inputs), WIDTHS[:2] if tiny else WIDTHS)
        notes.attempt(f"T(W) {form.name}", timed, seconds=4)


def _blocks(form: Format, outputs: int, inputs: int, device: torch.device) -> Tensor:
    """Rows of blocks [N, bytes] of any bits, but for their scales: those are small numbers."""
    size, num_bytes = BLOCKS[form]
    blocks = torch.randint(0, 256, (outputs, inputs // size, num_bytes), dtype=torch.uint8)
    has_least = form in (Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K)
    for place in (208,) if form == Format.Q6_K else (0, 2) if has_least else (0,):
        blocks[..., place : place + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return blocks.flatten(1).to(device)


def _check(form: Format, device: torch.device) -> str:
    """Rows of the weight and products in float32; a row has the same bits at every width."""
    inputs, outputs = 768, 200
    blocks = _blocks(form, outputs, inputs, device)
    weight = portable_quantised.dequantise(blocks.cpu(), form, inputs)
    x = torch.randn(20, inputs)
    ids = torch.tensor([3, 199, 0])
    operators = torch.ops.yggdrasil
    rows = operators.quantised_rows(ids.to(device), blocks, int(form), inputs, outputs, torch.float32)
    _equal("rows", rows, weight[ids], 0.0)
    found = operators.quantised_linear(x.to(device), blocks, None, outputs, int(form), 1).cpu()
    scale = (x.abs() @ weight.abs().T).max()
    _equal("products", found / scale, x @ weight.T / scale, 1e-5)
    if device.type == "cuda":
        for part in (slice(1), slice(3, 20)):
            again = operators.quantised_linear(x[part].to(device), blocks, None, outputs, int(form), 1)
            _equal("bits at another width", again, found[part], 0.0)
    return "equal"


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
