"""Recurrent layers under a tree: every family against transformers' own decoding, and rows against plain steps."""

import random
import sys

import pytest
import torch
from examples import ALL
from no_waiting import refuse_waiting
from recurrent_models import RECURRENT, recurrent_model
from tiny_pair import TEXT, VOCAB_SIZE, OracleDrafter

from yggdrasil import SamplingParams, Speculation
from yggdrasil.checkpoints.facts import refuse_unverifiable
from yggdrasil.checkpoints.recurrent import Recurrence
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.engine.conversations import Conversations
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import portable_recurrence
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.runtime.selfcheck import check_tree_attention
from yggdrasil.runtime.states.buffers import StateBuffers
from yggdrasil.runtime.step_cache import StepCache
from yggdrasil.tree.shape import TreeShape

PROMPT, COUNT = TEXT[:21], 16
TREE = FixedPolicy(TreeShape(2, 4, 8))
EXACT, CLOSE = {"atol": 0.0, "rtol": 0.0}, {"atol": 1e-4, "rtol": 1e-4}
WIDE = FixedPolicy(TreeShape(4, 4, 16))
APART = 16 + 5  # copies of states, and a block that ends behind the answer
families = pytest.mark.parametrize("family", RECURRENT)
kinds = pytest.mark.parametrize("family", RECURRENT if ALL else ["lfm2", "qwen3_5", "falcon_h1"])  # of each recurrence


@torch.inference_mode()
def run(runner, tokens, parents):
    """One pass over a tree behind the text; logits of its rows [W, V]."""
    depths, ancestors = [], torch.eye(len(tokens), dtype=torch.bool)
    for row, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if parent >= 0:
            ancestors[row] |= ancestors[parent]
    start = runner.text.num_rows
    positions, offsets = start + torch.tensor(depths), torch.tensor([start, start])
    tensors = runner.cache.tensors()
    return runner.call(runner.weights, tensors, torch.tensor(tokens), positions, ancestors, offsets).logits


def read(runner, tokens):
    """Have the runner's text be ``tokens``."""
    runner.text.begin(tokens, 0)
    for first in range(0, len(tokens), 32):
        chunk = tokens[first : first + 32]
        run(runner, chunk, range(-1, len(chunk) - 1))
        runner.keep(range(len(chunk)))


def commit(runner, path):
    start = runner.text.num_rows
    runner.cache.commit([start + row for row in path], start)
    runner.keep(path)


def random_tree(width, seed):
    draw = random.Random(seed)
    parents = [-1, *(draw.randrange(row) for row in range(1, width))]
    return [draw.randrange(1, VOCAB_SIZE) for _ in range(width)], parents


def path_to(row, parents):
    return [] if row < 0 else [*path_to(parents[row], parents), row]


@families
def test_what_the_checks_before_serving_say(family):
    model = recurrent_model(family)
    refuse_unverifiable(model.plain.config, family)
    check_tree_attention(model.loaded)


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_bits_of_a_plain_step_in_every_tree(family, dtype):
    runner = recurrent_model(family).runner(dtype)
    for width in (4, 8, 16):
        tokens, parents = random_tree(width, width)
        read(runner, PROMPT)
        rows = run(runner, tokens, parents)
        row = max(range(width), key=lambda row: len(path_to(row, parents)))
        for node in path_to(row, parents):
            (plain,) = run(runner, [tokens[node]], [-1])
            torch.testing.assert_close(rows[node], plain, **EXACT)
            commit(runner, [0])


@families
def test_states_after_a_commit_are_those_of_a_fresh_pass(family):
    model = recurrent_model(family)
    runner, fresh = model.runner(), model.runner()
    read(runner, PROMPT)
    text = list(PROMPT)
    for seed in range(4):
        tokens, parents = random_tree(12, seed)
        path = path_to(random.Random(seed).randrange(12), parents)
        run(runner, tokens, parents)
        commit(runner, path)
        text += [tokens[row] for row in path]
        read(fresh, text)
        for ours, theirs in zip(runner.cache.rows(), fresh.cache.rows(), strict=True):
            torch.testing.assert_close(ours[:, : len(text)], theirs[:, : len(text)], **CLOSE)
        states = runner.cache.states, fresh.cache.states
        for ours, theirs in zip(states[0].save(), states[1].save(), strict=True):
            assert ours.abs().max() > 0
            torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(("delta", "heads", "key_heads"), [(True, 4, 2), (False, 6, 3)])
