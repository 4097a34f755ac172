"""EAGLE-2's dynamic tree (Li et al. 2024): expand the best nodes of each level, then rerank all candidates.

Levels are expanded as in the paper: of the last level, the ``top_k`` nodes of greatest path probability, each to its
``top_k`` likeliest tokens. Afterwards the best ``budget`` of all candidates, expanded or not, are verified.
"""

from yggdrasil.bench.rivals.protocol import Entries, Pool


class Eagle2:
    """``top_k`` 10, six expansions and 60 verified tokens are the paper's."""

    reads_pool = True

    def __init__(self, budget: int, top_k: int) -> None:
        self.name = f"EAGLE-2, top {top_k}, {budget} nodes"
        self._budget, self._top_k = budget, top_k

    def widths(self, depth: int) -> list[int]:
        return [self._top_k] * (depth - 1)

    def level(self, pool: Pool, newest: range, depth: int) -> Entries:
        return pool.best(self._top_k, newest)

    def last(self, pool: Pool, newest: range, depth: int) -> Entries:
        """Candidates, at any depth, good enough to be among the best ``budget``: at most so many."""
        return pool.best(self._budget)
