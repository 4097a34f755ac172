"""A tree verified in one pass gives each node the logits of a plain forward of its path, for every family served."""

import dataclasses
from functools import cache

import pytest
import torch
from tiny import FAMILIES, VOCAB_SIZE, plain_logits, tiny_model

from yggdrasil.checkpoints.facts import refuse_unverifiable
from yggdrasil.native import is_native
from yggdrasil.runtime.loading import load_model, prepare_model
from yggdrasil.runtime.native_steps.call import native_call
from yggdrasil.runtime.passes import HEAD_INPUT, PrefillStep
from yggdrasil.runtime.runner import ModelRunner

CONTEXT = tuple(torch.randint(1, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(1)).tolist())
PARENTS = (-1, 0, 0, 1, 1, 2, 5)
TOKENS = tuple(torch.randint(1, VOCAB_SIZE, (7,), generator=torch.Generator().manual_seed(2)).tolist())
BREADTH_FIRST = (0, 1, 2, 3, 4, 5, 6)
DEPTH_FIRST = (0, 2, 5, 6, 1, 4, 3)  # slots in another order; parents still come before their children
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

pytestmark = pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def prepared(family, is_packed):
    return prepare_model(tiny_model(family), family, num_threads=1, pack=is_packed)


def new_runner(family, is_packed):
    loaded = prepared(family, is_packed)
    refuse_unverifiable(loaded.model.config, family)  # every family here is served
    return ModelRunner(loaded, capacity=64, vocab_size=VOCAB_SIZE, backend="eager")


def path_to(node):
    path = []
    while node >= 0:
        path.append(node)
        node = PARENTS[node]
    return path[::-1]


def tokens_to(node):
    return tuple(TOKENS[i] for i in path_to(node))


@torch.inference_mode()
def read(runner, start, tokens, rows=None):
    """Read ``tokens`` as one chunk of text at position ``start``."""
    width = len(tokens)
    mask = torch.ones(width, width, dtype=torch.bool).tril()
    offsets = torch.tensor([start, start])
    positions = start + torch.arange(width)
    return runner.call(runner.weights, runner.cache.tensors(), torch.tensor(tokens), positions, mask, offsets, rows)


@torch.inference_mode()
def verify(runner, order, rows=None):
    """Run the tree with ``order[i]`` as row i; a root-first tree behind ``CONTEXT``."""
    ancestors = torch.tensor([[other in path_to(node) for other in order] for node in order])
    positions = torch.tensor([len(CONTEXT) + len(path_to(node)) - 1 for node in order])
    tokens = torch.tensor([TOKENS[node] for node in order])
    offsets = torch.tensor([len(CONTEXT), len(CONTEXT)])
    return runner.call(runner.weights, runner.cache.tensors(), tokens, positions, ancestors, offsets, rows)


def expected_logits(family, order):
    return torch.stack([plain_logits(family, CONTEXT + tokens_to(node)) for node in order])


@families
def test_logits_are_not_flat(family, is_packed):
    """The comparisons below would show little if every path led to the same logits."""
    logits = expected_logits(family, BREADTH_FIRST)

    assert logits.std(-1).min() > 0.1
    assert len(set(logits.argmax(-1).tolist())) > 2


@families
@pytest.mark.parametrize("order", [BREADTH_FIRST, DEPTH_FIRST], ids=["breadth", "depth"])
def test_a_tree_pass_equals_plain_forwards(family, is_packed, order):
    runner = new_runner(family, is_packed)
    prefill = read(runner, 0, CONTEXT)
    verified = verify(runner, order)

    torch.testing.assert_close(prefill.logits[-1], plain_logits(family, CONTEXT), **TOLERANCE)
    torch.testing.assert_close(verified.logits, expected_logits(family, order), **TOLERANCE)


@families
@pytest.mark.parametrize("order", [BREADTH_FIRST, DEPTH_FIRST], ids=["breadth", "depth"])
def test_decoding_goes_on_after_a_commit(family, is_packed, order):
    runner = new_runner(family, is_packed)
    read(runner, 0, CONTEXT)
    verify(runner, order)
    accepted = path_to(6)
    sources = [len(CONTEXT) + order.index(node) for node in accepted]
    runner.cache.commit(sources, len(CONTEXT))
    text = CONTEXT + tokens_to(6)

    fresh = new_runner(family, is_packed)
    read(fresh, 0, text)
    for ours, theirs in zip(runner.cache.tensors(), fresh.cache.tensors(), strict=True):
        torch.testing.assert_close(ours[:, : len(text)], theirs[:, : len(text)], **TOLERANCE)
    following = read(runner, len(text), (5, 6))
    torch.testing.assert_close(following.logits[0], plain_logits(family, (*text, 5)), **TOLERANCE)
    torch.testing.assert_close(following.logits[1], plain_logits(family, (*text, 5, 6)), **TOLERANCE)


