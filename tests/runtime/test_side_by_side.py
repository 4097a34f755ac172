"""Texts read side by side, or one by one, have the logits of plain forwards of each, for every family served."""

import pytest
import torch
from tiny import FAMILIES, VOCAB_SIZE, plain_logits, tiny_model

from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.side_by_side import SIDE_BY_SIDE, OneRow, Rows, allocate_rows

ONE_BY_ONE = {"gpt_oss", "llama4"}  # attention sinks, and chunks


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - ONE_BY_ONE))
def test_rows_equal_plain_forwards(family):
    """Also where a row moved, and where prompts are read beside rows that go on; longer than any window."""
    loaded = prepare_model(tiny_model(family), family, num_threads=1, pack=False)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (15, 4, 11, 9)]

    def expected(rows):
        return torch.stack([plain_logits(family, tuple(texts[row])) for row in rows])

    with own_attention(loaded.model, SIDE_BY_SIDE):
        rows = Rows(loaded, 3, 32)
        read = [rows.read([], [], texts[:3])]
        wanted = [expected((0, 1, 2))]
        for token in (5, 6):
            lengths = [len(text) for text in texts[:3]]
            for text in texts[:3]:
                text.append(token)
            read.append(rows.read([token] * 3, lengths, []))
            wanted.append(expected((0, 1, 2)))
        rows.copy(2, 0, len(texts[2]))  # the first one ended; the last begins
        lengths = [len(texts[2]), len(texts[1])]
        texts[2].append(8)
        texts[1].append(9)
        read.append(rows.read([8, 9], lengths, [texts[3]]))
        wanted.append(expected((2, 1, 3)))

    torch.testing.assert_close(torch.cat(read), torch.cat(wanted), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(ONE_BY_ONE))
def test_what_rows_do_not_compute_is_read_one_by_one(family):
    loaded = prepare_model(tiny_model(family), family, num_threads=1, pack=False)
    texts, read, wanted = [list(range(3, 24)), [9, 4, 30]], [], []
    with own_attention(loaded.model, SIDE_BY_SIDE):
        row = allocate_rows(loaded, 3, 32)
        assert isinstance(row, OneRow)
        for text in texts:
            read.append(row.read([], [], [text]))
            read.append(row.read([5], [len(text)], []))
            wanted += [plain_logits(family, tuple(text)), plain_logits(family, (*text, 5))]

    torch.testing.assert_close(torch.cat(read), torch.stack(wanted), atol=1e-4, rtol=1e-4)


@pytest.fixture
def poisoned_memory():
    """What is allocated and not written is not a number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
def test_what_no_row_has_written_yet_adds_nothing():
    loaded = prepare_model(tiny_model("llama"), "llama", num_threads=1, pack=False)
    texts = [[5, 6, 7, 8, 9, 10], [11, 12]]
    assert torch.empty(4).isnan().all()
    with own_attention(loaded.model, SIDE_BY_SIDE):
        rows = Rows(loaded, 2, 32)
        rows.read([], [], texts)
        found = rows.read([3, 4], [6, 2], [])
    wanted = torch.stack([plain_logits("llama", (*texts[0], 3)), plain_logits("llama", (*texts[1], 4))])

    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
