"""What a request is refused for, and what damaged weights lead to: one sentence each."""

import pytest
from tiny_pair import SHAPES, TEXT, VOCAB_SIZE, byte_tokenizer, make_pair

from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.tree.shape import TreeShape

TREE = FixedPolicy(TreeShape(2, 3, 8))


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "the prompt is empty; give at least one token"),
        ([], "the prompt is empty; give at least one token"),
        (TEXT[:20] * 10, "the prompt has 200 tokens, the context holds 200; shorten the prompt"),
        ("ab" * 150, "the prompt has 300 tokens, the context holds 200; shorten the prompt"),
        ([5, VOCAB_SIZE, 6], "the prompt holds token 96, the vocabulary ends at 95"),
        ([5, -1, 6], "the prompt holds token -1, the vocabulary ends at 95"),
    ],
)
def test_prompts_that_are_refused(pair, prompt, sentence):
    decoder = pair.decoder(TREE)

    for ask in (decoder.encode, decoder.start, decoder.generate):
        with pytest.raises(YggdrasilError, match=sentence):
            ask(prompt)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**9])
def test_end_tokens_outside_the_vocabulary_are_refused(pair, token):
    with pytest.raises(YggdrasilError, match=f"stop_tokens holds token {token}, the vocabulary ends at 95"):
        pair.decoder(TREE).generate(TEXT[:9], stop_tokens=[5, token])


def test_a_stream_has_no_empty_pieces(pair):
    """A request has: after each part of a prompt, and while a character is not whole."""
    assert all(pair.decoder(TREE).stream("Then on, 😀é", max_new_tokens=20))


def test_a_stream_that_is_closed_ends_its_request(pair):
    decoder = pair.decoder(TREE)
    stream = decoder.stream(TEXT[:9], max_new_tokens=40)
    assert next(stream)
    stream.close()
    assert decoder.generate(TEXT[:9], max_new_tokens=12).tokens == pair.reference(TEXT[:9], 12)


def test_prompts_that_just_fit(pair):
    decoder = pair.decoder(TREE)

    assert decoder.encode([0, VOCAB_SIZE - 1]) == [0, VOCAB_SIZE - 1]
    assert len(decoder.encode((TEXT * 3)[: SHAPES.max_length - 1])) == 199


def test_text_and_tokens_are_one_prompt(pair):
    decoder, prompt = pair.decoder(TREE), "Then on, 😀é"
    tokens = byte_tokenizer()(prompt)["input_ids"]
    by_text, by_tokens = (decoder.generate(each, max_new_tokens=12) for each in (prompt, tokens))

    assert by_text.tokens == by_tokens.tokens == pair.reference(tokens, 12)
    assert by_text.prompt_tokens == len(tokens)
    assert "".join(decoder.stream(prompt, max_new_tokens=12)) == by_text.text


@pytest.mark.parametrize("policy", [PLAIN_POLICY, TREE], ids=["plain", "verify"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_during_prefill", [True, False], ids=["prefill", "decode"])
def test_damaged_weights_end_in_one_sentence(policy, value, is_during_prefill):
    pair = make_pair()
    decoder = pair.decoder(policy)
    weight = next(tensor for name, tensor in pair.target.tensors.items() if "down_proj" in name)
    healthy = weight.clone()
    request = iter(decoder.start(TEXT[:9], max_new_tokens=40))
    if not is_during_prefill:
        next(request)
        next(request)
    weight.fill_(value)

    with pytest.raises(
        YggdrasilError, match=r"the target's logits are not finite \(NaN or infinity\).*--dtype float32"
    ):
        list(request)

    weight.copy_(healthy)
    assert decoder.generate(TEXT[:9], max_new_tokens=20).tokens == pair.reference(TEXT[:9], 20)


def test_a_damaged_drafter_costs_time_and_nothing_else():
    pair = make_pair()
    for tensor in pair.drafter.model.parameters():
        tensor.fill_(float("nan"))
    generation = pair.decoder(TREE).generate(TEXT[:9], max_new_tokens=30)

    assert generation.tokens == pair.reference(TEXT[:9], 30)
    assert generation.metrics.accepted == 0


@pytest.mark.parametrize("sizes", [(VOCAB_SIZE, 64), (64, VOCAB_SIZE)], ids=["wider target", "wider drafter"])
def test_a_vocabulary_padded_in_one_model_only(sizes):
    """The tokens that only one of the two knows are never drafted; the target may still choose them."""
    target, drafter = make_pair(vocab_size=sizes[0]), make_pair(vocab_size=sizes[1])
    mixed = target._replace(drafter=drafter.drafter)
    prompt = [token % 64 for token in TEXT[:20]]
    decoder = mixed.decoder(TREE)
    tree, drafted = decoder.assembly.engine.tree, set()
    request = decoder.start(prompt, max_new_tokens=40)
    for _ in request:
        drafted.update(tree.tokens[1 : tree.size].tolist())
    tokens = request.result().tokens

    assert tokens == mixed.reference(prompt, 40)
    assert drafted
    assert max(drafted) < 64
    assert sizes[0] == 64 or max(tokens) >= 64
