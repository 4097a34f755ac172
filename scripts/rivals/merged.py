"""Merged sequences: SpecInfer's merge-based tree (Miao et al. 2024, section 3) with one sampled drafter.

Several continuations are sampled from the drafter's top K and merged into a tree by common prefixes; equal ones add no
nodes.
"""

import numpy as np

from rivals.protocol import NOTHING, Entries, Pool


class MergedSequences:
    """The rule that merges ``num_sequences`` sampled continuations of ``length`` tokens; ``seed`` fixes the samples."""

    reads_pool = True

    def __init__(self, num_sequences: int, length: int, seed: int = 0) -> None:
        self.name = f"{num_sequences} merged sequences of {length}"
        self._num_sequences, self._length = num_sequences, length
        self._random = np.random.default_rng(seed)
        self._ends: Entries = (
            NOTHING  # [num_sequences] the last node of each sequence, as an index into the newest nodes
        )

    def widths(self, depth: int) -> list[int]:
        return [self._num_sequences] * (depth - 1)

    def level(self, pool: Pool, newest: range, depth: int) -> Entries:
        if depth > self._length:
            return NOTHING
        if depth == 1:
            self._ends = np.zeros(self._num_sequences, dtype=np.int64)
        nodes = newest.start + self._ends
        drawn = np.array([self._draw(pool, int(node)) for node in nodes], dtype=np.int64)
        entries, self._ends = np.unique(drawn, return_inverse=True)
        return entries

    def last(self, pool: Pool, newest: range, depth: int) -> Entries:
        return self.level(pool, newest, depth)

    def _draw(self, pool: Pool, node: int) -> int:
        first = node * pool.candidates
        weights = np.exp(pool.edges[first : first + pool.candidates].astype(np.float64))
        return first + int(self._random.choice(pool.candidates, p=weights / weights.sum()))
