"""Packs the quantised matrices of a GGUF file, while PyTorch is imported or when they are needed. Imports no torch."""

import mmap
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.artifacts.ahead import Ahead
from yggdrasil.artifacts.gguf import GgufHeader, GgufTensor
from yggdrasil.artifacts.machine import usable_cores
from yggdrasil.artifacts.memory import new_region, use_huge_pages
from yggdrasil.checkpoints.formats.kinds import BLOCKS, FORMATS
from yggdrasil.library.packing import PANELS, Matrix, pack_blocks, pair_bytes

INTERLEAVED_ROTARY = ("llama", "smollm3", "granite")  # query and key rows are in the order of rotary pairs (2i, 2i + 1)
_PART_BYTES = 16 << 20  # bytes of the mapped file that are packed before their pages are dropped
_AROUND = 64 << 10  # bytes that Linux maps at most before and after a page that is read
_LINE = 64  # bytes; matrices are aligned to cache lines


class Packed(NamedTuple):
    """A packed matrix in ``region`` from byte ``begin`` on: ``pairs`` pairs of panels, ``pair_bytes`` bytes a pair."""

    region: mmap.mmap
    begin: int
    pairs: int
    pair_bytes: int


class GgufPacker:
    """The quantised matrices of a mapped GGUF file, each packed once, in one region in the order of the file.

    ``heads`` are the counts (query heads, key heads). The native library must be loaded.
    """

    def __init__(self, header: GgufHeader, heads: tuple[int, int]) -> None:
        self._architecture, self._heads, self._is_stopped = header.architecture, heads, False
        self._is_beside = False  # whether another thread uses a core, to import PyTorch or to pack
        self._cores = usable_cores()
        with header.path.open("rb") as file:
            # ACCESS_COPY: torch.frombuffer warns about read-only memory; nothing writes to it.
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        places: list[tuple[GgufTensor, int, int, int]] = []
        size = 0
        for place in header.tensors.values():
            if place.kind in FORMATS and len(place.shape) == 2:
                pairs, each = -(-place.shape[0] // PANELS), pair_bytes(place.kind, place.shape[1])
                places.append((place, size, pairs, each))
                size += -(-pairs * each // _LINE) * _LINE
        region = new_region(max(size, 1))  # pages become resident when they are written
        use_huge_pages(region)
        self._matrices = {
            place.name: Ahead(partial(self._pack, place, Packed(region, *found))) for place, *found in places
        }

    def pack_all(self) -> None:
        """Pack all quantised matrices of the file, or until ``stop`` is called; for a thread beside the loader.

        The last matrix is packed first, since the loader requests the first matrices first.
        """
        self._is_beside = True
        for make in reversed(self._matrices.values()):
            if not self._is_stopped:
                make()
        self._is_beside = False

    def stop(self) -> None:
        """Let ``pack_all`` in another thread end after the matrix that it is packing, without waiting."""
        self._is_stopped = True

    def packed(self, place: GgufTensor) -> Packed | None:
        """Return the memory of the packed matrix ``place``, with rows in the model's order; None if not quantised.

        The matrix is packed first if that has not happened.
        """
        make = self._matrices.get(place.name)
        return None if make is None else make()

    def release(self, start: int, num_bytes: int) -> None:
        """Drop the memory pages of a part of the mapped file; a later access reads the file again.

        The part begins at the byte ``start`` and has ``num_bytes`` bytes. Pages around it, which the system mapped when
        the part was read, are dropped as well: around a few hundred matrices they add up to tens of megabytes.
        """
        begin = max(start - _AROUND, 0) // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(start + num_bytes + _AROUND, len(self.data))
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def order(self, place: GgufTensor) -> npt.NDArray[np.int64] | None:
        """Return the permutation [N] with ``model_rows = file_rows[permutation]`` of a tensor; None: the identity."""
        part = place.name.rpartition(".")[0].rpartition(".")[2]
        if self._architecture not in INTERLEAVED_ROTARY or part not in ("attn_q", "attn_k"):
            return None
        heads = self._heads[part == "attn_k"]
        return np.arange(place.shape[0]).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)

    def _pack(self, place: GgufTensor, packed: Packed) -> Packed:
        block_inputs, block_bytes = BLOCKS[place.kind]
        outputs, inputs = place.shape
        row_bytes = inputs // block_inputs * block_bytes
        rows = np.frombuffer(self.data, np.uint8, place.num_bytes, place.start).reshape(outputs, row_bytes)
        target = np.frombuffer(packed.region, np.uint8, packed.pairs * packed.pair_bytes, packed.begin)
        address, order = target.ctypes.data, self.order(place)
        num_threads = max(self._cores - self._is_beside, 1)
        count = max(_PART_BYTES // row_bytes // PANELS, 1) * PANELS
        for start in range(0, outputs, count):
            part = rows[start : start + count] if order is None else rows[order[start : start + count]]
            place_of_part = Matrix(address, -(-len(part) // PANELS), packed.pair_bytes)
            pack_blocks(Matrix(part.ctypes.data, *part.shape), place.kind, inputs, place_of_part, num_threads)
            address += place_of_part.rows * packed.pair_bytes
            if order is None:
                self.release(place.start + start * row_bytes, len(part) * row_bytes)
        return packed


_begun: dict[Path, GgufPacker] = {}  # by the resolved path of the file; at most one


def begin_packing(header: GgufHeader, heads: tuple[int, int]) -> GgufPacker:
    """Return a packer of the file's quantised matrices, and store it for the next ``packer_of`` of the same file.

    ``heads`` are the counts (query heads, key heads). The caller runs ``pack_all`` in a thread.
    """
    return _begun.setdefault(header.path.resolve(), GgufPacker(header, heads))


def packer_of(header: GgufHeader, heads: tuple[int, int]) -> GgufPacker:
    """Return the packer of the file's quantised matrices that ``begin_packing`` has stored, or else a new one.

    ``heads`` are the counts (query heads, key heads).
    """
    return _begun.pop(header.path.resolve(), None) or GgufPacker(header, heads)


def drop_begun() -> None:
    """Stop and free the packers that ``begin_packing`` has stored and no ``packer_of`` has returned."""
    while _begun:
        _begun.popitem()[1].stop()
