"""How a head that keeps rows of the text follows it: which tokens are certain, and which states it has yet to read."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from yggdrasil.drafters.heads.waiting import WaitingStates
from yggdrasil.drafters.levels import LevelDrafter
from yggdrasil.drafters.protocol import Capabilities, DraftSteps
from yggdrasil.runtime.runner import ModelRunner


class TextHeadDrafter(LevelDrafter):
    """What drafters over such heads have in common. The text that they keep is without its first token."""

    def __init__(
        self, runner: ModelRunner, waiting: WaitingStates, layers: tuple[int, ...], knots: Tensor, head_width: int
    ) -> None:
        super().__init__(head_width)
        self.runner = runner
        self.knots = knots
        self._waiting = waiting
        self._text = runner.text  # certain tokens; the first, which no state comes before, is its lead
        steps = DraftSteps(runner, knots, self.head, self.place_at)
        self.capabilities = Capabilities(layers=layers, steps=steps, plants_root=True, num_kept=self._num_kept)

    @property
    def num_waiting(self) -> int:
        """States that wait to be read for the tokens behind the rows; 0 where the cache has another text by now."""
        is_current = len(self._waiting) == len(self._text.tokens) - self._text.num_rows
        return len(self._waiting) if is_current else 0

    @property
    def _num_certain(self) -> int:
        return 1 + len(self._text.tokens)

    def _num_kept(self, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens`` need no states any more."""
        if not self._text.lead or tuple(tokens[:1]) != self._text.lead:
            return 0
        return 1 + self._text.shared(tokens, self.num_waiting)

    def begin(self, tokens: Sequence[int]) -> None:
        """Rows and states of the last request's text are kept up to the first token that differs.

        What of ``tokens`` has neither comes once more, with its states, as the capability ``num_kept`` says.
        """
        kept = max(self._num_kept(tokens) - 1, 0)
        num_rows = min(kept, self._text.num_rows)
        self._waiting.cut(kept - num_rows)
        self._text.begin(tokens[1:], num_rows, tokens[:1])
        self._headed = None

    def place_at(self, length: int, token: int) -> None:
        """Stand behind ``length`` tokens as if they had been read, with ``token`` as the root; for timing steps."""
        self._text.pretend([token] * length, length - 1)
        self._waiting.clear()
        self._waiting.again()

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """More ``tokens`` are certain; their states wait to be read."""
        self._text.tokens.extend(tokens)
        self._waiting.add(states, len(tokens))
