"""Exploration: what speculation may lose against plain decoding, in plain steps, and so how often it is tried."""


class Budget:
    """An account of what one way to speculate has really gained or lost, in plain steps at the machine's speed of now.

    It begins with a grant. Where that is lost the way is closed, and each iteration that does without earns a little
    until there is enough for a few trees: the first after a while meet cold caches and sleeping threads, so one of them
    alone would say little. Hence, at any time,

        lost <= grant + EARNED * iterations without + what the last tree and this request's first lost

    whatever was drafted and however the machine's speed changed: what was gained is kept only up to ``_MOST`` and may
    be lost again, no more. The account outlives a request.

    The first tree of a request pays for the drafter's reading of the prompt. That is spent whatever follows, so it is
    charged when the request has ended: before, it would end the speculation that was to earn it back.
    """

    GRANT, EARNED = 8.0, 0.01
    AGAIN = 2.0  # to be tried again with
    _MOST = 64.0
    _WORST = -4.0  # what one tree may lose; beyond, the machine stood still

    def __init__(self) -> None:
        self._balance, self.is_open = self.GRANT, True
        self._entry, self._has_entered = 0.0, False  # the first tree of this request

    def begin(self) -> None:
        """A new request."""
        self._add(self._entry)
        self._entry, self._has_entered = 0.0, False

    def renew(self) -> None:
        """Where it is closed: a few trees may be tried now, on a text that is not the one they lost on."""
        if not self.is_open:
            self._balance, self.is_open = self.AGAIN, True

    def settle(self, gained: float) -> None:
        """A tree gave ``gained`` tokens more than plain steps would have in its time."""
        if not self._has_entered:
            self._has_entered, self._entry, gained = True, max(min(gained, 0.0), 3 * self._WORST), max(gained, 0.0)
        self._add(max(gained, self._WORST))

    def earn(self) -> None:
        """An iteration did without."""
        self._add(self.EARNED)

    def _add(self, gained: float) -> None:
        self._balance = min(self._balance + gained, self._MOST)
        self.is_open = self._balance >= (0.0 if self.is_open else self.AGAIN)
