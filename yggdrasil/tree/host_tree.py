"""A copy on the host of a tree that captured steps read, for drafters on the host that grow or extend it."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from yggdrasil.runtime.graphs import Capture, Recorder
from yggdrasil.tree.token_tree import TokenTree


class HostTree:
    """Host copy, ``tree``, of a token tree that captured steps use; on CUDA, ``tree`` is in pinned memory.

    Nodes and the pool's tokens and scores are copied to the host, and only nodes are copied back. CUDA graphs make both
    copies.
    """

    def __init__(self, captured: TokenTree, recorder: Recorder) -> None:
        is_cuda = captured.tokens.device.type == "cuda"
        self._captured = captured
        self.tree = TokenTree.on_host(captured.num_nodes, captured.candidates)
        if is_cuda:
            pinned = {each.name: getattr(self.tree, each.name).pin_memory() for each in fields(self.tree)}
            self.tree = replace(self.tree, **pinned)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._fetch, self._write = recorder.capture(self.copy), recorder.capture(self._write_nodes)

    def copy(self) -> Sequence[Tensor]:
        """Copy the nodes, pool tokens and pool scores of the captured tree to ``tree``, and return no tensors.

        Call it in the work of a CUDA graph. Call ``note_copy`` after each launch of that graph.
        """
        self._copy_all(self.tree, self._captured, ["pool_tokens", "pool_scores"])
        return ()

    def note_copy(self) -> None:
        """Note that a CUDA graph with ``copy`` has been launched, so that ``wait`` waits for it; no effect on a CPU."""
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Wait until the copy that was noted last has ended. The host may then read and extend ``tree``."""
        if self._copied is not None:
            self._copied.synchronize()

    def fetch(self) -> None:
        """Copy the captured tree to ``tree`` by launching a separate CUDA graph, and wait until the copy has ended."""
        self._fetch()
        self.note_copy()
        self.wait()

    def write(self) -> None:
        """Copy the nodes of ``tree`` to the captured tree by one launch, without waiting.

        The nodes of ``tree`` must not change before the copy has ended, which is certain once the host has read the
        outcome of a pass that was launched after the copy.
        """
        self._write()

    def captures(self) -> Iterator[Capture]:
        """Yield the CUDA graphs of ``fetch`` and ``write``. Each must be prepared (run once) between requests."""
        yield from (self._fetch, self._write)

    def _write_nodes(self) -> Sequence[Tensor]:
        self._copy_all(self._captured, self.tree, [])
        return ()

    def _copy_all(self, to: TokenTree, of: TokenTree, others: Sequence[str]) -> None:
        pairs = [*zip(to.node_tensors(), of.node_tensors(), strict=True)]
        for ours, theirs in [*pairs, *((getattr(to, name), getattr(of, name)) for name in others)]:
            ours.copy_(theirs, non_blocking=True)
