"""A tree without branches, guessed on the host and written in one go."""

from collections.abc import Sequence

import numpy as np

from yggdrasil.models.buffers import HostView
from yggdrasil.tree.token_tree import MIN_DESCENT, NO_SCORE, TokenTree


class ChainWriter:
    """Writes chains into one tree: one copy a buffer whatever their length, most of them made once.

    Candidates that a drafter left in the pool stay there; its next root forgets them.
    """

    def __init__(self, tree: TokenTree) -> None:
        nodes = np.arange(tree.num_nodes)
        self.order = nodes  # from best to worst
        self._tokens = np.zeros_like(nodes)
        self._edges = np.zeros(tree.num_nodes, dtype=np.float32)
        self._scores = np.empty_like(self._edges)
        self._descent = MIN_DESCENT * nodes[1:]
        self._written = [
            (HostView(tree.tokens), self._tokens),
            (HostView(tree.parents), np.maximum(nodes - 1, 0)),
            (HostView(tree.depths), nodes),
            (HostView(tree.scores), self._scores),
            (HostView(tree.edges), self._edges),
            (HostView(tree.ancestors), np.tri(tree.num_nodes, dtype=bool)),
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
        self._scores[1:size] = np.log(survival) + self._descent[: size - 1]
        self._edges[1:size] = np.diff(self._scores[:size])
        for view, values in self._written:
            view.write(values)
