"""OPT-Tree (Wang et al. 2024): grows level by level, then verifies the subtree of highest expected acceptance.

Each level takes the best ``level_width`` children of the level before, by path probability. Growth ends when a level
adds at most ``min_gain`` expected tokens to the best subtree of ``budget`` nodes.
"""

import numpy as np

from rivals.protocol import NOTHING, Entries, Pool


class OptTree:
    """OPT-Tree's rule. The best ``budget`` drafted nodes by score (log path probability) are verified."""

    reads_pool = True

    def __init__(self, budget: int, level_width: int, min_gain: float) -> None:
        self.name = f"OPT-Tree, {budget} nodes"
        self._budget, self._level_width, self._min_gain = budget, level_width, min_gain
        self._probabilities: list[float] = []
        self._expected = 0.0

    def widths(self, depth: int) -> list[int]:
        return [self._level_width] * (depth - 1)

    def level(self, pool: Pool, newest: range, depth: int) -> Entries:
        if depth == 1:
            self._probabilities, self._expected = [], 0.0
        entries = pool.best(self._level_width, newest)
        self._probabilities += np.exp(pool.scores[entries]).tolist()
        expected = sum(sorted(self._probabilities, reverse=True)[: self._budget])
        gain, self._expected = expected - self._expected, expected
        return entries if depth == 1 or gain > self._min_gain else NOTHING

    def last(self, pool: Pool, newest: range, depth: int) -> Entries:
        return self.level(pool, newest, depth)
