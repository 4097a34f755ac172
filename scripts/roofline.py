"""The roofline model: a step's bytes and operations, the machine's measured rates, and the lower bound of its time.

Dims: W rows of a step, C context length.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from yggdrasil.checkpoints.experts import PackedExperts
from yggdrasil.checkpoints.formats.layers import QuantisedEmbedding, QuantisedExperts, QuantisedLinear
from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.profiling.timers import Timer, timer_for
from yggdrasil.runtime.loaded import LoadedModel

_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
_EXPERTS = PackedExperts | QuantisedExperts
_MATRICES = 3  # of an expert: gate, up and down
_LEAST_BUFFER = 8 << 20  # bytes; a smaller buffer would measure a CPU cache that steps share with other data


@dataclass(frozen=True)
class StepWork:
    """The least memory traffic and arithmetic of a step."""

    num_bytes: int
    operations: int  # multiplications and additions


@dataclass(frozen=True)
class MachineRates:
    """Measured memory bandwidth and matrix throughput, for one model's threads, dtype and size."""

    bytes_per_s: float
    operations_per_s: float

    def least_ms(self, work: StepWork) -> float:
        """Return the lower bound of the time of ``work``, in milliseconds."""
        return 1e3 * max(work.num_bytes / self.bytes_per_s, work.operations / self.operations_per_s)


def step_work(loaded: LoadedModel, width: int, context: int) -> StepWork:
    """Return the work of a step: each weight and each KV entry of the context is read once, and W embedding rows.

    Of a mixture of experts it counts as many experts as W rows can select at most, or all of them if they are
    transformers' modules or the configuration lacks ``num_experts_per_tok``.
    """
    num_bytes, operations = 0, 0
    chosen_by_row = getattr(getattr(loaded.model, "config", None), "num_experts_per_tok", None)
    for module in loaded.model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if isinstance(module, nn.Embedding | QuantisedEmbedding):
            num_bytes += width * own[0].nbytes // module.num_embeddings
            continue
        if isinstance(module, _EXPERTS) and chosen_by_row is not None:
            chosen = width * chosen_by_row
            num_bytes += min(len(module.down_proj), chosen) * sum(tensor[0].nbytes for tensor in own)
            operations += 2 * chosen * _MATRICES * loaded.sizes.hidden_size * module.inner_features
            continue
        num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in own)
        if isinstance(module, PackedLinear | QuantisedLinear | nn.Linear):
            operations += 2 * width * module.in_features * module.out_features
    element = torch.empty(0, dtype=loaded.dtype).element_size()
    for key_heads, head_size in loaded.sizes.key_heads:
        if key_heads:
            num_bytes += 2 * key_heads * head_size * (context + width) * element
            operations += 4 * loaded.sizes.query_heads * head_size * width * (context + width)
    recurrence = loaded.sizes.recurrence
    if recurrence is not None:  # the pass reads each state; the commit reads and writes it
        size = recurrence.state_size * len(recurrence.layers)
        num_bytes += 3 * 4 * size
        operations += 6 * size * width
    return StepWork(num_bytes, operations)


def measure_rates(loaded: LoadedModel, repeats: int = 7) -> MachineRates:
    """Measure the machine's rates for the steps of ``loaded``, with its number of threads.

    The bandwidth is that of reading a buffer of the model's size, so a model that fits the CPU cache is compared with
    the cache's bandwidth. The throughput is that of PyTorch's matrix product in the model's dtype (int8 for quantised
    layers) or in float32, whichever is faster. Each is the median of ``repeats`` runs.
    """
    # A step reads only some experts of a mixture, but different ones each time: count rows enough to select all.
    rows = max((len(module.down_proj) for module in loaded.model.modules() if isinstance(module, _EXPERTS)), default=1)
    num_bytes = max(step_work(loaded, rows, 0).num_bytes, _LEAST_BUFFER)
    buffer = torch.ones(num_bytes // 8, dtype=torch.int64, device=loaded.device)
    timer = timer_for(loaded.device)
    read_s = _median_s(lambda: torch.ops.yggdrasil.read_words(buffer, loaded.num_threads), repeats, timer)
    size = _MATRIX_SIZE[loaded.device.type]
    numbers = torch.randn(2, size, size, device=loaded.device)

    def multiply_s(dtype: torch.dtype) -> float:
        a, b = numbers.to(dtype)
        return _median_s(lambda: torch._int_mm(a, b) if dtype == torch.int8 else a @ b, repeats, timer)

    threads = torch.get_num_threads()
    torch.set_num_threads(loaded.num_threads)
    try:
        least_s = min(multiply_s(dtype) for dtype in {torch.int8 if loaded.formats else loaded.dtype, torch.float32})
    finally:
        torch.set_num_threads(threads)
    return MachineRates(buffer.nbytes / read_s, 2 * size**3 / least_s)


def _median_s(run: Callable[[], object], repeats: int, timer: Timer) -> float:
    run()
    return statistics.median(timer(run) for _ in range(repeats)) / 1e3
