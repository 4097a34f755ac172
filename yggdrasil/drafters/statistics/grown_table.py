"""N-gram table that grows with use, from a model's answers to its user.

A decoder writes the counts of its answers to small files. Once these files count ``MERGE_TOKENS`` tokens, a separate
process adds them to all earlier counts and to a base table (of a calibration, or of the shipped text). Running decoders
load the sum between two requests. No text is stored, but counts of up to four consecutive tokens may reveal parts of a
text.

    python -m yggdrasil.drafters.statistics.grown_table FOLDER BASE
"""

import os
import shutil
import sys
import uuid
import warnings
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from yggdrasil.artifacts.lock import locked
from yggdrasil.drafters.statistics.contexts import TABLE_LENGTH
from yggdrasil.drafters.statistics.table import SCHEMA_VERSION, Table
from yggdrasil.drafters.statistics.table_files import NICENESS, start_process, tables_folder
from yggdrasil.errors import ArtifactError

MERGE_TOKENS = 4_096
MOST_KEPT = 1 << 20  # continuations, about 25 MB; if exceeded, rare contexts are dropped, then all counts halved
OWN_WEIGHT = 4  # weight of the answers' counts in the sum: a model repeats its own text more often
_ALL = "all.safetensors"


def answers_folder(fingerprint: str, weights: str) -> Path:
    """Return the folder in the user's cache with the n-gram counts of one model's answers. It may not exist.

    Args:
        fingerprint: fingerprint of the model's checkpoint.
        weights: the model's weight format.
    """
    return tables_folder() / "answers" / f"{fingerprint}-{weights}-{SCHEMA_VERSION}"


def models_with_answers() -> set[str]:
    """Return the fingerprints of the models whose answers have been counted."""
    return {folder.name.partition("-")[0] for folder in (tables_folder() / "answers").glob("*-*")}


def forget_answers(fingerprint: str | None = None) -> int:
    """Delete the n-gram counts of the answers of one model (its ``fingerprint``), or of all models (None).

    Returns the bytes freed.
    """
    size, parent = 0, tables_folder() / "answers"
    for folder in parent.glob("*" if fingerprint is None else f"{fingerprint}-*"):
        size += sum(file.stat().st_size for file in folder.iterdir())
        shutil.rmtree(folder)
    return size


class AnswerCounts:
    """Counter of one model's answers. Counts are written to ``folder``; another process merges them with ``base``."""

    def __init__(self, folder: Path, base: Path) -> None:
        self._folder, self._base = folder, base
        self._new: list[tuple[list[int], list[int]]] = []
        self._num_new = 0
        self._merge_if_many()

    @property
    def merged(self) -> Path:
        """Path of the table that sums the counts and ``base``. It does not exist before the first merge."""
        return _merged_file(self._folder, self._base)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Queue an answer for counting; an empty answer is ignored.

        From 4,096 queued tokens on, ``save`` is called.

        Args:
            prompt: token ids of the prompt.
            answer: token ids generated after the prompt.
        """
        if not answer:
            return
        self._new.append((list(prompt[-TABLE_LENGTH:]), list(answer)))
        self._num_new += len(answer)
        if self._num_new >= MERGE_TOKENS:
            self.save()

    def save(self) -> None:
        """Write the counts of the queued answers, if any, to a file of ``folder``; if that fails, warn and drop them.

        If the files that wait there count at least 4,096 tokens and ``base`` exists, a process is started that merges
        them.
        """
        if not self._new:
            return
        counts, size = Table.of(self._new), self._num_new
        self._new, self._num_new = [], 0
        try:
            counts.save(self._folder / f"new-{size}-{uuid.uuid4().hex}.safetensors")
        except ArtifactError as error:
            warnings.warn(f"answers are not added to the n-gram table: {error}", stacklevel=2)
            return
        self._merge_if_many()

    def _merge_if_many(self) -> None:
        if not self._base.exists():
            return
        with suppress(OSError):
            if self.merged.stat().st_mtime_ns < self._base.stat().st_mtime_ns:  # the model was recalibrated
                self.merged.unlink()
        waiting = sum(map(_num_tokens, self._folder.glob("new-*.safetensors")))
        if waiting >= MERGE_TOKENS or (not self.merged.exists() and (self._folder / _ALL).exists()):
            start_process(__name__, self._folder, self._base)


def merge(folder: Path, base: Path) -> None:
    """Merge the n-gram counts of a model's answers in ``folder``, and write the table that drafting then reads.

    The files ``new-*.safetensors`` are added to the file of all counts so far, and then deleted. The table that is
    written to ``AnswerCounts.merged`` is ``with_answers`` of ``base``, the model's table without answers. Damaged files
    of counts are removed. Without counts nothing is written.

    Raises:
        ArtifactError: ``base`` is not a table, a file cannot be written, or another process holds the lock.
    """
    with locked(folder / "merge.lock", f"merging n-gram counts in {folder}"):
        new = sorted(folder.glob("new-*.safetensors"))
        counts = [table for file in (folder / _ALL, *new) if (table := _read(file)) is not None]
        if not counts:
            return
        answers = counts[0]
        for each in counts[1:]:
            answers = answers.plus(each)
        if len(answers.tokens) > MOST_KEPT:
            answers = answers.without_rare()
        while len(answers.tokens) > MOST_KEPT:
            answers = answers.halved()
        answers.save(folder / _ALL)
        for file in new:
            file.unlink(missing_ok=True)
        with_answers(Table.load(base), answers).save(_merged_file(folder, base))


def with_answers(base: Table, answers: Table) -> Table:
    """Return ``base`` plus four times (``OWN_WEIGHT``) the counts of a model's own answers.

    Three-token contexts whose count in the sum is 1 are left out.
    """
    return base.plus(answers.times(OWN_WEIGHT)).without_rare()


def _merged_file(folder: Path, base: Path) -> Path:
    return folder / f"merged-{sha256(str(base.resolve()).encode()).hexdigest()[:16]}.safetensors"


def _num_tokens(file: Path) -> int:
    digits = file.name.split("-")[1]
    return int(digits) if digits.isdigit() else 0


def _read(file: Path) -> Table | None:
    if not file.exists():
        return None
    try:
        return Table.load(file)
    except ArtifactError:
        file.unlink(missing_ok=True)
        return None


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    with suppress(ArtifactError):
        merge(Path(sys.argv[1]), Path(sys.argv[2]))
