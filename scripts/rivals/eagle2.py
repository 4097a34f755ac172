"""EAGLE-2's dynamic tree (Li et al. 2024): expand the best nodes of each level, then rerank all candidates.

As in the paper, the ``top_k`` nodes of the last level with the highest path probability are expanded to their ``top_k``
best tokens each. Then the best ``budget`` of all candidates, expanded or not, are verified.
"""

from rivals.protocol import Entries, Pool


class Eagle2:
    """EAGLE-2's rule. The paper uses ``top_k`` 10, six expansions and 60 verified tokens."""

    reads_pool = True

    def __init__(self, budget: int, top_k: int) -> None:
        self.name = f"EAGLE-2, top {top_k}, {budget} nodes"
        self._budget, self._top_k = budget, top_k

    def widths(self, depth: int) -> list[int]:
        return [self._top_k] * (depth - 1)

    def level(self, pool: Pool, newest: range, depth: int) -> Entries:
        return pool.best(self._top_k, newest)

    def last(self, pool: Pool, newest: range, depth: int) -> Entries:
        """Return the best ``budget`` remaining candidates of any depth; the best nodes are chosen from all later."""
        return pool.best(self._budget)
