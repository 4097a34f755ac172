"""Widening without a disk gives the model that is written with one."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import yggdrasil
from yggdrasil.checkpoints.widening import read_shape, widen_checkpoint, widen_in_memory

DRAFTER = Path(yggdrasil.__file__).parent / "assets/tiny/drafter"


def test_the_same_model_as_on_disk(tmp_path):
    narrow = read_shape(DRAFTER)
    shape = replace(narrow, hidden_size=192, num_layers=3, num_heads=3, num_kv_heads=3, vocab_size=4200)
    widen_checkpoint(DRAFTER, tmp_path / "wide", shape, seed=5)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)
    model = widen_in_memory(DRAFTER, shape, torch.device("cpu"), seed=5)

    assert model.config.to_dict() | {"_name_or_path": ""} == written.config.to_dict() | {"_name_or_path": ""}
    ours, theirs = dict(model.named_parameters()), dict(written.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
