"""Copies of a text's recurrent states at several positions, from which texts with the same prefix can continue."""

from collections.abc import Collection, Sequence

from yggdrasil.runtime.states.buffers import SavedState, StateBuffers

_APART = 16  # minimum number of tokens between two copies
_MOST = 4  # maximum number of copies, in addition to the current states
NUM_STATES = 1 + _MOST


class KeptStates:
    """Copies of a text's recurrent states, by the number of tokens after which each was made."""

    def __init__(self, kept: dict[int, SavedState]) -> None:
        self.kept = kept

    def resume_points(self) -> Collection[int]:
        """Return the numbers of tokens after which a text can continue: 0, and the number of tokens of every copy."""
        return {0, *self.kept}

    def begin(self, num_rows: int) -> None:
        """Drop the copies made after more than ``num_rows`` tokens; ``num_rows`` must be one of ``resume_points``."""
        self.kept = {place: saved for place, saved in self.kept.items() if place <= num_rows}

    def forget(self) -> None:
        """Drop all copies of states."""
        self.kept = {}

    @property
    def num_bytes(self) -> int:
        """Size of all copies of states in bytes."""
        return sum(tensor.nbytes for saved in self.kept.values() for tensor in saved)


class TextStates(KeptStates):
    """The recurrent states after the text in a cache, and copies of them at earlier positions."""

    def __init__(self, buffers: StateBuffers, num_threads: int) -> None:
        super().__init__({})
        self._num_read: int | None = 0  # tokens that the states include; None while they are being updated
        self._buffers, self._num_threads = buffers, num_threads

    @property
    def widest(self) -> int:
        """The largest number of rows of a pass for which the state buffers have room."""
        return self._buffers.num_slots

    def resume_points(self) -> Collection[int]:
        """Return the numbers of tokens after which the text can continue without running earlier tokens again.

        They are 0, the number of tokens of every copy, and the current number, unless an update was interrupted.
        """
        return {0, *self.kept} if self._num_read is None else {0, self._num_read, *self.kept}

    def begin(self, num_rows: int) -> None:
        """Set the recurrent states to those after the first ``num_rows`` tokens, and drop copies after more tokens.

        ``num_rows`` must be one of ``resume_points``. If it is the current number, the current states are copied.
        """
        if num_rows == self._num_read:
            self.keep()  # a request begins here, and its tokens may be dropped later
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
        """Apply the updates of the last pass's accepted ``rows`` to the recurrent states.

        Args:
            start: number of committed tokens before the pass.
            rows: row indices of the pass along a path of the tree, the root's first.
        """
        self.mark_updating()
        self._buffers.commit(start, rows, self._num_threads)
        self.mark_updated(start + len(rows))

    def mark_updating(self) -> None:
        """Mark the states as being updated. If the update is interrupted, they stay invalid and are not reused."""
        self._num_read = None

    def mark_updated(self, num_rows: int) -> None:
        """Mark the states as those after ``num_rows`` tokens; copy them if the last copy is 16 or more tokens back."""
        self._num_read = num_rows
        if self._num_read - max(self.kept, default=0) >= _APART:
            self.keep()

    def keep(self) -> None:
        """Copy the current recurrent states, so that the text can resume after the current number of tokens.

        Nothing is copied for an empty text or after an interrupted update. If there are more than 4 copies, the one
        nearest to its predecessor, in tokens, is dropped, but never the newest.
        """
        if self._num_read:
            self.kept.setdefault(self._num_read, self._buffers.save())
        places = sorted(self.kept)
        if len(places) > _MOST:
            gaps = {place: place - before for before, place in zip([0, *places], places[:-1], strict=False)}
            del self.kept[min(gaps, key=gaps.__getitem__)]

    def forget(self) -> None:
        """Reset the states to those of an empty text and drop all copies, whatever passes have written."""
        self.kept, self._num_read = {}, None
        self.begin(0)

    def copy(self) -> KeptStates:
        """Return all copies of the recurrent states, including a new copy of the current states.

        Later passes do not change the result.
        """
        return KeptStates({**self.kept, self._num_read: self._buffers.save()} if self._num_read else dict(self.kept))

    def restore(self, copies: KeptStates) -> None:
        """Replace the copies of states by ``copies``; the caller must then call ``begin``, which loads one of them."""
        self._num_read = None
        self.kept = dict(copies.kept)
