"""Copies of a text's recurrent states at several positions; texts with the same beginning continue from one of them."""

from collections.abc import Collection, Sequence

from yggdrasil.runtime.states.buffers import SavedState, StateBuffers

_APART = 16  # tokens between two copies: at most so many are read again
_MOST = 4  # copies, beside the states behind the text
NUM_STATES = 1 + _MOST


class KeptStates:
    """Copies of recurrent states, by the number of tokens that a state includes."""

    def __init__(self, kept: dict[int, SavedState]) -> None:
        self.kept = kept

    def places(self) -> Collection[int]:
        """Numbers of tokens after which a text can continue."""
        return {0, *self.kept}

    def begin(self, num_rows: int) -> None:
        """Drop copies behind the first ``num_rows`` tokens, a number that ``places`` lists."""
        self.kept = {place: saved for place, saved in self.kept.items() if place <= num_rows}

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(tensor.nbytes for saved in self.kept.values() for tensor in saved)


class TextStates(KeptStates):
    """The recurrent states after the text in a cache, and copies of them at earlier positions."""

    def __init__(self, buffers: StateBuffers, num_threads: int) -> None:
        super().__init__({})
        self._num_read: int | None = 0  # tokens in the states; None while they change
        self._buffers, self._num_threads = buffers, num_threads

    @property
    def widest(self) -> int:
        """Rows of the widest pass."""
        return self._buffers.num_slots

    def places(self) -> Collection[int]:
        return {0, *self.kept} if self._num_read is None else {0, self._num_read, *self.kept}

    def begin(self, num_rows: int) -> None:
        if num_rows == self._num_read:
            self.keep()  # a turn begins here, whose tokens may be dropped again
            super().begin(num_rows)
            return
        super().begin(num_rows)
        self._num_read = None
        if num_rows in self.kept:
            self._buffers.load(self.kept[num_rows])
        else:
            assert num_rows == 0, f"no states are kept of {num_rows} tokens"
            self._buffers.clear()
        self._num_read = num_rows

    def commit(self, start: int, rows: Sequence[int]) -> None:
        """Update the states with the accepted ``rows`` of the pass at position ``start``, in the order of the path."""
        self._num_read = None  # whoever interrupts leaves states of no place
        self._buffers.commit(start, rows, self._num_threads)
        self._num_read = start + len(rows)
        if self._num_read - max(self.kept, default=0) >= _APART:
            self.keep()

    def keep(self) -> None:
        """Copy the current states. Beyond ``_MOST`` copies, the one closest behind another is dropped."""
        if self._num_read:
            self.kept.setdefault(self._num_read, self._buffers.save())
        places = sorted(self.kept)
        if len(places) > _MOST:
            gaps = {place: place - before for before, place in zip([0, *places], places[:-1], strict=False)}
            del self.kept[min(gaps, key=gaps.__getitem__)]

    def copy(self) -> KeptStates:
        """All copies, those of the states behind the text too, which later commits leave alone."""
        return KeptStates({**self.kept, self._num_read: self._buffers.save()} if self._num_read else dict(self.kept))

    def restore(self, copies: KeptStates) -> None:
        """Have the text go on from any of ``copies``; ``begin`` says from which."""
        self._num_read = None
        self.kept = dict(copies.kept)
