"""A verified tree: the rows of one target pass, as acceptance rules walk them on the host.

Dims: W rows of the pass, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from yggdrasil.acceptance.drawn import DrawnTree


@dataclass
class VerifiedTree:
    """Rows of one target pass; row 0 is the root. Padding rows are left out of ``children``."""

    tokens: list[int]  # [W]
    parents: list[int]  # [W], row of each row's parent
    nodes: list[int]  # [W], node indices in the drafted tree
    logits: Tensor  # [W, V]
    children: list[dict[int, int]] = field(default_factory=list)  # for each row: token -> row
    drawn: DrawnTree | None = None  # how the candidates were drawn; None for a tree fixed before any draw
    replay: Callable[[Sequence[int]], Tensor] | None = None  # rows of a path -> logits [V] after it, at width 1

    @classmethod
    def of(cls, layout: Sequence[Sequence[int]], logits: Tensor, drawn: DrawnTree | None = None) -> "VerifiedTree":
        """Build the tree from the rows of a verification pass.

        Args:
            layout: four columns with W entries: node number, token, parent's row, and whether the row exists (is no
                padding).
            logits: [W, V], the target's logits after each row.
            drawn: how the candidates were drawn; None for a tree fixed before any draw.
        """
        nodes, tokens, parents, exists = (list(column) for column in layout)
        children: list[dict[int, int]] = [{} for _ in nodes]
        for row in range(1, len(nodes)):
            if exists[row]:
                children[parents[row]][tokens[row]] = row
        return cls(tokens, parents, nodes, logits, children, drawn)

    def path(self, row: int) -> list[int]:
        """Return the tokens on the tree's path from the root (excluded) to ``row`` (included)."""
        tokens: list[int] = []
        while row:
            tokens.append(self.tokens[row])
            row = self.parents[row]
        return tokens[::-1]
