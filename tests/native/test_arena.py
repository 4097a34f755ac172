"""Tensors of an arena lie side by side and share nothing."""

import ctypes
import gc
import mmap
import sys
import weakref

import pytest
import torch

from yggdrasil.artifacts import memory
from yggdrasil.artifacts.memory import drop_reserved, reserve, take_reserved
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


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted on Linux")
def test_few_rows_of_sparse_tensors_take_little_memory_until_huge_pages_are_asked_for():
    arena = Arena(is_sparse=True)
    tensors = [arena.zeros((8 << 20,), torch.uint8) for _ in range(16)]
    for number, tensor in enumerate(tensors):
        tensor[:100] = number
    assert 0 < sum(map(resident, arena._regions)) < 8 << 20  # on huge pages 32 MiB
    arena.use_huge_pages()
    for number, tensor in enumerate(tensors):
        assert tensor[:100].tolist() == [number] * 100
        assert not tensor[100:4096].any()
    arena.clear()
    for tensor in tensors:
        tensor[0] = 1
        assert not tensor[1:4096].any()
    assert 0 < sum(map(resident, arena._regions)) < 8 << 20  # small pages again


@pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved on Linux")
def test_reserved_memory_is_made_resident_used_first_and_returned():
    reserve(32 << 20)
    reserve(64 << 20)  # ignored: there is one reservation at a time
    reserved = take_reserved()
    reserved._thread.join()
    region = reserved.region
    assert resident(region) >= 32 << 20
    arena = Arena(region)
    tensor = arena.zeros((4 << 20,), torch.uint8).fill_(3)
    reserved.stop()
    arena.free_rest()
    assert 4 << 20 <= resident(region) < 10 << 20
    assert int(tensor.sum(dtype=torch.int64)) == 3 * tensor.numel()
    reserve(32 << 20)
    dropped = weakref.ref(memory._reserved[0].region)
    drop_reserved()
    assert take_reserved() is None
    assert dropped() is None, "unmapped"


def resident(region):
    """Bytes of a mapped region that are in memory; other tests change what the whole process has."""
    start, pages = ctypes.c_char.from_buffer(region), (ctypes.c_ubyte * -(-len(region) // mmap.PAGESIZE))()
    found = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(region)), pages)
    assert found == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
