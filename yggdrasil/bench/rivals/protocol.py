"""What a rival tree is: a rule that chooses pool entries, level by level.

The pool of a tree keeps K candidates of every read node, likeliest first: entry ``i * K + j`` is the j-th of node i.
Dims: K candidates a node, P pool entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Entries = npt.NDArray[np.int64]
NOTHING: Entries = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Pool:
    """A look at the candidates of a growing tree."""

    scores: npt.NDArray[np.float32]  # [P] log path probability, -inf where taken or absent
    edges: npt.NDArray[np.float32]  # [P] the drafter's log-probability of the token given its parent
    candidates: int  # K

    def best(self, count: int, nodes: range | None = None) -> Entries:
        """The ``count`` best free entries, of ``nodes`` alone if given; best first, ties to the earlier entry."""
        first = 0 if nodes is None else nodes.start * self.candidates
        last = len(self.scores) if nodes is None else nodes.stop * self.candidates
        scores = self.scores[first:last]
        order = np.argsort(-scores, kind="stable")[:count]
        return (first + order[np.isfinite(scores[order])]).astype(np.int64)


class Growth(Protocol):
    """A rule; it may keep state from the first level of a tree to its last."""

    name: str
    reads_pool: bool  # a rule that needs no look at the pool costs no transfer from the device

    def widths(self, depth: int) -> list[int]:
        """Nodes read at each level of a tree of that depth, at most; the last level is not read."""

    def level(self, pool: Pool, newest: range, depth: int) -> Entries:
        """Entries to attach at ``depth`` (1 for the root's children) and to read; none ends the growth.

        ``newest`` are the nodes of the level before. They come in the order of the entries chosen for them.
        """

    def last(self, pool: Pool, newest: range, depth: int) -> Entries:
        """Entries to attach in the end, unless growth has ended before: leaves, which the drafter does not read."""


@dataclass(frozen=True)
class StaticTree:
    """A tree fixed in advance: node i > 0 is the ``ranks[i - 1]``-th candidate (from 0) of node ``parents[i - 1]``.

    Nodes are numbered level by level.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def from_paths(cls, paths: Sequence[tuple[int, ...]]) -> "StaticTree":
        """The tree of these nodes, each the ranks on its path from the root; every prefix must be there too.

        Raises:
            ValueError: a node's parent is missing, or a node is there twice.
        """
        ordered = sorted(paths, key=lambda path: (len(path), path))
        number = {(): 0} | {path: i for i, path in enumerate(ordered, start=1)}
        if len(number) != len(ordered) + 1:
            raise ValueError("a node is listed twice")
        missing = [path for path in ordered if path[:-1] not in number]
        if missing:
            raise ValueError(f"the parent of {missing[0]} is missing")
        return cls(tuple(number[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node, the root's 0 first."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def num_nodes(self) -> int:
        """The root included."""
        return len(self.parents) + 1


class StaticGrowth:
    """Attaches a fixed tree, whatever the context says."""

    reads_pool = False

    def __init__(self, name: str, tree: StaticTree) -> None:
        self.name = name
        self.tree = tree
        depths = tree.depths
        self._levels = [
            [(tree.parents[i - 1], tree.ranks[i - 1]) for i in range(1, tree.num_nodes) if depths[i] == depth]
            for depth in range(1, max(depths) + 1)
        ]

    @property
    def depth(self) -> int:
        return len(self._levels)

    def widths(self, depth: int) -> list[int]:
        return [len(level) for level in self._levels[: depth - 1]]

    def level(self, pool: Pool, newest: range, depth: int) -> Entries:
        if depth > len(self._levels):
            return NOTHING
        return np.array([parent * pool.candidates + rank for parent, rank in self._levels[depth - 1]], dtype=np.int64)

    def last(self, pool: Pool, newest: range, depth: int) -> Entries:
        return self.level(pool, newest, depth)
