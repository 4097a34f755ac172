"""The protocol of tree algorithms: rules that choose entries of the candidate pool, level by level.

The pool has the K best candidates of every node that the drafter has read, best first: entry ``i * K + j`` is the j-th
candidate of node i. Dims: K candidates per node, P pool entries.
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
    """The candidates of a growing tree."""

    scores: npt.NDArray[np.float32]  # [P] log path probability, -inf if attached or absent
    edges: npt.NDArray[np.float32]  # [P] the drafter's log-probability of the token given its parent
    candidates: int  # K

    def best(self, count: int, nodes: range | None = None) -> Entries:
        """Return the best ``count`` entries that are not attached (of ``nodes`` only, if given), best first.

        Ties go to the earlier entry.
        """
        first = 0 if nodes is None else nodes.start * self.candidates
        last = len(self.scores) if nodes is None else nodes.stop * self.candidates
        scores = self.scores[first:last]
        order = np.argsort(-scores, kind="stable")[:count]
        return (first + order[np.isfinite(scores[order])]).astype(np.int64)


class Growth(Protocol):
    """A growth rule. It may keep state from the first level of a tree to the last."""

    name: str
    reads_pool: bool  # whether it reads the pool, which must then be copied from the device

    def widths(self, depth: int) -> list[int]:
        """Return the maximum number of nodes that the drafter reads per level; the last level is not read."""

    def level(self, pool: Pool, newest: range, depth: int) -> Entries:
        """Return the entries to attach at ``depth`` (1: the root's children) and to read; an empty result ends growth.

        ``newest`` are the nodes of the level before, in the order of their chosen entries.
        """

    def last(self, pool: Pool, newest: range, depth: int) -> Entries:
        """Return the entries to attach last, as leaves that the drafter does not read."""


@dataclass(frozen=True)
class StaticTree:
    """A tree fixed in advance: node i > 0 is the ``ranks[i - 1]``-th candidate (from 0) of node ``parents[i - 1]``.

    Nodes are numbered level by level.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def from_paths(cls, paths: Sequence[tuple[int, ...]]) -> "StaticTree":
        """Return the tree of ``paths``, each the candidate ranks from the root to a node; they include all prefixes.

        Raises:
            ValueError: a node's parent is missing, or a node is listed twice.
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
        """Depth of each node, beginning with 0 for the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included."""
        return len(self.parents) + 1


class StaticGrowth:
    """The rule of a fixed tree."""

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
