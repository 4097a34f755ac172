"""Heads that come with the package are named by the model that they are for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from yggdrasil.drafters import shipped_assets
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.tensors import in_six_bits, read_tensors
from yggdrasil.drafters.registry import named_drafters
from yggdrasil.drafters.shipped_assets import resolve_shipped_head, table_folder
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.errors import YggdrasilError


@pytest.fixture
def head(tmp_path, monkeypatch):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(shipped_assets, "_HEADS", tmp_path)
    return folder


def test_a_shipped_head_stands_for_its_folder_beside_other_drafters(head):
    named = named_drafters(["yggdrasil:some-model", "table"])
    assert named.drafter == str(head)
    assert named.has_table
    assert resolve_shipped_head("another/model") == "another/model"


@pytest.mark.parametrize("name", ["yggdrasil:other", "yggdrasil:", "yggdrasil:../some-model"])
def test_a_head_that_is_not_shipped_is_refused_with_those_that_are(head, name):
    with pytest.raises(YggdrasilError, match=r"there is yggdrasil:some-model$"):
        named_drafters([name])


def test_the_head_that_comes_along_is_whole_and_small():
    """Names and shapes as published; every drafted token is one of the model's; a card says where it comes from."""
    folder = Path(resolve_shipped_head("yggdrasil:smollm2-135m-instruct"))
    head, embedding = open_head(folder, torch.float32)

    assert embedding is None
    assert (head.settings.hidden_size, head.settings.vocab_size) == (576, 49152)
    tokens = head.target_tokens(torch.arange(head.settings.draft_vocab_size))
    assert len(tokens.unique()) == len(tokens)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 49152
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 10_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("Apache-2.0", "tokens learned", "agreement"))


def test_a_head_in_six_bits_is_read_as_the_head_it_was_made_of(tmp_path):
    generator = torch.Generator().manual_seed(0)
    matrix, odd = torch.randn(5, 128, generator=generator), torch.randn(3, 7, generator=generator)
    stored = in_six_bits({"a.weight": matrix, "odd.weight": odd, "norm.weight": odd[0].clone(), "d2t": torch.arange(4)})
    save_file(stored, tmp_path / "model.safetensors")
    read = read_tensors(tmp_path)

    assert sorted(read) == ["a.weight", "d2t", "norm.weight", "odd.weight"]
    assert (read["a.weight"] - matrix).abs().max() <= matrix.abs().max() / 31 / 2 * 1.01
    assert torch.equal(read["odd.weight"], odd)
    assert stored["a.weight"].numel() < matrix.numel()


@pytest.mark.parametrize(
    "change",
    [lambda stored: stored.pop("a.weight"), lambda stored: stored.update({"a.weight": torch.zeros(9)}),
     lambda stored: stored.update({"a.weight_scale": torch.ones(5, 3).half()})],
    ids=["no matrix", "not packed", "other rows"],
)  # fmt: skip
def test_a_damaged_head_in_six_bits_is_refused(tmp_path, change):
    stored = in_six_bits({"a.weight": torch.ones(5, 128)})
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(YggdrasilError, match=r"holds a.weight_scale, but .*; fetch it again"):
        read_tensors(tmp_path)


def test_a_shipped_table_counts_what_its_card_says():
    folder = table_folder("b179c9523d0e6a0f")
    assert folder is not None
    assert Table.load(folder / TABLE_FILE).num_tokens == 3_873_377
    assert NGramScorer.load(folder / SCORER_FILE).tensors()
    assert table_folder("another") is None
