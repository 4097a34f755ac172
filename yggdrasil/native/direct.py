"""Objects of the native library, and direct C calls for the work between two passes.

A pass streams the model's weights through all processor caches, so every memory access right after it is slow.
Therefore an object gets its buffers once, at construction, and calls pass numbers through a mailbox.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from yggdrasil.library.build import Native, check, error_sentence
from yggdrasil.native.calls import numbers_of, view_of, views_of


class Mailbox:
    """An int64 buffer of ``size`` numbers shared with native code, through which numbers are passed to C calls."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int64)
        self.numbers: memoryview = self.tensor.numpy().data  # item access is faster than that of an array


class NativeObject:
    """A C++ object of the native library, created by ``yggdrasil_<kind>_new(*arguments)``.

    The C++ object is freed together with this Python object, which keeps ``kept``, the tensors in use, alive.

    Raises:
        RuntimeError: the C++ object cannot be created.
    """

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
    """Return the C function ``name`` of the native object ``of`` as a function without arguments.

    The function returns a number that the C function defines, negative if the call fails. The caller must keep ``of``
    alive. The call holds the GIL: another thread that took the GIL during these few microseconds would hold it for
    milliseconds.
    """
    function = getattr(_library(), f"yggdrasil_{name}")
    function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int64
    return partial(function, of.address)


def native_rows(caches: Sequence[Tensor], mail: Tensor) -> NativeObject:
    """Return a native object whose C function "move" (see ``direct``) moves KV entries in ``caches``, [Hkv, S, D] each.

    Before each call, the caller writes to ``mail`` (int64): the number n of entries, the first slot that they move to,
    and the n slots in which they are, ascending.

    Raises:
        RuntimeError: a tensor is not on the CPU, or its dtype is unsupported.
    """
    arguments = views_of(caches), ctypes.c_int64(len(caches)), view_of(mail)
    return NativeObject("rows", arguments, [*caches, mail])


def native_state_rows(buffer: Tensor, layers: int, mail: Tensor) -> NativeObject:
    """Return a native object whose C function "keep" (see ``direct``) copies hidden states of a pass into ``buffer``.

    ``buffer`` is [n, layers * H]: a row has the states of all layers, side by side. Before each call, the caller writes
    to ``mail`` (int64): the first row of ``buffer`` to write, the number R of rows, the address of each layer's states
    [W, H], and the R row indices of these states to copy.

    Raises:
        RuntimeError: a tensor is not on the CPU, its dtype is unsupported, or ``buffer`` is not contiguous.
    """
    arguments = view_of(buffer), ctypes.c_int64(layers), view_of(mail)
    return NativeObject("state_rows", arguments, [buffer, mail])


class VerifiedRows(NativeObject):
    """Inputs and outputs of a pass that verifies W nodes of a tree (tree/verified_rows.h).

    The C function "select_rows" writes the inputs of the pass: ``tokens`` and ``positions`` [W] int64, ``ancestors``
    [W, W] bool, ``offsets`` [2] int64, and the rows' nodes, tokens, parents and existence, ``layout`` [4, W] int64.
    "accept_rows" writes the accepted path to ``summary`` [2 + 4W] int64, from the pass's argmax tokens ``choices`` [W]
    int64 and their logits ``best`` [W] float32.
    """

    def __init__(self, chosen: Tensor, root: Tensor, tree: Sequence[Tensor]) -> None:
        """Register the buffers that ``select_rows`` reads.

        Args:
            chosen: [W] int64, the nodes to verify.
            root: [1] int64, the position of the root in the text.
            tree: tokens, parents, depths [N] int64, scores [N] float32 and ancestors [N, N] bool.
        """
        width = chosen.shape[0]
        for tensor in (chosen, root, *tree):
            assert tensor.is_contiguous(), tensor.shape
        with torch.inference_mode(False):  # buffers made in inference mode could not be written outside it
            self.layout = torch.zeros(4, width, dtype=torch.int64)
            self.positions, self.choices = torch.zeros(2, width, dtype=torch.int64)
            self.ancestors = torch.zeros(width, width, dtype=torch.bool)
            self.offsets, self.best = torch.zeros(2, dtype=torch.int64), torch.zeros(width)
            self.summary = torch.zeros(2 + 4 * width, dtype=torch.int64)
        nodes, self.tokens, parents, exist = self.layout
        buffers = [
            chosen, root, *tree, nodes, self.tokens, parents, exist, self.positions, self.ancestors, self.offsets,
            self.choices, self.best, self.summary,
        ]  # fmt: skip
        super().__init__("verified_rows", _pointers(buffers), buffers)


