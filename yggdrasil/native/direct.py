"""Objects of the native library, and plain C calls for what is done between two passes.

A pass of a model streams its weights through every cache: whatever a call touches then has to come from memory. So an
object is handed its buffers once, and numbers go by a mailbox.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from yggdrasil.native.build import Native
from yggdrasil.native.calls import check, error_sentence, numbers_of
from yggdrasil.native.views import view_of, views_of


class Mailbox:
    """Numbers for native code: a buffer that both sides hold."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int64)
        self.numbers: memoryview = self.tensor.numpy().data  # quicker by the piece than an array


class NativeObject:
    """An object of the library, made by ``yggdrasil_<kind>_new``; it lives as long as this, and so do ``kept``."""

    def __init__(self, kind: str, arguments: Sequence[Any], kept: Sequence[Tensor]) -> None:
        library = _library()
        make, free = getattr(library, f"yggdrasil_{kind}_new"), getattr(library, f"yggdrasil_{kind}_free")
        make.restype, free.argtypes, free.restype = ctypes.c_void_p, (ctypes.c_void_p,), None
        address = make(*arguments)
        if address is None:
            raise RuntimeError(error_sentence())
        self.address, self._kept = ctypes.c_void_p(address), list(kept)
        finalize(self, free, self.address)


def direct(name: str, of: NativeObject) -> Callable[[], int]:
    """The C function ``name`` of a native object, which the caller keeps; it returns -1 where it failed.

    Python's lock is kept: whoever got it in these few microseconds would hold it for milliseconds.
    """
    function = getattr(_library(), f"yggdrasil_{name}")
    function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int64
    return partial(function, of.address)


def native_rows(caches: Sequence[Tensor], mail: Tensor) -> NativeObject:
    """Rows of caches that ``direct("move", ..)`` moves; ``mail``: how many, their destination, where they are."""
    arguments = views_of(caches), ctypes.c_int64(len(caches)), view_of(mail)
    return NativeObject("rows", arguments, [*caches, mail])


def native_state_rows(buffer: Tensor, layers: int, mail: Tensor) -> NativeObject:
    """States that ``direct("keep", ..)`` puts side by side in ``buffer`` [n, layers * H] (tree/state_rows.h)."""
    arguments = view_of(buffer), ctypes.c_int64(layers), view_of(mail)
    return NativeObject("state_rows", arguments, [buffer, mail])


class VerifiedRows(NativeObject):
    """The rows of a pass that verifies W nodes of a tree, and the path of them that is accepted (verified_rows.h).

    ``direct("select_rows", ..)`` fills ``tokens`` and ``positions`` [W] int64, ``ancestors`` [W, W] bool and
    ``offsets`` [2] int64. ``direct("accept_rows", ..)`` fills ``summary`` [2 + 4W] int64 from ``choices`` [W] int64
    and ``best`` [W] float32.
    """

    def __init__(self, chosen: Tensor, root: Tensor, tree: Sequence[Tensor]) -> None:
        """``chosen`` [W] int64 nodes, ``root`` [1] int64 its position; ``tree``: tokens, parents, depths [N] int64,
        scores [N] float32 and ancestors [N, N] bool."""
        width = chosen.shape[0]
        for tensor in (chosen, root, *tree):
            assert tensor.is_contiguous(), tensor.shape
        with torch.inference_mode(False):  # buffers made in inference mode could not be written outside it
            nodes, self.tokens, parents, self.positions, self.choices = (
                torch.zeros(width, dtype=torch.int64) for _ in range(5)
            )
            self.ancestors = torch.zeros(width, width, dtype=torch.bool)
            self.offsets, self.best = torch.zeros(2, dtype=torch.int64), torch.zeros(width)
            self.summary = torch.zeros(2 + 4 * width, dtype=torch.int64)
        buffers = [
            chosen, root, *tree, nodes, self.tokens, parents, self.positions, self.ancestors, self.offsets,
            self.choices, self.best, self.summary,
        ]  # fmt: skip
        super().__init__("verified_rows", _pointers(buffers), buffers)


def native_ranking(*buffers: Tensor) -> NativeObject:
    """A tree's ranking, made anew by ``direct("rank", ..)``: scores, depths, order, widths, totals, levels."""
    return NativeObject("ranking", _pointers(buffers), buffers)


class NativeStatistics(NativeObject):
    """Trees of what counts make likely (tree/counts.h); the weights are those of the n-gram scorer, float64."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__("counts", _pointers(weights), ())
        self._buffers: dict[str, Sequence[Tensor]] = {}

    def set_table(self, *arrays: Tensor) -> None:
        """Keys, totals, starts, tokens and counts of an n-gram table, int64."""
        self._call("set_table", *_pointers([array.contiguous() for array in arrays]))

    def recycle(self, tokens: Sequence[int], continuations: Tensor) -> None:
        """After ``tokens[i]`` the target found ``continuations[i]`` likeliest, best first."""
        self._call("recycle", *_integers(tokens), view_of(continuations))

    def forget(self) -> None:
        """Forget the text."""
        self._call("forget")

    def append(self, tokens: Sequence[int]) -> None:
        """Count more tokens of the text."""
        self._call("append", *_integers(tokens))

    def leave_out_below(self, score: float) -> None:
        """Grow no node whose path has a lower log-probability."""
        self._call("leave_out_below", ctypes.c_double(score))

    def features(self, path: Sequence[int]) -> Tensor:
        """What may follow ``path`` (its last tokens count), [n, 2 + 2 K] int64 (``StatisticsDrafter.features``)."""
        function = getattr(_library(), "yggdrasil_counts_features")  # noqa: B009
        function.restype = ctypes.c_int64
        room = 1 << 12
        while True:
            rows = torch.empty(room, dtype=torch.int64)
            count = function(self.address, *_integers(path), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(room))
            check(count)
            if count <= room:
                return rows[:count].view(-1, FEATURE_COLUMNS)
            room = count

    def grow_in(self, *buffers: Tensor) -> None:
        """Grow trees in these buffers as the last one, a mailbox, says."""
        self._keep("grow_in", buffers)

    def grow_for(self, address: int, count: int) -> None:
        """Grow as far as these float64 numbers say (tree/early_stopping.h), which the caller keeps."""
        self._call("grow_for", ctypes.c_int64(address), ctypes.c_int64(count))

    def fill_in(self, *buffers: Tensor) -> None:
        """Go on with trees in these buffers as the last one, a mailbox, says."""
        self._keep("fill_in", buffers)

    def _keep(self, name: str, buffers: Sequence[Tensor]) -> None:
        self._call(name, views_of(buffers))
        self._buffers[name] = buffers

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(_library(), f"yggdrasil_counts_{name}")
        function.restype = ctypes.c_int32
        check(function(self.address, *arguments))


FEATURE_COLUMNS = 2 + 2 * 9  # token and place, then how often it followed and was seen in each context (tree/scorer.h)


def _pointers(tensors: Sequence[Tensor]) -> list[bytes]:
    return [view_of(tensor) for tensor in tensors]


def _integers(numbers: Sequence[int]) -> tuple[Any, Any]:
    return numbers_of(numbers), ctypes.c_int64(len(numbers))


def _library() -> ctypes.PyDLL:
    assert Native.held is not None
    return Native.held
