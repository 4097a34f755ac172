"""Exploration: how much speculation may lose against plain decoding, in plain steps, and so how often it is tried.

Theorem. Whatever trees are drafted and however the speed of the machine changes, after every iteration

    lost <= GRANT + EARNED * iterations without it + WORST + the first tree of this request

where ``lost`` is what speculation took beyond the plain steps that would have made its tokens, at most ``WORST`` for a
tree (what is beyond is a pause of the machine). Proof: the balance is at most GRANT - lost + earned, since gains are
kept only up to ``MOST``. A tree is drafted only while the balance is not negative, so only the last tree can take it
below zero, by at most ``WORST``; the first tree of a request is charged when the request ends.
"""

from collections.abc import Mapping
from typing import Any


class RegretBudget:
    """Gains and losses of one kind of speculation, in plain steps at the present speed.

    A negative balance closes that kind; each iteration without it earns a little, until there is enough for a few
    trees. One alone would measure cold caches. It outlives a request.
    """

    GRANT, EARNED = 8.0, 0.01  # at first; by each iteration without
    REOPENS = 2.0  # balance with which a closed budget opens again
    MOST = 64.0  # of gains that are kept to be lost again
    WORST = 4.0  # that one tree may be charged

    def __init__(self) -> None:
        self._balance, self.is_open = self.GRANT, True
        self._first, self._has_first = 0.0, False  # the first tree of this request

    def begin(self) -> None:
        """A new request. The last one's first tree is charged now.

        It pays for the drafter's reading of the prompt, which is spent whatever follows: charged before, it would end
        the speculation that was to earn it back.
        """
        self._add(self._first)
        self._first, self._has_first = 0.0, False

    def settle(self, gained: float) -> None:
        """A tree gave ``gained`` tokens more than plain steps would have in its time."""
        if not self._has_first:
            self._has_first, self._first, gained = True, max(min(gained, 0.0), -3 * self.WORST), max(gained, 0.0)
        self._add(max(gained, -self.WORST))

    def earn(self) -> None:
        """An iteration did without."""
        self._add(self.EARNED)

    def _add(self, gained: float) -> None:
        self._balance = min(self._balance + gained, self.MOST)
        self.is_open = self._balance >= (0.0 if self.is_open else self.REOPENS)

    def state(self) -> dict[str, Any]:
        """Return the account as plain data."""
        return {"balance": self._balance, "is_open": self.is_open}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self._balance, self.is_open = state["balance"], state["is_open"]


class PlainProbe:
    """Forced probe: now and then a request begins with plain steps, which measure the reference of the regret bound."""

    STEPS = 2  # the first after a prefill is cold
    EVERY = 400  # iterations between probes: beside speculation at twice plain speed they cost half a percent

    def __init__(self) -> None:
        self._waited = self.EVERY  # iterations since the last warm plain step

    def is_due(self, step: int) -> bool:
        """Return whether ``step`` of a request is to be plain."""
        return step < self.STEPS and self._waited >= self.EVERY

    def observe(self, *, is_warm_plain: bool) -> None:
        """An iteration is over."""
        self._waited = 0 if is_warm_plain else self._waited + 1
