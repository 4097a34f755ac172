"""States that wait for a head: in order, each once, however they come and however many."""

import pytest
import torch

from yggdrasil.drafters.heads import text_drafter
from yggdrasil.drafters.heads.text_drafter import WaitingStates
from yggdrasil.runtime.layer_rows import LayerRows

LAYERS, SIZE, WIDEST = (3, 0), 4, 6


@pytest.fixture(params=[True, False], ids=["native", "portable"])
def states(request, monkeypatch):
    """What waits and its buffer; as it is on this machine, and without native calls."""
    if not request.param:
        monkeypatch.setattr(text_drafter, "is_native", lambda: False)
    elif not text_drafter.is_native():
        pytest.skip("no C++ compiler")
    buffer = torch.zeros(WIDEST, len(LAYERS) * SIZE)
    return WaitingStates(LAYERS, buffer), buffer


def of_a_pass(seed, rows, *, is_contiguous=True, dtype=torch.float32):
    """What a target tells of ``rows``, a layer more than is read, and the same rows side by side."""
    random = torch.Generator().manual_seed(seed)
    outputs = [torch.randn(SIZE, 8, generator=random, dtype=dtype).t() for _ in range(3)]
    outputs = [each.contiguous() for each in outputs] if is_contiguous else outputs
    hidden = LayerRows((0, 1, 3), outputs, rows)
    return hidden, torch.cat([outputs[2][rows], outputs[0][rows]], dim=-1).float()


def read(states, buffer):
    return torch.cat([buffer[:count].clone() for count in states.chunks()])


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [0, 2, 7]], ids=["one", "side by side", "apart"])
@pytest.mark.parametrize("form", [{}, {"is_contiguous": False}, {"dtype": torch.float64}], ids=str)
def test_rows_of_a_pass_lie_where_the_step_reads_them(states, rows, form):
    waits, buffer = states
    hidden, expected = of_a_pass(0, rows, **form)
    waits.add(hidden, len(rows))

    assert len(waits) == len(rows)
    torch.testing.assert_close(buffer[: len(rows)], expected, rtol=0, atol=0)
    torch.testing.assert_close(read(waits, buffer), expected, rtol=0, atol=0)
    assert len(waits) == 0


@pytest.mark.parametrize("counts", [(1, 2, 3), (4, 3), (15,), (15, 2), (2, 15, 1), (6, 6, 1), (3, 3, 7)])
def test_more_than_the_buffer_holds_come_in_order(states, counts):
    waits, buffer = states
    every = []
    for seed, count in enumerate(counts):
        hidden, expected = of_a_pass(seed, [place % 8 for place in range(count)])
        if count > 8:  # a prompt, of several passes
            hidden = {layer: torch.cat([hidden.whole[layer]] * 2)[:count] for layer in LAYERS}
        elif count > 1:
            hidden = LayerRows((0, 1, 3), [*hidden.whole.values()], range(count))
        waits.add(hidden, count)
        every.append(expected)
        assert len(waits) == sum(map(len, every))

    parts = [(count, buffer[:count].clone()) for count in waits.chunks()]
    assert all(count <= WIDEST for count, _ in parts)
    torch.testing.assert_close(torch.cat([part for _, part in parts]), torch.cat(every), rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_what_was_read_last_waits_again(states, count):
    waits, buffer = states
    hidden, expected = of_a_pass(5, list(range(count)))
    waits.add(hidden, count)
    read(waits, buffer)
    for _ in range(2):
        waits.requeue_last()
        assert len(waits) == 1
        torch.testing.assert_close(read(waits, buffer), expected[-1:], rtol=0, atol=0)


def test_another_request_begins_with_none(states):
    waits, buffer = states
    waits.add(of_a_pass(1, list(range(8)))[0], 8)
    waits.add(of_a_pass(2, [0, 1])[0], 2)
    waits.clear()
    hidden, expected = of_a_pass(3, [0, 3])
    waits.add(hidden, 2)

    torch.testing.assert_close(read(waits, buffer), expected, rtol=0, atol=0)
