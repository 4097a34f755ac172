"""Tensors of an arena lie side by side and share nothing."""

import gc

import torch

from yggdrasil.native.arena import Arena


def test_tensors_are_equal_adjacent_and_on_cache_lines():
    arena = Arena()
    values = [torch.arange(10.0), torch.arange(70, dtype=torch.bfloat16).view(7, 10), torch.zeros(0, 3)]
    held = [arena.zeros(value.shape, value.dtype) for value in values]
    assert not any(tensor.any() for tensor in held)
    for tensor, value in zip(held, values, strict=True):
        tensor.copy_(value)
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape for a, b in zip(values, held, strict=True)
    )
    assert held[1].data_ptr() - held[0].data_ptr() == 64
    assert held[0].data_ptr() % 64 == 0


def test_each_tensor_has_its_own_storage():
    """Else a compiled step that writes to one copies the others too, and reads outside of them."""
    arena = Arena()
    first, second = arena.zeros((4, 8), torch.float32), arena.zeros((4, 8), torch.float32)
    assert first.untyped_storage().nbytes() == first.nbytes
    assert second.storage_offset() == 0
    second.fill_(1)
    assert first.sum() == 0


def test_a_tensor_larger_than_a_region_fits_and_outlives_the_arena(monkeypatch):
    monkeypatch.setattr("yggdrasil.native.arena._REGION", 256)
    arena = Arena()
    tensors = [arena.zeros((size,), torch.uint8).fill_(size % 251) for size in (200, 100, 1000, 64, 64)]
    del arena
    gc.collect()
    assert [int(tensor.sum()) for tensor in tensors] == [len(tensor) * (len(tensor) % 251) for tensor in tensors]
