"""Weights that were copied give the memory of their file back, and nothing else changes."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from yggdrasil.models.pages import FilePages

MEGABYTES = 16


def resident_file_mb():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells of mappings in /proc")
def test_pages_of_a_file_are_given_back_and_read_again(tmp_path):
    written = torch.arange(MEGABYTES << 18, dtype=torch.float32)
    save_file({"weight": written}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        weight = file.get_tensor("weight")
        assert torch.equal(weight, written)  # now resident
        before = resident_file_mb()
        FilePages().give_back(weight)

        assert before - resident_file_mb() > MEGABYTES - 1
        assert torch.equal(weight, written)


def test_memory_of_no_file_keeps_its_contents():
    weight = torch.arange(MEGABYTES << 18, dtype=torch.float32)
    FilePages().give_back(weight)

    assert torch.equal(weight, torch.arange(MEGABYTES << 18, dtype=torch.float32))


def test_a_weight_smaller_than_a_page_is_left_alone():
    FilePages().give_back(torch.ones(3))
    FilePages().give_back(torch.ones(0))