@families
def test_asking_for_some_rows_gives_those(family, is_packed):
    runner = new_runner(family, is_packed)
    read(runner, 0, CONTEXT)
    every, some = verify(runner, BREADTH_FIRST), verify(runner, BREADTH_FIRST, torch.tensor([6, 2]))

    torch.testing.assert_close(some.logits, every.logits[[6, 2]], **TOLERANCE)
    torch.testing.assert_close(some.hidden, every.hidden[[6, 2]], **TOLERANCE)


@families
def test_the_head_reads_the_rows_asked_for_and_a_drafter_what_it_reads_of_all(family, is_packed):
    loaded, counted = prepared(family, is_packed), []
    runner = ModelRunner(loaded, capacity=64, vocab_size=VOCAB_SIZE, backend="eager", hidden_layers=(HEAD_INPUT,))
    every = read(runner, 0, CONTEXT)
    with loaded.model.get_output_embeddings().register_forward_hook(lambda *call: counted.append(call[1][0].shape[1])):
        some = read(runner, 0, CONTEXT, torch.tensor([6, 2]))

    assert counted == [2]
    torch.testing.assert_close(some.logits, every.logits[[6, 2]], **TOLERANCE)
    torch.testing.assert_close(some.hidden, every.hidden[[6, 2]], **TOLERANCE)
    torch.testing.assert_close(some.layers, [every.hidden], **TOLERANCE)


@families
def test_prefill_in_padded_chunks_equals_one_forward(family, is_packed):
    runner = new_runner(family, is_packed)
    tokens, start, last = torch.zeros(5, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.tensor([0])
    runner.define("prefill", 5, PrefillStep(runner.call), [tokens, start, last])
    text = CONTEXT[:11]
    for begin in (0, 5, 10):  # chunks of 5, 5 and 1
        chunk = text[begin : begin + 5]
        tokens[: len(chunk)] = torch.tensor(chunk)
        start[0], last[0] = begin, len(chunk) - 1
        choice, best, *_ = runner.step("prefill", 5)()

    expected = plain_logits(family, text)
    assert choice[0] == expected.argmax()
    torch.testing.assert_close(best[0], expected.max(), **TOLERANCE)


@pytest.mark.parametrize("family", ["gemma4", "deepseek_v3"])
def test_layers_may_have_heads_of_their_own_number_and_size(family, is_packed, tmp_path):
    """Read from a folder, whose configuration says so a layer; of latent attention the greater of two sizes."""
    tiny_model(family).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"), 1, pack=is_packed)

    assert loaded.sizes.key_heads == {"gemma4": ((2, 16), (1, 32)) * 3, "deepseek_v3": ((4, 24),) * 2}[family]


@pytest.mark.skipif(not is_native(), reason="no C++ compiler on this machine")
def test_the_text_model_of_a_multimodal_one_runs_natively(is_packed):
    """Its tensors lie one level deeper."""
    loaded = prepared("gemma3", True)
    deeper = {name.replace("model.", "model.language_model.", 1): each for name, each in loaded.tensors.items()}
    cache = new_runner("gemma3", True).cache

    assert native_call(dataclasses.replace(loaded, tensors=deeper), cache, VOCAB_SIZE) is not None


@pytest.mark.skipif(not is_native(), reason="no C++ compiler on this machine")
def test_rows_of_gemma_4_have_the_same_bits_in_a_tree_and_alone(is_packed):
    """It has no native steps, but all that its passes add up over rows is native where its layers are packed."""
    if not is_packed:
        pytest.skip("PyTorch's linear layers add up in another order at another width")
    tree, alone = new_runner("gemma4", is_packed), new_runner("gemma4", is_packed)
    for runner in (tree, alone):
        read(runner, 0, CONTEXT)
    verified = verify(tree, BREADTH_FIRST)

    for number, (node, token) in enumerate(zip(path_to(6), tokens_to(6), strict=True)):
        row = read(alone, len(CONTEXT) + number, (token,))
        assert torch.equal(verified.logits[node], row.logits[0])
