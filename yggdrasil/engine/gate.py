"""Whether to speculate at all: pauses while the objective refuses, and an account of what speculation really gained."""


class Gate:
    """Keeps speculation from costing time where it does not pay, and tries again later.

    When the objective prefers plain steps, it is not even asked for a while: a pause that doubles each time the answer
    stays the same. It begins with one step: where trees pay threefold, a long pause after one bad tree costs more than
    asking in vain.

    Beyond what the objective believes there is an account of what speculation really gained or lost, in plain steps, at
    the speed the machine has now. Where the stake is lost, decoding is plain, and each plain step earns a little until
    the loss is paid back: so the loss stays near ``_EARNED`` of the time. The account outlives a request.

    The first tree of a request pays for the drafter's reading of the prompt. That is spent whatever follows, so it is
    charged when the request has ended: before, it would end the speculation that was to earn it back.
    """

    _FIRST_PAUSE, _LONGEST_PAUSE = 1, 128
    # The first trees after plain steps meet cold caches and sleeping threads; the stake lasts until they run warm.
    _CREDIT, _STAKE, _RICHEST, _EARNED = 8.0, 8.0, 64.0, 0.03
    _WORST = -12.0  # what one tree may lose; beyond, the machine stood still

    def __init__(self) -> None:
        self._balance, self._is_open = self._CREDIT, True
        self._entry, self._has_entered = 0.0, False  # the first tree of this request
        self.begin()

    def rested(self) -> None:
        """A plain step was taken without asking the objective."""
        self._balance = min(self._balance + self._EARNED, self._RICHEST)

    def settle(self, gained: float) -> None:
        """An iteration gave ``gained`` tokens more than plain steps would have in its time."""
        gained = max(gained, self._WORST)
        if not self._has_entered:
            self._has_entered, self._entry, gained = True, min(gained, 0.0), max(gained, 0.0)
        self._balance = min(self._balance + gained, self._RICHEST)

    def begin(self) -> None:
        """A new request."""
        self._balance += self._entry
        self._has_entered, self._entry = False, 0.0
        self._pause, self._left = self._FIRST_PAUSE, 0

    @property
    def is_full(self) -> bool:
        """Whether speculation has gained all that the account keeps."""
        return self._balance >= self._RICHEST

    @property
    def is_open(self) -> bool:
        """Whether the stake is not lost, as it was last seen."""
        return self._is_open

    def is_paused(self) -> bool:
        """Whether the next step is plain without asking the objective."""
        self._is_open = self._balance >= (-self._STAKE if self._is_open else 0.0)
        if not self._is_open:
            return True
        if self._left > 0:
            self._left -= 1
            return True
        return False

    def refused(self) -> None:
        """The objective prefers a plain step: pause."""
        self._left = self._pause
        self._pause = min(2 * self._pause, self._LONGEST_PAUSE)

    def drafted(self) -> None:
        """The objective wants a tree: the next pause is short again."""
        self._pause = self._FIRST_PAUSE
