"""Tokens of many texts in one call of attention, natively and portably, against softmax over each one's own keys."""

import pytest
import torch

from yggdrasil import native
from yggdrasil.native import portable

TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2}}
SLOTS = 150


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 1, 5, 90])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("is_one_text", [False, True])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_each_token_attends_to_what_it_sees_of_its_own_text(dtype, window, softcap, is_one_text, head_dim):
    generator = torch.Generator().manual_seed(head_dim + window)
    tokens, key_heads, group = 5, 2, 3

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    query = drawn(tokens, key_heads * group, head_dim)
    keys, values = (drawn(1 if is_one_text else tokens, key_heads, SLOTS, head_dim) for _ in range(2))
    lengths = torch.tensor([1, SLOTS, 7, 64, 129])
    given = query, keys, values, lengths, head_dim**-0.5, window, softcap, 2

    texts = [0] * tokens if is_one_text else range(tokens)
    expected = torch.stack([
        alone(query[n], keys[text], values[text], int(lengths[n]), window, softcap)
        for n, text in enumerate(texts)
    ])  # fmt: skip
    torch.testing.assert_close(portable.rows_attention(*given).float(), expected, **TOLERANCE[dtype])
    torch.testing.assert_close(torch.ops.yggdrasil.rows_attention(*given).float(), expected, **TOLERANCE[dtype])


def alone(query, keys, values, length, window, softcap):
    """One token [Hq, D] and the keys [Hkv, S, D] of its text, head by head."""
    first = max(0, length - window) if window else 0
    group, outputs = len(query) // len(keys), []
    for head, row in enumerate(query.float()):
        seen = keys[head // group, first:length].float()
        scores = seen @ row * row.numel() ** -0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        outputs.append(scores.softmax(-1) @ values[head // group, first:length].float())
    return torch.stack(outputs)


@pytest.mark.skipif(not native.is_native(), reason="no C++ compiler on this machine")
@pytest.mark.parametrize("length", [0, 9])
def test_more_keys_than_a_text_has_slots_for_are_refused(length):
    query, keys = torch.zeros(1, 2, 16), torch.zeros(1, 1, 8, 16)
    with pytest.raises(RuntimeError, match="a text of 8 slots cannot hold"):
        torch.ops.yggdrasil.rows_attention(query, keys, keys, torch.tensor([length]), 1.0, 0, 0.0, 1)


@pytest.mark.skipif(not native.is_native(), reason="no C++ compiler on this machine")
def test_keys_of_another_dtype_are_refused():
    query, keys = torch.zeros(1, 2, 16), torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="must have the queries' dtype"):
        torch.ops.yggdrasil.rows_attention(query, keys, keys, torch.tensor([3]), 1.0, 0, 0.0, 1)