def native_ranking(*buffers: Tensor) -> NativeObject:
    """Return a native object whose C function "rank" (see ``direct``) sorts a tree's nodes by descending score.

    ``buffers`` are the nodes' scores [N] float32 and depths [N] int64, the node indices by rank [N] int64 (written),
    the verify widths [V] int64, ascending, and for each width the expected tokens [V] float64 and the depth [V] int64
    of the tree of that many best nodes (both written).
    """
    return NativeObject("ranking", _pointers(buffers), buffers)


class NativeStatistics(NativeObject):
    """N-gram counts of a text, and trees drafted from them (tree/counts.h); ``weights`` are the n-gram scorer's."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__("counts", _pointers(weights), ())
        self._buffers: dict[str, Sequence[Tensor]] = {}

    def set_table(self, *arrays: Tensor) -> None:
        """Set the static n-gram table to draft from; ``arrays`` are its ``Table.tensors``, which must not change."""
        self._keep("set_table", arrays)

    def forget(self) -> None:
        """Drop the text and its n-gram counts. The static n-gram table stays."""
        self._call("forget")

    def append(self, tokens: Sequence[int]) -> None:
        """Append token ids to the text and count the n-grams that end with them."""
        self._call("append", *_integers(tokens))

    def leave_out_below(self, score: float) -> None:
        """Set the least score (log-probability of the path) that nodes of later trees may have."""
        self._call("leave_out_below", ctypes.c_double(score))

    def follow_draws(self, key: int, noise: float, others: float) -> None:
        """Reweigh candidates of later trees by the random draws of a sampling target (tree/draws.h).

        ``key`` is the key of the request's noise, ``noise`` the weight of the noise (0 for a greedy target), ``others``
        the log-weight of all tokens that are not candidates.
        """
        self._call("follow_draws", ctypes.c_int64(key), ctypes.c_double(noise), ctypes.c_double(others))

    def features(self, path: Sequence[int]) -> Tensor:
        """Return n-gram counts of the candidates for the token after ``path``, [n, 1 + 2 K] int64.

        Columns: the candidate's id, its count after each of the K = 9 contexts, the count of each context.

        Args:
            path: token ids. The contexts are the last 1 to 6 tokens of ``path``, counted in the text (16 candidates
                each at most), then the last 1 to 3 tokens, counted in the static table.
        """
        function = getattr(_library(), "yggdrasil_counts_features")  # noqa: B009
        function.restype = ctypes.c_int64
        capacity = 1 << 12
        while True:
            rows = torch.empty(capacity, dtype=torch.int64)
            count = function(self.address, *_integers(path), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(capacity))
            check(count)
            if count <= capacity:
                return rows[:count].view(-1, FEATURE_COLUMNS)
            capacity = count

    def set_grow_buffers(self, *buffers: Tensor) -> None:
        """Register the buffers of the C function "grow", which appends new tokens to the text and drafts a new tree.

        ``buffers`` are ``TokenTree.node_tensors`` and an int64 mailbox, which holds the largest depth, the root's index
        in the request's text, the number of new tokens, and the new tokens.
        """
        self._keep("grow_in", buffers)

    def set_fill_buffers(self, *buffers: Tensor) -> None:
        """Register the buffers of the C function "fill", which adds nodes to a tree that another drafter has grown.

        ``buffers`` are ``TokenTree.node_tensors``, the candidate pool's tokens and scores, and an int64 mailbox, which
        holds the largest depth and the root's index in the request's text.
        """
        self._keep("fill_in", buffers)

    def _keep(self, name: str, buffers: Sequence[Tensor]) -> None:
        self._call(name, views_of(buffers))
        self._buffers[name] = buffers

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(_library(), f"yggdrasil_counts_{name}")
        function.restype = ctypes.c_int32
        check(function(self.address, *arguments))


FEATURE_COLUMNS = 1 + 2 * 9  # token, then counts in each context (tree/scorer.h)


def _pointers(tensors: Sequence[Tensor]) -> list[bytes]:
    return [view_of(tensor) for tensor in tensors]


def _integers(numbers: Sequence[int]) -> tuple[Any, Any]:
    return numbers_of(numbers), ctypes.c_int64(len(numbers))


def _library() -> ctypes.PyDLL:
    assert Native.held is not None
    return Native.held
