"""Keeps the KV caches of several conversations in host memory, so that each continues without a new prefill."""

from collections.abc import Callable, Sequence

import torch

from yggdrasil.drafters.heads.text_drafter import TextHeadDrafter
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.engine import SingleThreadInference
from yggdrasil.runtime.kept_rows import KeptRows
from yggdrasil.runtime.kept_text import KeptText

_MIN_ROWS = 16  # rows below which a prefill costs less than a copy


class Conversations:
    """Copies of the cache rows of earlier texts, ``most_bytes`` at most; the least recently used one is dropped first.

    Nothing may be decoding when it is asked. A drafter that keeps states of its own, of no model's cache, has those of
    the last text alone.
    """

    def __init__(self, assembly: Assembly, most_bytes: int) -> None:
        self._runners = [each for each in (assembly.target, assembly.drafter) if each is not None]
        self._engine = assembly.engine
        self._most_bytes = most_bytes
        self._kept: list[list[KeptRows]] = []  # of each text one per runner, the target's first; the newest text last

    @property
    def num_bytes(self) -> int:
        """Memory that the copies take, in bytes."""
        return sum(map(_size, self._kept))

    def __len__(self) -> int:
        """Texts that are kept, beside the one that the caches hold."""
        return len(self._kept)

    @torch.inference_mode()
    def turn_to(self, tokens: Sequence[int]) -> None:
        """Have the caches hold the longest beginning of ``tokens`` that is known; what they lose by it is kept."""
        if not self._most_bytes:
            return
        text = self._runners[0].text
        held = text.shared(tokens)
        found = max(self._kept, key=lambda kept: kept[0].text.shared(tokens), default=None)
        with SingleThreadInference():
            self._read_states()
            if text.num_kept - held >= _MIN_ROWS and not self._is_kept():
                self._keep(self._copies())
            if found is not None and found[0].text.shared(tokens) - held >= _MIN_ROWS:
                self._restore(found, tokens)

    @torch.inference_mode()
    def keep_ahead(self, is_idle: Callable[[], bool]) -> None:
        """Copy what the caches hold before another text comes, if there is room beside the others and time."""
        with SingleThreadInference():
            self._read_states()
        text = self._runners[0].text
        others = _size([rows for kept in self._others(text) for rows in kept])
        wanted = sum(map(KeptRows.bytes_of, self._runners))
        if text.num_kept < _MIN_ROWS or wanted + others > self._most_bytes or self._is_kept():
            return
        with SingleThreadInference():
            self._keep(self._copies(is_idle))

    def _read_states(self) -> None:
        """Have a head read the states that wait for it: a copy holds rows, and no states."""
        drafter = self._engine.drafter
        if isinstance(drafter, TextHeadDrafter) and drafter.num_waiting:
            drafter.head()

    def _is_kept(self) -> bool:
        """Whether all that the caches hold has its copy as the newest."""
        if not self._kept:
            return False
        pairs = zip(self._kept[-1], (runner.text for runner in self._runners), strict=True)
        return all(kept.text.shared(text.whole) >= text.num_kept for kept, text in pairs)

    def _copies(self, is_wanted: Callable[[], bool] = lambda: True) -> list[KeptRows]:
        """Copies of what the caches hold; none where they ceased to be wanted."""
        copies = [KeptRows.of(runner, is_wanted) for runner in self._runners]
        whole = [copy for copy in copies if copy is not None]
        return whole if len(whole) == len(copies) else []

    def _keep(self, saved: list[KeptRows]) -> None:
        """Keep another text as the newest; those that it only prolongs, and those there is no room for, are dropped."""
        if not saved or _size(saved) > self._most_bytes:
            return
        self._kept = [*self._others(saved[0].text), saved]
        while self.num_bytes > self._most_bytes:
            del self._kept[0]

    def _others(self, text: KeptText) -> list[list[KeptRows]]:
        """What is kept of texts that ``text`` does not only prolong."""
        return [kept for kept in self._kept if text.shared(kept[0].text.whole) < kept[0].text.num_rows]

    def _restore(self, found: list[KeptRows], tokens: Sequence[int]) -> None:
        for runner, kept in zip(self._runners, found, strict=True):
            if kept.text.shared(tokens) > runner.text.shared(tokens):
                kept.restore(runner)
        self._kept = [kept for kept in self._kept if kept is not found]
        if found[0].text.num_rows - found[0].text.shared(tokens) >= _MIN_ROWS:  # else the caches go on with all
            self._keep(found)


def _size(kept: list[KeptRows]) -> int:
    return sum(rows.num_bytes for rows in kept)
