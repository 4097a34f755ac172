"""N-gram table: counts of the tokens that follow contexts of one to three tokens, in text of the target.

The file has five packed columns (``artifacts.columns``). Keys are stored as differences, starts as numbers of
continuations. A table of two million tokens takes about 3 MB and loads in about 0.1 s.

Dims: C contexts, F continuations of all contexts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.artifacts.atomic import shown
from yggdrasil.artifacts.columns import column_length, pack_column, unpack_column
from yggdrasil.artifacts.memory import new_region, use_huge_pages
from yggdrasil.artifacts.store import read_tensors, write_tensors
from yggdrasil.drafters.statistics.contexts import (
    BRANCHES,
    MOST_TOKEN,
    TABLE_LENGTH,
    has_one_token,
    is_longest,
    table_key,
)
from yggdrasil.errors import ArtifactError

Integers: TypeAlias = npt.NDArray[np.signedinteger[Any]]
Array: TypeAlias = npt.NDArray[Any]
_CONTEXT = np.dtype([("key", "=i8"), ("total", "=i4"), ("begin", "=i4")])
_CONTINUATION = np.dtype([("token", "=i4"), ("count", "=i4")])

KIND, SCHEMA_VERSION = "table", 3
_COLUMNS = ("key_steps", "totals", "lengths", "tokens", "counts")  # in the file
_ORIGIN = "origin"


@dataclass(frozen=True, eq=False)
class Table:
    """An n-gram table: the most frequent continuations of each context, sorted by count.

    Both arrays are in the layout of the native library (tree/continuations.h), which reads them without a copy.

    Raises:
        ValueError: the arrays do not fit together, or hold invalid tokens or counts.
    """

    contexts: Array  # [C + 1] key, count, index of the first continuation; the last entry only has the index F
    continuations: Array  # [F] token id, count
    origin: str = ""  # description of the counted text; empty for text of the table's own calibration alone

    def __post_init__(self) -> None:
        lengths = np.diff(self.starts)
        if self.starts[0] != 0 or self.starts[-1] != len(self.tokens) or (lengths < 0).any():
            raise ValueError("the parts of a table do not fit together")
        most = np.repeat(self.totals, lengths)
        if (self.totals < 1).any() or (self.counts < 1).any() or (self.counts > most).any() or (self.tokens < 0).any():
            raise ValueError("a table holds tokens or counts that cannot be")

    @classmethod
    def of_columns(
        cls, keys: Integers, totals: Integers, starts: Integers, tokens: Integers, counts: Integers, origin: str = ""
    ) -> Table:
        """Return the table of these columns, which the properties of the same names describe.

        Counts above the largest int32 are reduced to it.

        Raises:
            ValueError: the columns do not fit together, or hold invalid tokens or counts.
        """
        if not len(totals) == len(keys) == len(starts) - 1 or len(tokens) != len(counts):
            raise ValueError("the parts of a table do not fit together")
        contexts, continuations = _allocated(len(starts), _CONTEXT), _allocated(len(tokens), _CONTINUATION)
        largest = np.iinfo(np.int32).max
        contexts["key"][:-1], contexts["total"][:-1], contexts["begin"] = keys, np.minimum(totals, largest), starts
        continuations["token"], continuations["count"] = tokens, np.minimum(counts, largest)
        return cls(contexts, continuations, origin)

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """Keys of the contexts, [C] int64, ascending; see ``table_key``."""
        found: npt.NDArray[np.int64] = self.contexts["key"][:-1]
        return found

    @property
    def totals(self) -> npt.NDArray[np.int32]:
        """Count of each context, [C] int32."""
        found: npt.NDArray[np.int32] = self.contexts["total"][:-1]
        return found

    @property
    def starts(self) -> npt.NDArray[np.int32]:
        """Index of each context's first continuation, [C + 1] int32; the last entry is F."""
        found: npt.NDArray[np.int32] = self.contexts["begin"]
        return found

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Token ids of the continuations, [F] int32."""
        found: npt.NDArray[np.int32] = self.continuations["token"]
        return found

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Counts of the continuations, [F] int32."""
        found: npt.NDArray[np.int32] = self.continuations["count"]
        return found

    @classmethod
    def of(cls, documents: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Table:
        """Count, for each answer token of ``documents``, the contexts of one to three tokens before it.

        Contexts may begin in the prompt, whose own tokens are not counted. The 8 most frequent continuations of a
        context are kept.

        Args:
            documents: pairs (token ids of the prompt, token ids that the target generated).

        Raises:
            ValueError: a token id is above ``MOST_TOKEN`` (about two million).
        """
        keys, tokens = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for prompt, answer in documents:
            text = np.array([*prompt[-TABLE_LENGTH:], *answer], dtype=np.int64)
            if text.max(initial=0) > MOST_TOKEN:
                raise ValueError(f"a table holds tokens up to {MOST_TOKEN}")
            for length in range(1, TABLE_LENGTH + 1):
                positions = np.arange(max(len(text) - len(answer), length), len(text))
                keys.append(table_key([text[positions - back] for back in range(length, 0, -1)]))
                tokens.append(text[positions])
        contexts, rows = np.unique(np.concatenate(keys), return_inverse=True)
        pairs, counts = np.unique(rows << 32 | np.concatenate(tokens), return_counts=True)
        totals = np.bincount(rows, minlength=len(contexts))
        return _ranked(contexts, totals, pairs >> 32, pairs & (1 << 32) - 1, counts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose context was counted, which is about the length of the answers."""
        return int(self.totals[has_one_token(self.keys)].sum())

    def plus(self, other: Table) -> Table:
        """Return a new n-gram table with the counts of this one and ``other`` added, and an empty ``origin``.

        The 8 most frequent continuations of each context are kept. Both tables must have the same tokenizer's ids.
        """
        keys, rows = np.unique(np.concatenate([self.keys, other.keys]), return_inverse=True)
        totals = np.zeros(len(keys), dtype=np.int64)
        np.add.at(totals, rows, np.concatenate([self.totals, other.totals]))
        row = np.repeat(rows, np.concatenate([np.diff(self.starts), np.diff(other.starts)]))
        pairs, positions = np.unique(row << 32 | np.concatenate([self.tokens, other.tokens]), return_inverse=True)
        counts = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(counts, positions, np.concatenate([self.counts, other.counts]))
        return _ranked(keys, totals, pairs >> 32, pairs & (1 << 32) - 1, counts)

    def times(self, factor: int) -> Table:
        """Return a new n-gram table with every count multiplied by ``factor``."""
        totals, counts = (each.astype(np.int64) * factor for each in (self.totals, self.counts))
        return Table.of_columns(self.keys, totals, self.starts, self.tokens, counts, self.origin)

    def halved(self) -> Table:
        """Return a new n-gram table with every count halved and rounded down, and an empty ``origin``.

        Counts of one are dropped.
        """
        row = np.repeat(np.arange(len(self.keys)), np.diff(self.starts))
        known = self.totals >= 2
        kept = (self.counts >= 2) & known[row]
        renamed = np.cumsum(known) - 1
        return _ranked(
            self.keys[known], self.totals[known] // 2, renamed[row[kept]], self.tokens[kept], self.counts[kept] // 2
        )

    def without_rare(self) -> Table:
        """Return a new n-gram table without the three-token contexts seen once, and with an empty ``origin``.

        Most contexts are of this kind, and they predict little.
        """
        known = ~is_longest(self.keys) | (self.totals > 1)
        row = np.repeat(np.arange(len(self.keys)), np.diff(self.starts))
        kept, renamed = known[row], np.cumsum(known) - 1
        return _ranked(self.keys[known], self.totals[known], renamed[row[kept]], self.tokens[kept], self.counts[kept])

    def with_origin(self, origin: str) -> Table:
        """Return the same n-gram table with ``origin`` set, a description of the text that was counted."""
        return replace(self, origin=origin)

    def tensors(self) -> list[Tensor]:
        """Return uint8 tensors that share the memory of the contexts and of the continuations."""
        return [torch.from_numpy(each.view(np.uint8)) for each in (self.contexts, self.continuations)]

    def save(self, path: Path) -> None:
        """Write the n-gram table to the safetensors file ``path``, replacing an existing file.

        Raises:
            ArtifactError: the file cannot be written.
        """
        steps = (np.diff(self.keys, prepend=0), self.totals, np.diff(self.starts), self.tokens, self.counts)
        columns = {name: pack_column(values) for name, values in zip(_COLUMNS, steps, strict=True)}
        origin = np.frombuffer(self.origin.encode(), dtype=np.uint8)
        write_tensors(path, KIND, SCHEMA_VERSION, {**columns, _ORIGIN: origin})

    @classmethod
    def load(cls, path: Path) -> Table:
        """Load an n-gram table from the safetensors file ``path``.

        Raises:
            ArtifactError: the file is missing, damaged or of another kind.
        """
        arrays = read_tensors(path, KIND, SCHEMA_VERSION)
        is_ours = set(arrays) == {*_COLUMNS, _ORIGIN}
        if not is_ours or any(array.ndim != 1 or array.dtype != np.uint8 for array in arrays.values()):
            raise ArtifactError(f"{shown(path)} is not an n-gram table; calibrate again")
        try:
            return cls._unpacked([arrays[name] for name in _COLUMNS], arrays[_ORIGIN].tobytes().decode())
        except (ValueError, IndexError) as error:
            raise ArtifactError(f"{shown(path)} is damaged ({error}); calibrate again") from error

    @classmethod
    def _unpacked(cls, columns: Sequence[npt.NDArray[np.uint8]], origin: str) -> Table:
        """Return the table of the packed ``_COLUMNS``. Only one column at a time is unpacked, to save memory."""
        key_steps, totals, lengths, tokens, counts = columns
        if column_length(tokens) != column_length(counts):
            raise ValueError("the parts of a table do not fit together")
        contexts = _allocated(column_length(totals) + 1, _CONTEXT)
        np.cumsum(unpack_column(key_steps, np.int64), out=contexts["key"][:-1])
        contexts["total"][:-1] = unpack_column(totals, np.int32)
        np.cumsum(unpack_column(lengths, np.int32), out=contexts["begin"][1:], dtype=np.int32)
        continuations = _allocated(column_length(tokens), _CONTINUATION)
        continuations["token"], continuations["count"] = (
            unpack_column(tokens, np.int32),
            unpack_column(counts, np.int32),
        )
        return cls(contexts, continuations, origin)


def _allocated(count: int, dtype: np.dtype[Any]) -> Array:
    """Return ``count`` zeros of ``dtype`` in memory on huge pages, if the system supports them.

    The entries are read in random order between two passes, which takes several times as long on small pages.
    """
    region = new_region(max(count * dtype.itemsize, 1))
    use_huge_pages(region)
    return np.frombuffer(region, dtype, count)


def _ranked(keys: Integers, totals: Integers, row: Integers, tokens: Integers, counts: Integers) -> Table:
    """Build the table in which ``tokens[i]`` followed context ``keys[row[i]]`` ``counts[i]`` times.

    Only the 8 most frequent continuations of each context are kept.
    """
    order = np.lexsort((tokens, -counts, row))
    row = row[order]
    starts = np.searchsorted(row, np.arange(len(keys) + 1))
    kept = np.arange(len(row)) - starts[row] < BRANCHES
    row, order = row[kept], order[kept]
    starts = np.searchsorted(row, np.arange(len(keys) + 1))
    return Table.of_columns(keys, totals, starts, tokens[order], counts[order])
