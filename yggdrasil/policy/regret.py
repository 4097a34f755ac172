"""Regret budgets: limit the loss of speculation against plain decoding, in plain steps, and so how often it is tried.

Theorem. Whatever trees are drafted and however the speed of the machine changes, after every iteration

    lost <= GRANT + EARNED * iterations without it + WORST + the first tree of this request

where ``lost`` is the time of speculation beyond that of the plain steps for the same tokens, at most ``WORST`` per tree
(the rest is a pause of the machine). Proof: the balance is at most GRANT - lost + earned, since gains are capped at
``MOST``. A tree is drafted only while the balance is not negative, so only the last tree can take it
below zero, by at most ``WORST``; the first tree of a request is charged when the request ends.
"""

from collections.abc import Mapping
from typing import Any


class RegretBudget:
    """Balance of gains and losses of one kind of speculation, in plain steps at the present speed.

    A negative balance closes the budget. Each iteration without speculation earns a little, until there is enough for a
    few trees, because a single one would be measured with cold caches. The balance is kept across requests.
    """

    GRANT, EARNED = 8.0, 0.01  # initial balance; earned per iteration without speculation
    REOPENS = 2.0  # balance at which a closed budget reopens
    MOST = 64.0  # cap of the balance
    WORST = 4.0  # the most that one tree is charged

    def __init__(self) -> None:
        self._balance, self.is_open = self.GRANT, True
        self._first, self._has_first = 0.0, False  # loss of this request's first tree, charged at the next ``begin``

    def begin(self) -> None:
        """Begin a request, and charge the first tree of the last one.

        That tree's loss includes the drafter's prefill of the prompt, a sunk cost. Charged earlier, it would stop the
        speculation that could recover it.
        """
        self._add(self._first)
        self._first, self._has_first = 0.0, False

    def settle(self, gained: float) -> None:
        """Add a tree's gain: its tokens minus those of plain steps in the same time."""
        if not self._has_first:
            self._has_first, self._first, gained = True, max(min(gained, 0.0), -3 * self.WORST), max(gained, 0.0)
        self._add(max(gained, -self.WORST))

    def earn(self) -> None:
        """Add the earnings of an iteration without speculation."""
        self._add(self.EARNED)

    def _add(self, gained: float) -> None:
        self._balance = min(self._balance + gained, self.MOST)
        self.is_open = self._balance >= (0.0 if self.is_open else self.REOPENS)

    def state(self) -> dict[str, Any]:
        """Return the balance as plain data."""
        return {"balance": self._balance, "is_open": self.is_open}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the balance that ``state`` returned."""
        self._balance, self.is_open = state["balance"], state["is_open"]


class PlainProbe:
    """Forced probe: makes some requests begin with plain steps, to measure the reference of the regret bound."""

    STEPS = 2  # the first step after a prefill is cold
    EVERY = 400  # iterations between probes, which cost 0.5 % at a speedup of 2

    def __init__(self) -> None:
        self._waited = self.EVERY  # iterations since the last warm plain step

    def is_due(self, step: int) -> bool:
        """Return whether step number ``step`` of a request must be plain."""
        return step < self.STEPS and self._waited >= self.EVERY

    def observe(self, *, is_warm_plain: bool) -> None:
        """Count an iteration. A warm plain step is a measurement, so the next probe is due after ``EVERY`` more."""
        self._waited = 0 if is_warm_plain else self._waited + 1
