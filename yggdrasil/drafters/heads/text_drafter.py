"""How a head that keeps rows of the text follows it: which tokens are certain, and which states it has yet to read."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.level_drafter import LevelDrafter
from yggdrasil.drafters.protocol import Capabilities, DraftSteps
from yggdrasil.native import is_native
from yggdrasil.native.direct import Mailbox, direct, native_state_rows
from yggdrasil.runtime.layer_rows import LayerRows
from yggdrasil.runtime.runner import ModelRunner


class WaitingStates:
    """States of ``layers`` side by side, put where the head's step reads them: ``buffer`` [n, S].

    Those of a prompt are more than it holds, and wait elsewhere: a head that never drafts reads none.
    """

    def __init__(self, layers: Sequence[int], buffer: Tensor) -> None:
        self._layers, self._buffer = list(layers), buffer
        self._early: list[Tensor] = []  # [.., S] each, before those in the buffer
        self._here = 0  # rows in the buffer that wait
        self._last = 0  # the row of the buffer that was read last
        self._keep: Callable[[], int] | None = None
        if is_native() and buffer.device.type == "cpu":
            self._mail = Mailbox(2 + len(self._layers) + len(buffer))
            self._rows = native_state_rows(buffer, len(self._layers), self._mail.tensor)
            self._keep = direct("keep", self._rows)

    def __len__(self) -> int:
        return self._here + sum(map(len, self._early))

    def clear(self) -> None:
        """None waits."""
        self._early, self._here = [], 0

    def cut(self, count: int) -> None:
        """The first ``count`` of those that wait do so still."""
        whole, self._early = self._early, []
        for part in whole:
            self._early += [part[:count]] if count else []
            count -= min(count, len(part))
        self._here = min(self._here, count)

    def add(self, hidden: Mapping[int, Tensor], count: int) -> None:
        """``count`` more tokens, with the states ``hidden[layer]`` [count, H] before each of them."""
        if self._here and self._here + count > len(self._buffer):
            self._early.append(self._buffer[: self._here].clone())
            self._here = 0
        if count > len(self._buffer):
            self._early.append(self._beside_each_other(hidden))
            return
        if not self._added_natively(hidden):
            self._buffer[self._here : self._here + count] = self._beside_each_other(hidden)
        self._here += count

    def again(self) -> None:
        """Mark the last state as unread, so that the next head draft reads it again."""
        if self._last:
            self._buffer[0] = self._buffer[self._last]
        self._here = 1

    def chunks(self) -> Iterator[int]:
        """How many of those that wait lie in the buffer, to be read before the next are put there; none is left."""
        if self._early:
            whole = torch.cat([*self._early, self._buffer[: self._here]])
            self.clear()
            for part in whole.split(len(self._buffer)):
                self._buffer[: len(part)] = part
                self._last = len(part) - 1
                yield len(part)
            return
        count, self._here = self._here, 0
        self._last = count - 1
        yield count

    def _beside_each_other(self, hidden: Mapping[int, Tensor]) -> Tensor:
        return torch.cat([hidden[layer] for layer in self._layers], dim=-1)

    def _added_natively(self, hidden: Mapping[int, Tensor]) -> bool:
        """Whether one call has put them into the buffer."""
        if self._keep is None or not isinstance(hidden, LayerRows):
            return False
        numbers, place = self._mail.numbers, 2
        numbers[0], numbers[1] = self._here, len(hidden.rows)
        for layer in self._layers:
            states = hidden.whole[layer]
            if states.dtype != self._buffer.dtype or not states.is_contiguous():
                return False
            numbers[place] = states.data_ptr()
            place += 1
        for row in hidden.rows:
            numbers[place] = row
            place += 1
        return self._keep() == 0


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
