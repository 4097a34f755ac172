"""The Triton kernels as they are launched, compiled for an H100 or H200 without one: they fit in its registers.

Needs Triton, which compiles here what ``tests/native/test_cuda_kernels.py`` interprets.
"""

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attention_case import AttentionCase

from yggdrasil.checkpoints.formats.kinds import BLOCKS
from yggdrasil.native import portable_quantised

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton"
)
MOST_STACK, MOST_SHARED = 256, 227 << 10  # bytes of a thread for what fits in no register; of a block


@pytest.fixture
def launched(monkeypatch):
    """Compiled kernels by name, of the launches since."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = []
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )  # fmt: skip
    monkeypatch.setattr(driver, "_active", device)

    def launch(self, grid):
        return lambda *given, **constants: found.append((self.__name__, self.warmup(*given, grid=grid, **constants)))

    monkeypatch.setattr(triton.JITFunction, "__getitem__", launch)
    return found


def assert_fits(launched, folder):
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for name, kernel in launched:
        code = folder / "kernel.cubin"
        code.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([program, "-res-usage", code], capture_output=True, text=True, check=True).stdout
        stack = int(re.search(r"STACK:(\d+)", usage)[1])
        assert stack <= MOST_STACK, f"{name} keeps {stack} bytes of a thread out of its registers"
        assert kernel.metadata.shared <= MOST_SHARED, name


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 1), (128, 4), (256, 4)])
def test_attention_fits(launched, tmp_path, head_dim, group):
    from yggdrasil.native import cuda

    step = AttentionCase(1, torch.bfloat16, width=16, num_context=150, group=group, head_dim=head_dim)
    step.run(cuda.tree_attention)
    cuda.keep_rows(step.caches, *(torch.tensor([each]) for each in (3, 0, 1)))

    assert [name for name, _ in launched] == ["attend_to_split", "merge_splits", "keep_rows"]
    assert_fits(launched, tmp_path)


@pytest.mark.parametrize("form", portable_quantised.FORMATS)
def test_products_with_quantised_weights_fit(launched, tmp_path, form):
    from yggdrasil.native import cuda

    size, num_bytes = BLOCKS[form]
    blocks = torch.zeros(64, 512 // size * num_bytes, dtype=torch.uint8)
    for width in (16, 32, 64):
        cuda.quantised_linear(torch.zeros(width, 512, dtype=torch.bfloat16), blocks, None, 64, form, 1)

    assert [name for name, _ in launched] == ["multiply", "add_splits"] * 3
    assert_fits(launched, tmp_path)


@pytest.mark.parametrize("form", [12, 39])
def test_experts_with_quantised_weights_fit(launched, tmp_path, form):
    from yggdrasil.native import cuda

    size, num_bytes = BLOCKS[form]
    blocks = torch.zeros(4, 512, 512 // size * num_bytes, dtype=torch.uint8)
    rows, chosen, shares = (
        torch.zeros(16, 512, dtype=torch.bfloat16),
        torch.zeros(16, 2, dtype=torch.int64),
        torch.ones(16, 2),
    )
    cuda.quantised_experts(rows, chosen, shares, [blocks] * 3, [form] * 3, [], 512, 0, [], 1)

    assert [name for name, _ in launched] == [
        *["multiply_experts", "add_splits"] * 2,
        "multiply_experts",
        "add_experts",
    ]
    assert_fits(launched, tmp_path)
