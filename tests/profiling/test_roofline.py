"""The work of a step counted by hand, and limits that follow from rates."""

import pytest
import torch

from tests.tiny_pair import SHAPE, make_pair
from yggdrasil.models import kernels
from yggdrasil.profiling.roofline import MachineRates, StepWork, measure_rates, step_work

HIDDEN, INNER, LAYERS, VOCAB = 64, 96, 2, 96
QUERY_HEADS, KEY_HEADS, HEAD = 4, 2, 16


def linear_shapes():
    attention = [(HIDDEN, QUERY_HEADS * HEAD), (HIDDEN, KEY_HEADS * HEAD), (HIDDEN, KEY_HEADS * HEAD)]
    layer = [*attention, (QUERY_HEADS * HEAD, HIDDEN), (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]
    return layer * LAYERS + [(HIDDEN, VOCAB)]


def test_every_weight_is_read_once_and_the_context_once():
    loaded = make_pair().target
    assert (SHAPE["hidden_size"], SHAPE["intermediate_size"]) == (HIDDEN, INNER)
    for width, context in ((1, 0), (8, 100)):
        work = step_work(loaded, width, context)
        linears = sum(inputs * outputs for inputs, outputs in linear_shapes())
        norms = HIDDEN * (2 * LAYERS + 1)
        rotary = sum(buffer.numel() for name, buffer in loaded.model.named_buffers() if "inv_freq" in name)
        caches = 2 * LAYERS * KEY_HEADS * HEAD * (context + width)
        assert work.num_bytes == 4 * (linears + norms + rotary + width * HIDDEN + caches)
        attention = 2 * 2 * QUERY_HEADS * HEAD * LAYERS * width * (context + width)
        assert work.operations == 2 * width * linears + attention


def test_the_limit_is_the_slower_of_memory_and_arithmetic():
    rates = MachineRates(bytes_per_s=1e9, operations_per_s=1e12)
    assert rates.least_ms(StepWork(2_000_000, 1)) == 2.0
    assert rates.least_ms(StepWork(1, 4_000_000_000)) == 4.0


def test_rates_are_positive_and_leave_the_thread_count_alone():
    before = torch.get_num_threads()
    rates = measure_rates(make_pair().target, repeats=1)
    assert rates.bytes_per_s > 0
    assert rates.operations_per_s > 0
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not kernels.is_native(), reason="no C++ compiler on this machine")
def test_reading_words_reads_them_all():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 31, 4096, 4097, 20_000):
        words = torch.randint(-(2**62), 2**62, (size,), generator=generator)
        expected = 0
        for word in words.tolist():
            expected ^= word
        for threads in (1, 2):
            found = torch.ops.yggdrasil.read_words(words, threads)
            assert found == expected, f"{size = }, {threads = }"
