"""Heads that draft by the target's output layer do so among its most frequent tokens, of which they have rows alone."""

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf import quants
from head_cases import COUNT, HIDDEN, PROMPT, FirstCase, make_case
from head_files import eagle_config, published_tensors, write_head
from mtp_models import FAMILIES
from other_heads import random_tensors, vllm_medusa_shapes
from safetensors.torch import load_file, save_file
from tiny_pair import VOCAB_SIZE, make_pair
from watched import assert_guesses, assert_sampled_alike, watch

from yggdrasil.artifacts import write_tensors
from yggdrasil.checkpoints.formats.layers import QuantisedLinear
from yggdrasil.checkpoints.formats.rounding import quantised_to_q4_1, rounding_to
from yggdrasil.checkpoints.formats.rows import QuantisedRows
from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.drafters.heads.draft_vocabulary import KIND, SCHEMA_VERSION, Vocabulary
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.heads.target_layers import output_of, rows_of
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.native import is_native, portable
from yggdrasil.native.arena import Arena
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.tree.shape import TreeShape

SOME = torch.tensor([0, 3, 15, 16, 17, 40, 41, 95])

needs_blocks = pytest.mark.skipif(not is_native(), reason="quantised weights need the native kernels")


# ==== which tokens ====


def test_the_most_frequent_are_taken_and_of_equals_the_first():
    texts = [([7, 7, 7, 7], [9, 9, 2]), ([], [9, 4])]

    assert Vocabulary.of(texts, 20, most=3).tokens.tolist() == [2, 4, 9]  # four of a prompt count as one
    assert Vocabulary.of(texts, 20, most=5).tokens.tolist() == [0, 2, 4, 7, 9]
    assert Vocabulary.of(texts, 20, most=20).tokens.tolist() == list(range(20))
    assert Vocabulary(torch.tensor([4, 9])).coverage(texts) == pytest.approx(4 / 5)
    assert Vocabulary(torch.tensor([4])).coverage([([4], [])]) == 0.0


def test_it_is_kept_as_it_is(tmp_path):
    Vocabulary(SOME).save(tmp_path / "kept")

    assert torch.equal(Vocabulary.load(tmp_path / "kept").tokens, SOME)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"tokens": torch.tensor([3, 1])}, "is damaged .*ascending order"),
        ({"tokens": torch.tensor([3, 3])}, "is damaged .*ascending order"),
        ({"tokens": torch.tensor([-1, 3])}, "is damaged .*ascending order"),
        ({"tokens": torch.zeros(0, dtype=torch.int64)}, "is damaged .*no tokens"),
        ({"tokens": torch.tensor([1.0, 2.0])}, "is not a vocabulary"),
        ({"tokens": torch.tensor([[1, 2]])}, "is not a vocabulary"),
        ({"other": torch.tensor([1, 2])}, "is not a vocabulary"),
    ],
)
def test_a_file_of_other_things_is_refused(tmp_path, tensors, said):
    write_tensors(tmp_path / "kept", KIND, SCHEMA_VERSION, tensors)

    with pytest.raises(ArtifactError, match=f"kept {said}"):
        Vocabulary.load(tmp_path / "kept")


