"""How a head that keeps rows of the text follows it: which tokens are certain, and which states it has yet to read."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from yggdrasil.drafters.heads.waiting import WaitingStates
from yggdrasil.runtime.runner import ModelRunner


class ReadingDrafter:
    """What drafters over such heads have in common. The text that they keep is without its first token."""

    def __init__(self, runner: ModelRunner, waiting: WaitingStates) -> None:
        self.runner = runner
        self._waiting = waiting
        self._text = runner.text  # certain tokens but the first
        self._first: int | None = None

    def num_kept(self, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens`` need no states any more."""
        if self._first is None or not tokens or tokens[0] != self._first:
            return 0
        return 1 + self._text.shared(tokens[1:])

    def begin(self, tokens: Sequence[int]) -> None:
        """Rows of the last request's text are kept up to the first token that differs.

        What of ``tokens`` has no row among them comes once more, with its states, as ``num_kept`` says.
        """
        kept = self.num_kept(tokens) - 1
        self._first = tokens[0]
        self._waiting.clear()
        self._text.begin(tokens[1:], max(kept, 0))

    def place_at(self, length: int, token: int) -> None:
        """Stand behind ``length`` tokens as if they had been read, with ``token`` as the root; for timing steps."""
        self._first = token
        self._text.pretend([token] * length, length - 1)
        self._waiting.clear()
        self._waiting.again()

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        """More ``tokens`` are certain; their states wait to be read."""
        self._text.tokens.extend(tokens)
        self._waiting.add(hidden, len(tokens))
