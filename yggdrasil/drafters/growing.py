"""A table that grows with use: counts of what the target said to its user, kept in the user's cache.

They are added to those of the plan, which stay as they were calibrated. No text is kept, but counts of up to four
tokens in a row can tell what was said, so a decoder does this only where it is asked to.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.lock import locked
from yggdrasil.drafters.counted import TABLE_LENGTH
from yggdrasil.drafters.table import SCHEMA_VERSION, Table
from yggdrasil.errors import ArtifactError

EVERY = 16_384  # tokens; so often a running decoder takes up what it has said
MOST_KEPT = 1 << 20  # followers, some 25 MB; beyond them what is rare goes, then all counts are halved: the oldest fade


def grown_file(fingerprint: str, weights: str) -> Path:
    """Where the counts of what this target said are kept."""
    return cache_root() / "tables" / f"{fingerprint}-{weights}-{SCHEMA_VERSION}.safetensors"


class GrowingTable:
    """Counts answers in ``file``; ``use`` is given ``known`` and all that was ever counted there.

    Raises:
        ArtifactError: the file is damaged.
    """

    def __init__(self, file: Path, known: Table, use: Callable[[Table], None]) -> None:
        self._file, self._known, self._use = file, known, use
        self._new: list[tuple[list[int], list[int]]] = []
        self._num_new = 0
        if (grown := self._kept()) is not None:
            use(known.plus(grown).without_rare())

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Queue an answer; once 16,384 tokens wait, write them to the file and hand the grown table to ``use``."""
        if not answer:
            return
        self._new.append((list(prompt[-TABLE_LENGTH:]), list(answer)))
        self._num_new += len(answer)
        if self._num_new >= EVERY and (grown := self.keep()) is not None:
            self._use(self._known.plus(grown).without_rare())

    def keep(self) -> Table | None:
        """Add what is new to the file, and return all of it.

        None where that cannot be done now, as when another process is at it: a warning says so, and it waits for the
        next time.
        """
        if not self._new:
            return None
        try:
            with locked(self._file.with_suffix(".lock"), f"writing {self._file}"):
                new, kept = Table.of(self._new), self._kept()
                grown = new if kept is None else kept.plus(new)
                if len(grown.tokens) > MOST_KEPT:
                    grown = grown.without_rare()
                while len(grown.tokens) > MOST_KEPT:
                    grown = grown.halved()
                grown.save(self._file)
        except (ArtifactError, OSError) as error:
            warnings.warn(f"what was said is not added to the table yet: {error}", stacklevel=2)
            self._num_new = 0  # not again at every answer, which would count all that waits each time
            return None
        self._new, self._num_new = [], 0
        return grown

    def _kept(self) -> Table | None:
        if not self._file.exists():
            return None
        try:
            return Table.load(self._file)
        except ArtifactError as error:
            raise ArtifactError(
                f"{self._file} cannot be read ({error}); remove it, and counting begins anew"
            ) from error