# ==== rows of an output layer ====


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(97, 34), (96, 32), (16, 64), (5, 2)])
def test_rows_of_packed_weights_are_those_that_were_packed(dtype, shape):
    """Whole panels and parts of one, inputs that fill a tile and such as do not."""
    weight = torch.randn(shape).to(dtype)
    tokens = torch.tensor([0, shape[0] // 2, shape[0] - 1])

    assert torch.equal(PackedLinear(weight, None, 1, Arena()).rows(tokens), weight[tokens])
    kept = torch.empty(portable.packed_shape(weight), dtype=dtype)
    portable.pack_linear(weight, kept)
    assert torch.equal(PackedLinear.over(kept, None, shape, 1).rows(tokens), weight[tokens])


@needs_blocks
@pytest.mark.parametrize("form", [Q.Q4_0, Q.Q4_1, Q.Q8_0])
def test_rows_of_blocks_are_their_numbers(form):
    blocks = quants.quantize(torch.randn(50, 64).numpy(), form)
    layer = QuantisedLinear(QuantisedRows(form, torch.from_numpy(blocks)).pack(Arena()), None, 1)
    tokens = torch.tensor([0, 15, 16, 31, 32, 49])

    expected = torch.from_numpy(quants.dequantize(blocks, form))[tokens]
    torch.testing.assert_close(layer.rows(tokens, torch.float32), expected)


def test_what_is_added_to_logits_comes_along():
    layer = torch.nn.Linear(8, 20).requires_grad_(False)
    x, tokens = torch.randn(3, 8), torch.tensor([1, 7, 19])

    torch.testing.assert_close(rows_of(layer, tokens, torch.float32)(x), layer(x)[:, tokens])


# ==== heads ====


@pytest.fixture(scope="module")
def pair():
    return make_pair(num_hidden_layers=2, hidden_size=HIDDEN)


@pytest.fixture(scope="module", params=["eagle 1", *FAMILIES])
def case(request, pair, tmp_path_factory):
    """A head that drafts among three quarters of what the text to come holds, and some others."""
    case = make_case(request.param, pair, tmp_path_factory.mktemp("head"))
    text = sorted(set(case.pair.reference(PROMPT, COUNT + 8)))
    kept = [token for i, token in enumerate(text) if i % 4 < 3]
    others = [token for token in range(VOCAB_SIZE) if token not in text][5::6]
    case.tokens, case.misses = sorted([*kept, *others]), len(kept) < len(text)
    case.vocabulary = Vocabulary(torch.tensor(case.tokens))
    case.whole = load_head(case.folder, case.pair.target, 1)
    return case


def test_logits_are_those_of_the_drafted_tokens(case):
    states = torch.randn(5, HIDDEN)
    whole = case.whole.loaded.model.head.logits(states)

    assert whole.shape == (5, VOCAB_SIZE)
    assert torch.equal(case.head.loaded.model.head.logits(states), whole[:, case.vocabulary.tokens])


def test_every_guess_is_the_formats_among_those_tokens(case):
    """By name and by probability: what the others had is shared out."""
    decoder = case.decoder()
    seen = watch(decoder)
    result = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert result.tokens == case.pair.reference(PROMPT, COUNT)
    assert result.metrics.aal > 1.1
    assert not case.misses or not set(result.tokens) <= set(case.tokens)
    assert {token for _, guesses in seen for path, _ in guesses for token in path} <= set(case.tokens)
    assert_guesses(seen, case.expected_edge)


def test_sampling_with_a_seed_is_what_the_target_alone_samples(case):
    assert_sampled_alike(case.decoder(), case.decoder(), PROMPT, COUNT, temperature=20.0, seed=1)


def test_steps_read_no_other_row_and_are_known_by_it(case):
    """The rows are the head's own; its packages are others than those of all tokens."""
    tensors, output = case.head.loaded.tensors, output_of(case.pair.target, 1)
    shared = {tensor.data_ptr() for tensor in output.state_dict().values()}

    assert case.head.settings.draft_vocab_size == len(case.vocabulary.tokens)
    assert not any(name.startswith("head.") and each.data_ptr() in shared for name, each in tensors.items())
    assert case.head.loaded.described != case.whole.loaded.described


def test_a_head_that_brings_an_output_layer_drafts_among_its_rows(pair, tmp_path):
    case = FirstCase(pair, tmp_path)
    own = torch.randn(VOCAB_SIZE, HIDDEN)
    save_file(load_file(tmp_path / "model.safetensors") | {"lm_head.weight": own}, tmp_path / "model.safetensors")
    states = torch.randn(2, HIDDEN)
    head = load_head(tmp_path, case.pair.target, 1, Vocabulary(SOME)).loaded.model.head

    torch.testing.assert_close(head.logits(states), (states @ own.T)[:, SOME])
    assert head.target_tokens(torch.arange(len(SOME))).tolist() == SOME.tolist()


@needs_blocks
@pytest.mark.parametrize(
    ("weights", "is_tied"), [("q8_0", False), ("q8_0", True), ("q4_1", False), ("q4_1", True), ("bfloat16", False)]
)
def test_of_a_target_in_fewer_bits_the_rows_are_rounded_as_the_head_is(pair, tmp_path, weights, is_tied):
    """From the numbers of its blocks, whether one table or two serve for embedding and output."""
    case, is_narrow = FirstCase(pair, tmp_path), weights == "bfloat16"
    dtype = torch.bfloat16 if is_narrow else torch.float32
    own = make_pair(num_hidden_layers=2, hidden_size=HIDDEN, dtype=dtype, tie_word_embeddings=is_tied).plain_target
    target = prepare_model(own, "narrow", 1, quantise=None if is_narrow else rounding_to(weights, own))
    head = load_head(case.folder, target, 1, Vocabulary(SOME)).loaded.model.head
    one = torch.eye(HIDDEN, dtype=dtype)
    numbers = target.model.get_output_embeddings()(one).T[SOME]
    rounded = torch.from_numpy(quants.dequantize(quantised_to_q4_1("", numbers).blocks.numpy(), Q.Q4_1))

    assert head.lm_head.format == Q.Q4_1
    torch.testing.assert_close(head.logits(one).float().T, rounded, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["eagle 3", "medusa"])
def test_output_layers_of_a_heads_own_are_as_a_file_of_their_rows(tmp_path, kind):
    """EAGLE-3 without d2t and Medusa without token_map draft what files with these tables draft."""
    pair = make_pair(num_hidden_layers=6, hidden_size=HIDDEN)
    whole, few = tmp_path / "whole", tmp_path / "few"
    if kind == "eagle 3":
        config = eagle_config(VOCAB_SIZE, VOCAB_SIZE)
        tensors = published_tensors(config)
        write_head(whole, config, tensors)
        rows = {"lm_head.weight": tensors["lm_head.weight"][SOME], "d2t": SOME - torch.arange(len(SOME))}
        write_head(few, {**config, "draft_vocab_size": len(SOME)}, tensors | rows)
    else:
        tensors = random_tensors(vllm_medusa_shapes(HIDDEN, VOCAB_SIZE))
        write_head(whole, {"model_type": "medusa"}, tensors)
        rows = {name: tensor[SOME] for name, tensor in tensors.items() if name.startswith("lm_heads")}
        write_head(few, {"model_type": "medusa", "vocab_size": VOCAB_SIZE}, tensors | rows | {"token_map": SOME})
    assert load_head(whole, pair.target, 1).drafts_all_tokens
    heads = [load_head(whole, pair.target, 1, Vocabulary(SOME)), load_head(few, pair.target, 1)]
    seen = []
    for head in heads:
        decoder = pair.decoder(FixedPolicy(TreeShape(2, 3, 8)), drafter=head)
        seen.append(watch(decoder))
        assert decoder.generate(PROMPT, max_new_tokens=8).tokens == pair.reference(PROMPT, 8)
    for (text, guesses), (other_text, others) in zip(*seen, strict=True):
        assert text == other_text
        assert [path for path, _ in guesses] == [path for path, _ in others]
        assert {token for path, _ in guesses for token in path} <= set(SOME.tolist())
        torch.testing.assert_close(*(torch.tensor([edge for _, edge in each]) for each in (guesses, others)))
    with pytest.raises(YggdrasilError, match="takes no other vocabulary"):
        load_head(few, pair.target, 1, Vocabulary(SOME))


def test_a_vocabulary_of_another_target_is_refused(case):
    with pytest.raises(
        YggdrasilError, match=f"is to draft token {VOCAB_SIZE}, and .* has {VOCAB_SIZE}; calibrate again"
    ):
        load_head(case.folder, case.pair.target, 1, Vocabulary(torch.tensor([0, VOCAB_SIZE])))
    assert case.whole.drafts_all_tokens


@pytest.mark.compiled
@pytest.mark.slow
def test_compiled_steps_draft_the_same(pair, tmp_path):
    case = FirstCase(pair, tmp_path)
    head = load_head(case.folder, case.pair.target, 1, Vocabulary(SOME))
    grown = []
    for backend in ("inductor", "eager"):
        decoder = case.pair.decoder(FixedPolicy(TreeShape(2, 3, 8)), drafter=head, backend=backend)
        grown.append(watch(decoder))
        assert decoder.generate(PROMPT, max_new_tokens=6).tokens == case.pair.reference(PROMPT, 6)
    for compiled, eager in zip(*grown, strict=True):
        assert compiled[0] == eager[0]
        assert [path for path, _ in compiled[1]] == [path for path, _ in eager[1]]