def test_operators_without_the_native_library_agree_with_native_ones(delta, heads, key_heads):
    """The pass of a tree, and the commit of one path, on states of random texts."""
    torch.manual_seed(0)
    key_size, value_size, slots, width = 16, 40, 20, 9
    channels = 2 * key_heads * key_size + heads * value_size
    parents = torch.tensor(random_tree(width, 3)[1])
    path = max((path_to(row, parents.tolist()) for row in range(width)), key=len)
    inputs = torch.randn(width, channels)
    sizes = [key_heads * key_size] * 2 + [heads * value_size]
    found = []
    for ops in (torch.ops.yggdrasil, portable_recurrence):
        torch.manual_seed(1)
        window, state = torch.randn(3, channels), torch.randn(heads, key_size, value_size)
        taps, bias = torch.randn(4, channels), torch.randn(channels)
        decay, strength = -torch.rand(width, heads), torch.rand(width, heads)
        kept, decays, strengths = torch.zeros(slots, channels), torch.zeros(slots, heads), torch.zeros(slots, heads)
        tree = torch.tensor([17, 17]), parents
        mixed = ops.tree_convolution(inputs, taps.t().contiguous(), bias, window, kept, *tree, True, 1)
        query, key, value = mixed.split(sizes, 1) if delta else reversed(mixed.split(sizes[::-1], 1))
        query, key = (each.reshape(width, key_heads, key_size) for each in (query, key))
        value = value.reshape(width, heads, value_size)
        rows = ops.tree_recurrence(query, key, value, decay, strength, delta, state, decays, strengths, *tree, 1)
        buffers = [[window], [kept], [state], [decays], [strengths], [taps], [bias]]
        ops.commit_states(*buffers, delta, [(17 + row) % slots for row in path], 1)
        found.append((mixed, rows, window, state, decays, strengths))
    assert len(path) > 2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@families
def test_greedy_tokens_are_those_of_transformers(family):
    model = recurrent_model(family)
    expected = model.reference(PROMPT, COUNT)
    plain = model.decoder(PLAIN_POLICY).generate(PROMPT, max_new_tokens=COUNT)
    repeated = model.decoder(TREE, NGramDrafter()).generate(PROMPT, max_new_tokens=COUNT)
    known = model.decoder(WIDE, OracleDrafter([*PROMPT, *expected])).generate(PROMPT, max_new_tokens=COUNT)

    assert plain.tokens == repeated.tokens == known.tokens == expected
    assert known.metrics.iterations < 10


@kinds
def test_captured_passes_commit_states_without_waiting(family, monkeypatch):
    """Greedy, drawn on the device, and chosen on the host; a later turn and a dropped answer return to kept states."""
    refuse_waiting(monkeypatch)
    model = recurrent_model(family)
    expected = model.reference(PROMPT, COUNT)
    decoder = model.decoder(WIDE, OracleDrafter([*PROMPT, *expected]), backend="cudagraph")
    decoder.assembly.complete()
    first = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert first.tokens == expected
    assert first.metrics.iterations < 10
    for sampling in (SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=1.0, seed=5, typical_p=0.9)):
        expected = model.decoder(PLAIN_POLICY).generate(PROMPT, max_new_tokens=8, sampling=sampling)
        assert decoder.generate(PROMPT, max_new_tokens=8, sampling=sampling).tokens == expected.tokens
    for prompt in ([*PROMPT, *first.tokens, *TEXT[40:45]], [*PROMPT, *TEXT[50:54]], TEXT[30:60]):
        assert decoder.generate(prompt, max_new_tokens=6).tokens == model.reference(prompt, 6)


@families
def test_drawn_tokens_are_those_of_the_plain_loop(family):
    model, sampling = recurrent_model(family), SamplingParams(temperature=1.0, seed=5)
    plain = model.decoder(PLAIN_POLICY).generate(PROMPT, max_new_tokens=15, sampling=sampling)
    tree = model.decoder(TREE, NGramDrafter()).generate(PROMPT, max_new_tokens=15, sampling=sampling)

    assert tree.tokens == plain.tokens != model.reference(PROMPT, COUNT)[:15]


