"""Heads that come with the package are named by the model that they are for."""

from pathlib import Path

import pytest
import torch

from yggdrasil.drafters import shipped
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.named import named_drafters
from yggdrasil.drafters.shipped import whole_name
from yggdrasil.errors import YggdrasilError


@pytest.fixture
def head(tmp_path, monkeypatch):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(shipped, "_HEADS", tmp_path)
    return folder


def test_a_shipped_head_stands_for_its_folder_beside_other_drafters(head):
    named = named_drafters(["yggdrasil:some-model", "table"])
    assert named.drafter == str(head)
    assert named.has_table
    assert whole_name("another/model") == "another/model"


@pytest.mark.parametrize("name", ["yggdrasil:other", "yggdrasil:", "yggdrasil:../some-model"])
def test_a_head_that_is_not_shipped_is_refused_with_those_that_are(head, name):
    with pytest.raises(YggdrasilError, match=r"there is yggdrasil:some-model$"):
        named_drafters([name])


def test_the_head_that_comes_along_is_whole_and_small():
    """Names and shapes as published; every drafted token is one of the model's; a card says where it comes from."""
    folder = Path(whole_name("yggdrasil:smollm2-135m-instruct"))
    head, embedding = open_head(folder, torch.float32)

    assert embedding is None
    assert (head.settings.hidden_size, head.settings.vocab_size) == (576, 49152)
    tokens = head.target_tokens(torch.arange(head.settings.draft_vocab_size))
    assert len(tokens.unique()) == len(tokens)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 49152
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("Apache-2.0", "tokens learned", "agreement"))
