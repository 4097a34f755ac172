"""A shipped head is written as other engines read it."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from yggdrasil.drafters.heads.tensors import in_six_bits
from yggdrasil.errors import YggdrasilError


@pytest.fixture
def head(tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({**in_six_bits({"fc.weight": torch.eye(64)}), "d2t": torch.arange(2)}, folder / "model.safetensors")
    return folder


def test_weights_are_written_in_bfloat16_and_in_six_bits_again(head, tmp_path):
    script = importlib.import_module("publish_head")
    script.main(str(head), tmp_path / "published")
    published = load_file(tmp_path / "published" / "model.safetensors")

    assert published["fc.weight"].dtype == torch.bfloat16
    assert torch.allclose(published["fc.weight"].float(), torch.eye(64), atol=0.01)
    assert (tmp_path / "published" / "config.json").is_file()
    script.main(str(tmp_path / "published"), tmp_path / "small", six_bits=True)
    assert set(load_file(tmp_path / "small" / "model.safetensors")) == {"fc.weight", "fc.weight_scale", "d2t"}


def test_nothing_is_overwritten(head, tmp_path):
    script = importlib.import_module("publish_head")
    with pytest.raises(YggdrasilError, match="holds something already"):
        script.main(str(head), Path(head))
