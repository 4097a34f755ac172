"""Copies of several conversations' KV cache entries in host memory. Copied tokens need no prefill later."""

from collections.abc import Callable, Sequence

import torch

from yggdrasil.artifacts.memory import trim_heap
from yggdrasil.drafters.heads.text_drafter import TextHeadDrafter
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.engine import SingleThreadInference
from yggdrasil.runtime.kept_rows import KeptRows
from yggdrasil.runtime.kept_text import KeptText

_MIN_ROWS = 16  # tokens; a prefill of fewer costs less than a copy


class Conversations:
    """Host-memory LRU cache of the KV entries of earlier texts, limited to ``most_bytes`` bytes; 0 disables it.

    The limit covers the copies and the entries of the present text (the text in the models' caches). If
    ``process_bytes`` returns the memory of the process in bytes, the limit also covers all other memory by which the
    process has grown since this object was created. Only copies can be dropped, so the total may exceed the limit. The
    tokens of a running answer are not counted. No method may be called while a request is decoded. State that a drafter
    stores outside of a model's cache is not copied.
    """

    def __init__(
        self, assembly: Assembly, most_bytes: int, process_bytes: Callable[[], int | None] = lambda: None
    ) -> None:
        self._runners = [each for each in (assembly.target, assembly.drafter) if each is not None]
        self._engine = assembly.engine
        self._most_bytes = most_bytes
        self._kept: list[list[KeptRows]] = []  # per text one entry per runner, target first; oldest text first
        self._num_rows = 0  # tokens of the longest text in the caches since unused slots were released
        self._grown_bytes = 0  # growth of the process, without copies and caches, when last measured
        self._process_bytes = process_bytes
        self._release_slots()  # opening and timing have used many
        trim_heap()
        self._at_start = process_bytes()

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all copied KV entries, without the present text in the models' caches."""
        return sum(map(_size, self._kept))

    @property
    def _cache_bytes(self) -> int:
        """Return the bytes that texts in the models' caches take."""
        return sum(runner.cache.resident_bytes(self._num_rows) for runner in self._runners)

    @property
    def _room(self) -> int:
        """Return the bytes that copies may take: the limit less the present text and other growth, at least 0."""
        return max(self._most_bytes - self._cache_bytes - self._grown_bytes, 0)

    def release_unused(self) -> None:
        """Return unused memory to the system, and drop the oldest copies until the limit is met.

        Unused memory is the cache slots after the present text and the free blocks of the heap.
        """
        self._release_slots()
        trim_heap()
        now = self._process_bytes()
        if now is not None and self._at_start is not None:
            self._grown_bytes = max(now - self._at_start - self.num_bytes - self._cache_bytes, 0)
        self._drop_oldest(self._room)

    def _release_slots(self) -> None:
        for runner in self._runners:
            runner.cache.release_slots_from(runner.text.num_rows)
        self._num_rows = max(runner.text.num_rows for runner in self._runners)

    def _hold(self, num_rows: int, wanted: int) -> None:
        """Make room for a text of ``num_rows`` tokens in the caches and for ``wanted`` more bytes of copies."""
        self._num_rows = max(self._num_rows, num_rows, *(runner.text.num_rows for runner in self._runners))
        if self.num_bytes + wanted > self._room:
            self._release_slots()
            self._num_rows = max(self._num_rows, num_rows)
        self._drop_oldest(max(self._room - wanted, 0))

    def __len__(self) -> int:
        """Return the number of copied texts, the present text in the models' caches excluded."""
        return len(self._kept)

    @torch.inference_mode()
    def switch_to(self, tokens: Sequence[int]) -> None:
        """Prepare the models' caches for a request with the prompt ``tokens``.

        Copy the present text to host memory, then restore the copy that shares the longest prefix with ``tokens``. The
        present text is not copied if fewer than 16 of its tokens would be lost, or if it has been copied. No copy is
        restored that would save fewer than 16 tokens of prefill. With ``most_bytes`` 0 nothing happens.
        """
        if not self._most_bytes:
            return
        text = self._runners[0].text
        held = text.shared(tokens)
        found = max(self._kept, key=lambda kept: kept[0].text.shared(tokens), default=None)
        with SingleThreadInference():
            self._read_states()
            is_left = text.num_kept - held >= _MIN_ROWS and not self._is_kept()
            self._hold(len(tokens), sum(map(KeptRows.bytes_of, self._runners)) if is_left else 0)
            if is_left:
                self._keep(self._copies())
            if found is not None and found[0].text.shared(tokens) - held >= _MIN_ROWS:
                self._restore(found, tokens)

    @torch.inference_mode()
    def copy_ahead(self, is_idle: Callable[[], bool]) -> None:
        """Copy the present text of the models' caches to host memory before another request needs the caches.

        Nothing is copied if another text would have to be dropped for it, if the text has fewer than 16 tokens, or if
        it has been copied.

        Args:
            is_idle: called repeatedly while copying; when it returns False, the copy is abandoned.
        """
        with SingleThreadInference():
            self._read_states()
        text = self._runners[0].text
        others = _size([rows for kept in self._others(text) for rows in kept])
        wanted = sum(map(KeptRows.bytes_of, self._runners))
        if text.num_kept < _MIN_ROWS or wanted + others > self._room or self._is_kept():
            return
        with SingleThreadInference():
            self._keep(self._copies(is_idle))

    def _read_states(self) -> None:
        """Run a draft head on its pending hidden states, because these are not copied."""
        drafter = self._engine.drafter
        if isinstance(drafter, TextHeadDrafter) and drafter.num_waiting:
            drafter.head()

    def _is_kept(self) -> bool:
        """Return whether the newest copy has all tokens of the caches."""
        if not self._kept:
            return False
        pairs = zip(self._kept[-1], (runner.text for runner in self._runners), strict=True)
        return all(kept.text.shared(text.whole) >= text.num_kept for kept, text in pairs)

    def _copies(self, is_wanted: Callable[[], bool] = lambda: True) -> list[KeptRows]:
        """Return copies of the runners' cache rows; an empty list if ``is_wanted`` became False."""
        copies = [KeptRows.of(runner, is_wanted) for runner in self._runners]
        whole = [copy for copy in copies if copy is not None]
        return whole if len(whole) == len(copies) else []

    def _keep(self, saved: list[KeptRows]) -> None:
        """Store ``saved`` as the newest text, and drop its prefixes and the oldest texts above the limit.

        Nothing happens if ``saved`` is empty.
        """
        if saved:
            self._kept = [*self._others(saved[0].text), saved]
            self._drop_oldest(self._room)

    def _drop_oldest(self, most_bytes: int) -> None:
        while self.num_bytes > most_bytes:
            del self._kept[0]

    def _others(self, text: KeptText) -> list[list[KeptRows]]:
        """Return the stored texts that are not prefixes of ``text``."""
        return [kept for kept in self._kept if text.shared(kept[0].text.whole) < kept[0].text.num_rows]

    def _restore(self, found: list[KeptRows], tokens: Sequence[int]) -> None:
        for runner, kept in zip(self._runners, found, strict=True):
            if kept.text.shared(tokens) > runner.text.shared(tokens):
                kept.restore(runner)
        self._kept = [kept for kept in self._kept if kept is not found]
        if found[0].text.num_rows - found[0].text.shared(tokens) >= _MIN_ROWS:  # else all its tokens are in the caches
            self._keep(found)


def _size(kept: list[KeptRows]) -> int:
    return sum(rows.num_bytes for rows in kept)
