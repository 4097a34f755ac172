"""A model that is open is not read again, as long as it is the same one."""

import gc
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

import yggdrasil
from yggdrasil.checkpoints.source import Source
from yggdrasil.runtime import shared
from yggdrasil.runtime.kept_tensors import open_model
from yggdrasil.runtime.shared import shared_model

CPU = torch.device("cpu")


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """How often a model was read."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    calls = []
    monkeypatch.setattr(shared, "open_model", lambda *args, **options: calls.append(1) or open_model(*args, **options))
    return calls


def opened(folder, dtype=torch.float32, num_threads=1, weights="full"):
    return shared_model(Source.find(folder), dtype, CPU, num_threads, weights)


def saved(folder, scale=1.0):
    model = tiny_model("llama")
    model.get_output_embeddings().weight.data.mul_(scale)
    model.save_pretrained(folder)
    return folder


def test_who_opens_a_model_that_is_open_reads_the_same_tensors(tmp_path, reads):
    folder = saved(tmp_path / "model")
    first, second = opened(folder), opened(folder)

    assert second is first
    assert len(reads) == 1


def test_another_arithmetic_or_number_of_threads_is_another_model(tmp_path, reads):
    folder = saved(tmp_path / "model")
    found = [opened(folder), opened(folder, torch.bfloat16), opened(folder, num_threads=2)]

    assert [each.dtype for each in found] == [torch.float32, torch.bfloat16, torch.float32]
    assert [each.num_threads for each in found] == [1, 1, 2]
    assert len(reads) == 3


def test_a_model_that_has_changed_meanwhile_is_read_as_it_is_now(tmp_path, reads):
    before = opened(saved(tmp_path / "model"))
    after = opened(saved(tmp_path / "model", scale=2.0))

    assert any(not torch.equal(tensor, before.tensors[name]) for name, tensor in after.tensors.items())


def test_the_last_one_to_let_go_gives_the_memory_back(tmp_path, reads):
    folder = saved(tmp_path / "model")
    first, second = opened(folder), opened(folder)
    del first
    gc.collect()
    third = opened(folder)
    assert third is second
    del second, third
    gc.collect()

    opened(folder)
    assert len(reads) == 2


def test_decoders_of_a_plan_read_the_same_tensors_and_caches_of_their_own():
    (plan, *_) = sorted((Path(yggdrasil.__file__).parents[1] / "plans" / "tiny").glob("*.yaml"))
    one, two = (yggdrasil.Decoder.from_plan(plan, backend="eager", force_machine=True).assembly for _ in range(2))

    for ours, theirs in ((one.target, two.target), (one.drafter, two.drafter)):
        assert [each.data_ptr() for each in ours.weights] == [each.data_ptr() for each in theirs.weights]
        keys, others = ({each.data_ptr() for each in runner.cache.tensors()} for runner in (ours, theirs))
        assert not keys & others
