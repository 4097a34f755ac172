"""The last few texts of a decoder that serves several conversations in turns: each goes on where it was left."""

from collections.abc import Sequence

import torch

from yggdrasil.engine.build import Assembly
from yggdrasil.engine.engine import OwnThreads
from yggdrasil.models.kept_rows import KeptRows

_WORTH_KEEPING = 16  # rows: the smallest pass reads as many, and it costs more than the copies


class Conversations:
    """Copies of what the caches held of earlier texts, ``most_bytes`` at most; the one not used for longest goes first.

    Nothing may be decoding when it is asked. A drafter that keeps states of its own, of no model's cache, has those of
    the last text alone.
    """

    def __init__(self, assembly: Assembly, most_bytes: int) -> None:
        self._runners = [each for each in (assembly.target, assembly.drafter) if each is not None]
        self._most_bytes = most_bytes
        self._kept: list[list[KeptRows]] = []  # of each text one per runner, the target's first; the newest text last

    @property
    def num_bytes(self) -> int:
        """What the copies take."""
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
        with OwnThreads():
            if text.shared(text.tokens) - held >= _WORTH_KEEPING:
                self._keep([KeptRows.of(runner) for runner in self._runners])
            if found is not None and found[0].text.shared(tokens) - held >= _WORTH_KEEPING:
                self._restore(found, tokens)

    def _keep(self, saved: list[KeptRows]) -> None:
        """Keep another text as the newest; those that it only prolongs, and those there is no room for, are dropped."""
        if _size(saved) > self._most_bytes:
            return
        text = saved[0].text
        self._kept = [kept for kept in self._kept if text.shared(kept[0].text.tokens) < kept[0].text.num_rows]
        self._kept.append(saved)
        while self.num_bytes > self._most_bytes:
            del self._kept[0]

    def _restore(self, found: list[KeptRows], tokens: Sequence[int]) -> None:
        for runner, kept in zip(self._runners, found, strict=True):
            if kept.text.shared(tokens) > runner.text.shared(tokens):
                kept.restore(runner)
        self._kept = [kept for kept in self._kept if kept is not found]
        if found[0].text.num_rows - found[0].text.shared(tokens) >= _WORTH_KEEPING:  # else the caches go on with all
            self._keep(found)


def _size(kept: list[KeptRows]) -> int:
    return sum(rows.num_bytes for rows in kept)
