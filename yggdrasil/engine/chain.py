"""A tree without branches, guessed on the host and written in one go."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.runtime.buffers import HostView
from yggdrasil.tree.token_tree import MIN_DESCENT, NO_SCORE, TokenTree


class ChainWriter:
    """Writes chains into one tree: one copy a buffer whatever their length, most of them made once.

    Candidates that a drafter left in the pool stay there; its next root forgets them.
    """

    def __init__(self, tree: TokenTree) -> None:
        self.order = np.arange(tree.num_nodes)  # from best to worst
        self._tokens = np.zeros_like(self.order)
        self._edges = np.zeros(tree.num_nodes, dtype=np.float32)
        self._scores = np.empty_like(self._edges)
        self._descent = MIN_DESCENT * self.order[1:]
        self._written: list[tuple[HostView, npt.NDArray[Any]]] = [
            (HostView(tree.tokens), self._tokens),
            (HostView(tree.scores), self._scores),
            (HostView(tree.edges), self._edges),
        ]
        nodes = torch.arange(tree.num_nodes, device=tree.tokens.device)
        self._same = [  # for every chain
            (tree.parents, (nodes - 1).clamp(min=0)),
            (tree.depths, nodes),
            (tree.ancestors, nodes[:, None] >= nodes[None, :]),
        ]

    def write(self, root: int, tokens: Sequence[int], survival: Sequence[float]) -> None:
        """Plant ``root`` and below it ``tokens``, one behind the other.

        ``survival[i]``, above 0 and never rising, estimates that the first ``i + 1`` of them are all right.

        Raises:
            ValueError: more tokens than the tree has room for, or another number of estimates.
        """
        size = 1 + len(tokens)
        if size > self.order.size or len(survival) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, {len(survival)} estimates for a tree of {self.order.size} nodes")
        self._tokens[0], self._tokens[1:size] = root, tokens
        self._scores[0], self._scores[size:] = 0.0, NO_SCORE
        logs = np.log(survival)
        self._edges[1:size] = np.diff(logs, prepend=0.0)
        self._scores[1:size] = logs + self._descent[: size - 1]
        for view, values in self._written:
            view.write(values)
        for buffer, constant in self._same:
            buffer.copy_(constant)
