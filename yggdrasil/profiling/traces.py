"""Acceptance traces: the trees that a drafter would draft at every position of recorded greedy generations.

A trace has one Equal-Growth Tree per position and draft width W, of D_max levels with exactly W nodes each. Node ``i``
was attached at step ``i // W + 1``, so the tree of a smaller depth budget is a prefix of the nodes, and any policy can
be simulated.

Dims: P positions, H hidden size, R repetition figures, K candidates of the root, F features, N = D_max * W nodes, E
expanded nodes (the root first), C candidates of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from yggdrasil.artifacts.store import read_tensors, write_tensors
from yggdrasil.predictor.features import FeatureSizes, finite_head_features

Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

KIND = "traces"
SCHEMA_VERSION = 5
ROOT = -1

_PER_POSITION = ("hidden", "repetition", "head", "document", "position", "root")
_PER_WIDTH = (
    "scores", "depth", "hit", "edge_log_probability", "parent", "token", "offered_token", "offered_fall",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TraceSet:
    """Recorded draft trees, one row for each position; the rows of a document are contiguous and in text order.

    A node's score is the sum of log-acceptance estimates along its path, so scores fall along every path; -inf marks an
    absent node. A node is a hit if the target generated exactly the tokens on the path from the root to the node.
    """

    hidden: Float32Array  # [P, H] the target's hidden state from which the root's token was chosen
    repetition: Float32Array  # [P, R] repetition figures of the text up to the root's token, included
    head: Float32Array  # [P, K] the drafter's log-probabilities of the root's candidates, -inf for absent ones
    document: npt.NDArray[np.int64]  # [P] number of the document
    position: npt.NDArray[np.int64]  # [P] index of the root's token in the document, prompt included
    root: npt.NDArray[np.int32]  # [P] the root's token id
    scores: dict[int, Float32Array]  # width -> [P, N] log-score
    depth: dict[int, npt.NDArray[np.int8]]  # width -> [P, N] depth in the tree, 1 for children of the root
    hit: dict[int, BoolArray]  # width -> [P, N] whether the node is a hit
    edge_log_probability: dict[int, Float32Array]  # width -> [P, N] drafter's log-probability, given the parent
    parent: dict[int, npt.NDArray[np.int16]]  # width -> [P, N] index of the parent node, -1 if it is the root
    token: dict[int, npt.NDArray[np.int32]]  # width -> [P, N] token ids of the nodes
    # Candidates below the expanded nodes that were not attached; empty for drafters that do not keep candidates.
    offered_token: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)  # width -> [P, E, C] token ids
    # width -> [P, E, C] the candidate's score minus the score of the expanded node
    offered_fall: dict[int, Float32Array] = field(default_factory=dict)

    @property
    def num_positions(self) -> int:
        """P, the number of recorded positions of all documents."""
        return len(self.document)

    @property
    def widths(self) -> tuple[int, ...]:
        """Recorded draft widths (nodes attached per draft step), ascending."""
        return tuple(sorted(self.scores))

    @property
    def max_depth(self) -> int:
        """D_max, the number of draft steps of the recorded trees."""
        width = self.widths[0]
        return int(self.scores[width].shape[1] // width)

    @property
    def has_head(self) -> bool:
        """Whether the drafter's log-probabilities of the root's candidates were recorded (``head``)."""
        return bool(np.isfinite(self.head).any())

    def features(self, sizes: FeatureSizes) -> Float32Array:
        """Return the input of a depth predictor at every recorded position, [P, F] float32.

        Args:
            sizes: sizes of the parts that the predictor reads; 0 leaves a part out.

        Raises:
            ValueError: the traces have parts of other sizes.
        """
        parts = (self.hidden, self.repetition, finite_head_features(self.head))
        for part, size, name in zip(parts, sizes, sizes._fields, strict=True):
            if size not in (0, part.shape[1]):
                raise ValueError(f"the predictor reads {size} numbers of {name}, the traces hold {part.shape[1]}")
        return np.concatenate([part[:, :size] for part, size in zip(parts, sizes, strict=True)], axis=1)

    def document_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the row range (start, stop), stop excluded, of each recorded document, in row order.

        Raises:
            ValueError: the rows of a document are not contiguous, or the positions of a document not consecutive.
        """
        starts = np.flatnonzero(np.diff(self.document, prepend=self.document[:1] - 1))
        if len(starts) != len(np.unique(self.document)):
            raise ValueError("the rows of a document must be contiguous")
        for start, stop in zip(starts, [*starts[1:], self.num_positions], strict=True):
            if (np.diff(self.position[start:stop]) != 1).any():
                raise ValueError(f"document {self.document[start]} skips positions: record each one to simulate")
            yield int(start), int(stop)

    def accepted_length(self, width: int) -> npt.NDArray[np.int64]:
        """Return the accepted length at each position for trees of draft width ``width``, [P] int64.

        The accepted length is the depth of the deepest hit; the bonus token is not counted.
        """
        lengths: npt.NDArray[np.int64] = (self.depth[width] * self.hit[width]).max(axis=1).astype(np.int64)
        return lengths

    def edges(self, width: int) -> tuple[Float32Array, BoolArray]:
        """Return the drafter's log-probability and acceptance of all nodes whose parent was accepted.

        The acceptance calibration is fitted to these pairs.

        Args:
            width: draft width of the trees, one of ``widths``.

        Returns:
            Log-probabilities of the nodes' tokens given their parents, [n] float32, and whether they were accepted, [n]
                bool.
        """
        parent_hit = _gather_parent(self.hit[width], self.parent[width], root_value=True)
        wanted = parent_hit & np.isfinite(self.scores[width])
        return self.edge_log_probability[width][wanted], self.hit[width][wanted]

    def select(self, documents: Sequence[int] | npt.NDArray[np.integer[Any]]) -> TraceSet:
        """Return the traces of the documents with the numbers ``documents``; rows keep the order of this set."""
        rows = np.isin(self.document, np.asarray(documents))
        per_width: dict[str, Any] = {
            name: {width: array[rows] for width, array in getattr(self, name).items()} for name in _PER_WIDTH
        }
        per_position: dict[str, Any] = {name: getattr(self, name)[rows] for name in _PER_POSITION}
        return replace(self, **per_position, **per_width)

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays by name: the field's name, or ``FIELD.WIDTH`` for fields that depend on the draft width."""
        per_width = {f"{name}.{width}": array for name in _PER_WIDTH for width, array in getattr(self, name).items()}
        return {**{name: getattr(self, name) for name in _PER_POSITION}, **per_width}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> TraceSet:
        """Rebuild the traces from arrays named as by ``to_arrays``.

        Raises:
            KeyError: an array is missing.
        """
        per_width: dict[str, Any] = {name: {} for name in _PER_WIDTH}
        for key, array in arrays.items():
            name, _, width = key.partition(".")
            if name in per_width:
                per_width[name][int(width)] = array
        per_position: dict[str, Any] = {name: arrays[name] for name in _PER_POSITION}
        return cls(**per_position, **per_width)

    def save(self, path: Path) -> None:
        """Write the traces to the safetensors file ``path``, with a checksum, replacing an existing file.

        Raises:
            ArtifactError: the file cannot be written.
        """
        write_tensors(path, KIND, SCHEMA_VERSION, self.to_arrays())

    @classmethod
    def load(cls, path: Path) -> TraceSet:
        """Return the traces of a file that ``save`` wrote.

        Raises:
            ArtifactError: the file is missing, damaged or of another kind.
        """
        return cls.from_arrays(read_tensors(path, KIND, SCHEMA_VERSION))


def _gather_parent(
    values: npt.NDArray[Any], parent: npt.NDArray[np.int16], root_value: float | bool
) -> npt.NDArray[Any]:
    """Return the entry of ``values`` [P, N] at each node's parent; ``root_value`` for children of the root."""
    gathered: npt.NDArray[Any] = np.take_along_axis(values, np.maximum(parent, 0).astype(np.int64), axis=1)
    return np.where(parent == ROOT, np.asarray(root_value, dtype=values.dtype), gathered)
