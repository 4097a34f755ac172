"""The work of a step counted by hand, and limits that follow from rates."""

import pytest
import roofline
import torch
from gguf import GGMLQuantizationType as Q
from gguf import quants
from roofline import MachineRates, StepWork, measure_rates, step_work
from tiny_pair import SHAPE, make_pair, random_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from yggdrasil import native
from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.checkpoints.formats.rows import QuantisedRows
from yggdrasil.runtime.loading import prepare_model

native_only = pytest.mark.skipif(not native.is_native(), reason="no C++ compiler on this machine")
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


@native_only
def test_quantised_weights_are_their_blocks():
    """Nibbles and a float16 every 32 weights, and nothing else, also where the chunks of 32 inputs are three."""
    model = random_model()
    loaded = prepare_model(model, "tiny", 1, quantise=rounding_to("q4_0", model))
    full = make_pair().target
    chunks = sum(inputs // 32 * outputs for inputs, outputs in linear_shapes()[:-1])
    table = VOCAB * HIDDEN // 32 * 34
    other = 4 * (HIDDEN * (2 * LAYERS + 1)) + sum(b.nbytes for n, b in loaded.model.named_buffers() if "inv_freq" in n)
    caches = 4 * 2 * LAYERS * KEY_HEADS * HEAD * (100 + 8)

    work = step_work(loaded, 8, 100)

    assert work.num_bytes == chunks * 18 + table + 8 * table // VOCAB + other + caches
    assert work.operations == step_work(full, 8, 100).operations
    assert measure_rates(loaded, repeats=1).operations_per_s > 0


@pytest.mark.parametrize("is_quantised", [False, pytest.param(True, marks=native_only)])
def test_a_mixture_reads_the_experts_that_its_rows_can_choose(is_quantised):
    """Five of 96 inner channels, of which a row chooses two: all of them from three rows on."""
    model = AutoModelForCausalLM.from_config(mixture_config(), dtype=torch.float32).eval()
    loaded = prepare_model(model, "mixture", 1, quantise=in_q8_0 if is_quantised else None)
    expert = 3 * HIDDEN * INNER
    work = {width: step_work(loaded, width, 0) for width in (1, 2, 3, 8)}
    row = work[8].num_bytes - work[3].num_bytes

    for width, read in ((1, 2), (2, 4), (3, 5)):
        left_out = (5 - read) * LAYERS * expert * (34 if is_quantised else 128) // 32
        assert work[width].num_bytes == work[3].num_bytes - left_out - (3 - width) * row // 5
        linears = HIDDEN * (2 * QUERY_HEADS + 2 * KEY_HEADS) * HEAD + 2 * expert
        attention = 4 * QUERY_HEADS * HEAD * width
        assert work[width].operations == width * (LAYERS * (2 * linears + attention) + 2 * HIDDEN * VOCAB)
    held = sum(tensor.nbytes for name, tensor in loaded.tensors.items() if "experts" in name)
    assert held < measured_bytes(loaded) < 2 * held


def mixture_config():
    return Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_hidden_layers=LAYERS, head_dim=HEAD,
        num_attention_heads=QUERY_HEADS, num_key_value_heads=KEY_HEADS, num_experts=5, num_experts_per_tok=2,
    )  # fmt: skip


def in_q8_0(name, weight):
    """Experts alone."""
    if "experts" not in name:
        return None
    return QuantisedRows(Q.Q8_0, torch.from_numpy(quants.quantize(weight.detach().contiguous().numpy(), Q.Q8_0)))


def measured_bytes(loaded):
    """What bandwidth is measured over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "_LEAST_BUFFER", 0)
        patch.setattr(roofline, "_median_s", lambda run, repeats, wait: 1.0)
        return measure_rates(loaded).bytes_per_s


@native_only
@pytest.mark.parametrize(("int8_s", "float_s", "least_s"), [(2.0, 0.5, 0.5), (0.25, 0.5, 0.25)])
def test_the_matrix_rate_is_that_of_the_faster_dtype(monkeypatch, int8_s, float_s, least_s):
    """Without VNNI PyTorch's product of int8 is the slower one by far."""
    multiplied = []
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: multiplied.append(a.dtype))

    def median_s(run, repeats, wait):
        multiplied.clear()
        run()
        return int8_s if multiplied else float_s

    monkeypatch.setattr(roofline, "_median_s", median_s)
    model = random_model()
    loaded = prepare_model(model, "tiny", 1, quantise=rounding_to("q4_0", model))

    assert measure_rates(loaded).operations_per_s == 2 * 1024**3 / least_s


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


@native_only
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
