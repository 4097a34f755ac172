"""A table of what follows one to three tokens in a target's own text, kept as an artefact of a few MB.

Dims: C contexts, F followers of all contexts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.artifacts.store import read_tensors, write_tensors
from yggdrasil.drafters.best_first import BRANCHES
from yggdrasil.drafters.counted import MOST_TOKEN, TABLE_LENGTH, has_one_token, is_longest, table_key
from yggdrasil.errors import ArtifactError

IntArray: TypeAlias = npt.NDArray[np.int64]

KIND, SCHEMA_VERSION = "table", 2
_FIELDS = ("keys", "totals", "starts", "tokens", "counts")


@dataclass(frozen=True, eq=False)
class Table:
    """Counted followers of contexts; of each context the most frequent, best first."""

    keys: IntArray  # [C] contexts, ascending; see ``table_key``
    totals: IntArray  # [C] how often each was seen
    starts: IntArray  # [C + 1] where its followers begin
    tokens: IntArray  # [F]
    counts: IntArray  # [F]

    def __post_init__(self) -> None:
        sizes_fit = len(self.totals) == len(self.keys) == len(self.starts) - 1 and len(self.tokens) == len(self.counts)
        if (
            not sizes_fit
            or self.starts[0] != 0
            or self.starts[-1] != len(self.tokens)
            or (np.diff(self.starts) < 0).any()
        ):
            raise ValueError("the parts of a table do not fit together")
        most = np.repeat(self.totals, np.diff(self.starts))
        if (self.totals < 1).any() or (self.counts < 1).any() or (self.counts > most).any() or (self.tokens < 0).any():
            raise ValueError("a table holds tokens or counts that cannot be")

    @classmethod
    def of(cls, documents: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Table:
        """Count the answers of ``documents``, pairs of what came before (prompt) and the target's own tokens.

        Raises:
            ValueError: a token that no context could hold, of two million or more.
        """
        keys, tokens = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for prompt, answer in documents:
            text = np.array([*prompt[-TABLE_LENGTH:], *answer], dtype=np.int64)
            if text.max(initial=0) > MOST_TOKEN:
                raise ValueError(f"a table holds tokens up to {MOST_TOKEN}")
            for length in range(1, TABLE_LENGTH + 1):
                places = np.arange(max(len(text) - len(answer), length), len(text))
                keys.append(table_key([text[places - back] for back in range(length, 0, -1)]))
                tokens.append(text[places])
        contexts, rows = np.unique(np.concatenate(keys), return_inverse=True)
        pairs, counts = np.unique(rows << 32 | np.concatenate(tokens), return_counts=True)
        totals = np.bincount(rows, minlength=len(contexts))
        return _ranked(contexts, totals, pairs >> 32, pairs & (1 << 32) - 1, counts)

    @property
    def num_tokens(self) -> int:
        """How many tokens were counted."""
        return int(self.totals[has_one_token(self.keys)].sum())

    def plus(self, other: Table) -> Table:
        """What both have counted; of each context the followers that are most frequent in both together."""
        return self._with(other, 1)

    def minus(self, other: Table) -> Table:
        """What is left without the text that ``other`` has counted, as far as it was counted here."""
        return self._with(other, -1)

    def _with(self, other: Table, times: int) -> Table:
        keys, rows = np.unique(np.concatenate([self.keys, other.keys]), return_inverse=True)
        totals = np.zeros(len(keys), dtype=np.int64)
        np.add.at(totals, rows, np.concatenate([self.totals, times * other.totals]))
        row = np.repeat(rows, np.concatenate([np.diff(self.starts), np.diff(other.starts)]))
        both, places = np.unique(row << 32 | np.concatenate([self.tokens, other.tokens]), return_inverse=True)
        counts = np.zeros(len(both), dtype=np.int64)
        np.add.at(counts, places, np.concatenate([self.counts, times * other.counts]))
        known = totals > 0
        counts = np.minimum(counts, totals[both >> 32])  # of what is taken away not every follower was kept
        left = counts > 0
        renamed = np.cumsum(known) - 1
        return _ranked(keys[known], totals[known], renamed[both[left] >> 32], both[left] & (1 << 32) - 1, counts[left])

    def halved(self) -> Table:
        """Every count halved; what was seen once is forgotten."""
        row = np.repeat(np.arange(len(self.keys)), np.diff(self.starts))
        known = self.totals >= 2
        kept = (self.counts >= 2) & known[row]
        renamed = np.cumsum(known) - 1
        return _ranked(
            self.keys[known], self.totals[known] // 2, renamed[row[kept]], self.tokens[kept], self.counts[kept] // 2
        )

    def without_rare(self) -> Table:
        """Without the longest contexts that were seen once: they are more than all others, and tell next to nothing."""
        known = ~is_longest(self.keys) | (self.totals > 1)
        row = np.repeat(np.arange(len(self.keys)), np.diff(self.starts))
        kept, renamed = known[row], np.cumsum(known) - 1
        return _ranked(self.keys[known], self.totals[known], renamed[row[kept]], self.tokens[kept], self.counts[kept])

    def tensors(self) -> list[Tensor]:
        """The fields in order, as ``Counts.set_table`` takes them."""
        return [torch.from_numpy(getattr(self, name)) for name in _FIELDS]

    def save(self, path: Path) -> None:
        """Write a safetensors artefact; ArtifactError where that fails."""
        narrow = {name: getattr(self, name).astype(np.int32) for name in _FIELDS[1:]}
        write_tensors(path, KIND, SCHEMA_VERSION, {"keys": self.keys, **narrow})

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read what ``save`` wrote; ArtifactError if the file is missing, damaged or something else."""
        arrays = read_tensors(path, KIND, SCHEMA_VERSION)
        if set(arrays) != set(_FIELDS) or any(array.ndim != 1 or array.dtype.kind != "i" for array in arrays.values()):
            raise ArtifactError(f"{path} is not a table; calibrate again")
        try:
            return cls(**{name: arrays[name].astype(np.int64) for name in _FIELDS})
        except (ValueError, IndexError) as error:
            raise ArtifactError(f"{path} is damaged ({error}); calibrate again") from error


def _ranked(keys: IntArray, totals: IntArray, row: IntArray, tokens: IntArray, counts: IntArray) -> Table:
    """The table in which ``tokens[i]`` followed context ``keys[row[i]]`` ``counts[i]`` times."""
    order = np.lexsort((tokens, -counts, row))
    row = row[order]
    starts = np.searchsorted(row, np.arange(len(keys) + 1))
    kept = np.arange(len(row)) - starts[row] < BRANCHES
    row, order = row[kept], order[kept]
    return Table(keys, totals, np.searchsorted(row, np.arange(len(keys) + 1)), tokens[order], counts[order])
