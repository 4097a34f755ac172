"""Regret budgets: limit the loss of speculation against plain decoding, in plain steps, and so how often it is tried.

A tree loses the plain steps in whose time it was verified, minus its tokens. The policy limits that time to one and a
half of the prediction, since the rest is a pause of the machine. At most ``WORST`` counts, three times as much for the
first tree of a request, whose time includes the drafter's prefill.

Theorem. Whatever trees are drafted and however the speed of the machine changes, from any iteration on

    lost <= GRANT + EARNED * iterations without it + 4 * WORST + the first tree of this request

where ``lost`` are the losses minus the gains. The iterations may begin anywhere, since earlier gains raise the balance
to ``GRANT`` at most: a request loses no more because the ones before it gained. Proof: the balance is at most
GRANT - lost + earned, without this request's first tree, which is charged when the request ends. Trees are drafted only
while the balance is not negative, so the last one takes it to -WORST at least, and the charge of its request's first
tree to -4 * WORST.
"""

from collections.abc import Mapping
from typing import Any


class RegretBudget:
    """Balance of gains and losses of one kind of speculation, in plain steps at the present speed.

    A negative balance closes the budget. Each iteration without speculation earns a little, until there is enough for a
    few trees, because a single one would be measured with cold caches. The balance is kept across requests.
    """

    GRANT, EARNED = 16.0, 0.01  # initial and highest balance; earned per iteration without speculation
    REOPENS = 2.0  # balance at which a closed budget reopens
    WORST = 4.0  # the most that one tree is charged

    def __init__(self) -> None:
        self._balance, self.is_open = self.GRANT, True
        self._first, self._has_first = 0.0, False  # loss of this request's first tree, charged at the next ``begin``

    def begin(self) -> None:
        """Begin a request, and charge the first tree of the previous request to the balance.

        The first tree's loss includes the drafter's prefill of the prompt, a sunk cost. Charged earlier, it would stop
        the speculation that could recover it. Gains of its request repay it first.
        """
        self._add(self._first)
        self._first, self._has_first = 0.0, False

    def add_tree(self, gained: float) -> None:
        """Add the gain or loss of one verified tree to the balance; a loss counts at most ``WORST``.

        The loss of a request's first tree, at most three times ``WORST``, is not added now. Later gains of the request
        repay it, and ``begin`` of the next request charges the rest.

        Args:
            gained: the tree's tokens minus the tokens that plain decoding gives in the same time. Negative: a loss.
        """
        if not self._has_first:
            self._has_first, self._first, gained = True, max(min(gained, 0.0), -3 * self.WORST), max(gained, 0.0)
        repaid = min(max(gained, 0.0), -self._first)
        self._first += repaid
        self._add(max(gained - repaid, -self.WORST))

    def earn(self) -> None:
        """Raise the regret budget's balance by 0.01 plain steps, for an iteration without this kind of speculation."""
        self._add(self.EARNED)

    def _add(self, gained: float) -> None:
        self._balance = min(self._balance + gained, self.GRANT)
        self.is_open = self._balance >= (0.0 if self.is_open else self.REOPENS)

    def state(self) -> dict[str, Any]:
        """Return the regret budget's balance, in plain steps, and whether it is open, as plain data for JSON."""
        return {"balance": self._balance, "is_open": self.is_open}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the regret budget's balance by ``state``, a result of ``state()``."""
        self._balance, self.is_open = state["balance"], state["is_open"]
