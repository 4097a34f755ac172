"""The target's states before tokens that a head has not read yet."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from yggdrasil.native import is_native
from yggdrasil.native.direct import Mailbox, direct, native_state_rows
from yggdrasil.runtime.layer_rows import LayerRows


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
        """The state that was read last waits once more."""
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