@kinds
@pytest.mark.parametrize("options", [{}, {"speculation": Speculation(exactness="strict", tolerance=1e9)}])
def test_a_later_turn_reads_only_what_is_new(family, options):
    model = recurrent_model(family)
    decoder = model.decoder(TREE, NGramDrafter())
    first = decoder.generate(PROMPT, max_new_tokens=COUNT, **options)
    text = [*PROMPT, *first.tokens]
    for prompt, new in (
        ([*text, *TEXT[40:45]], 5),
        ([*PROMPT, *TEXT[50:54]], 4),  # the answer is dropped
        ([*PROMPT[:19], *TEXT[50:54]], 4),  # parts within the prompt's last chunk
        (PROMPT, 2),
        (TEXT[30:60], 30),
    ):
        found = decoder.generate(prompt, max_new_tokens=6, **options)
        assert found.tokens == model.reference(prompt, 6)
        assert len(prompt) - found.metrics.reused_tokens <= new + APART


@kinds
def test_conversations_take_turns(family):
    model = recurrent_model(family)
    decoder = model.decoder(TREE, NGramDrafter())
    conversations = Conversations(decoder.assembly, 1 << 30)
    texts = [list(TEXT[:21]), [*TEXT[:10], *TEXT[60:75]]]
    for number in range(3):
        for text in texts:
            text += TEXT[number : number + 3]
            conversations.switch_to(text)
            found = decoder.generate(text, max_new_tokens=8)
            assert found.tokens == model.reference(text, 8)
            assert number == 0 or len(text) - found.metrics.reused_tokens <= 3 + APART
            text += found.tokens


def test_mixers_of_older_transformers_never_get_the_convolutions_states(monkeypatch):
    monkeypatch.setattr(StepCache, "get_conv_state", lambda *_, **__: None)
    model = recurrent_model("qwen3_5")
    decoder = model.decoder(TREE, NGramDrafter(), "eager")
    assert decoder.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens == model.reference(PROMPT, 8)


def test_mixers_that_lose_the_step_cache_are_refused(monkeypatch):
    decoder = recurrent_model("lfm2").decoder(TREE, NGramDrafter(), "eager")
    file = sys.modules["transformers.models.lfm2.modeling_lfm2"]
    monkeypatch.setattr(file, "causal_conv1d_fn", file.causal_conv1d_fn.__wrapped__)
    with pytest.raises(YggdrasilError, match=r"transformers .* does not pass a step's cache to all of its layers"):
        decoder.generate(PROMPT, max_new_tokens=8)


def test_copies_of_states_are_few():
    decoder = recurrent_model("qwen3_5").decoder(TREE, NGramDrafter())
    decoder.generate(TEXT, max_new_tokens=110)
    runner = decoder.assembly.target

    assert len(runner.states.kept) <= 4
    assert max(runner.states.kept) >= runner.text.num_rows - 16


@pytest.mark.parametrize(
    "sizes",
    [
        Recurrence("Mamba-2", (0,), 4, 2304, 32, 1, 128, 64),  # the Granite of scripts/hybrid_widths.py
        Recurrence("Mamba-2", (0,), 4, 12288, 128, 8, 128, 80),  # Nemotron-Nano-9B-v2
        Recurrence("gated delta network", (0,), 4, 4096, 16, 8, 128, 128),  # its Qwen3.5
        Recurrence("gated delta network", (0,), 4, 10240, 48, 16, 128, 128),  # Qwen3.5-27B
    ],
)
def test_a_node_stores_at_most_a_hundredth_of_the_states(sizes):
    buffers = StateBuffers.allocate(sizes, 2, torch.bfloat16, torch.device("cpu"))
    factors = (*buffers.inputs, *buffers.decays, *buffers.strengths)
    kept = sum(tensor.nbytes for tensor in (*buffers.windows, *buffers.states))
    assert 0 < sum(tensor.nbytes for tensor in factors) / buffers.num_slots < 0.01 * kept
