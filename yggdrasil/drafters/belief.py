"""Belief: what a piece of counted evidence is worth, as the probability that the target says so too.

Log-odds add up: one weight for the kind of evidence that the text gives, one for the table's, one for the place among
the target's runners-up, and one for the place among the candidates. A candidate that several offer is one candidate,
with a probability that is right for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from yggdrasil.artifacts.store import read_tensors, write_tensors
from yggdrasil.drafters.counted import RANKS, RUNNERS_UP, TABLE_LENGTH, num_kinds
from yggdrasil.errors import ArtifactError

FloatArray: TypeAlias = npt.NDArray[np.float64]

KIND, SCHEMA_VERSION = "belief", 1
_USUAL = Path(__file__).parent.parent / "assets" / "beliefs"
LONGEST = 6  # tokens of the longest context of the text
_SIZES = {"text": num_kinds(LONGEST), "table": num_kinds(TABLE_LENGTH), "recycled": 1 + RUNNERS_UP, "rank": RANKS}


@dataclass(frozen=True, eq=False)
class Belief:
    """Weights by kind of evidence, as ``evidence_kind`` numbers them; kind 0 is none."""

    text: FloatArray  # [num_kinds(LONGEST)]
    table: FloatArray  # [num_kinds(TABLE_LENGTH)]
    recycled: FloatArray  # [1 + RUNNERS_UP]
    rank: FloatArray  # [RANKS]; the last serves all places from there on

    @classmethod
    def none(cls) -> Belief:
        """All evidence is worth the same: for those who only ask what evidence there is."""
        return cls(*(np.zeros(size) for size in _SIZES.values()))

    @classmethod
    def usual(cls, *, with_table: bool) -> Belief:
        """What evidence was worth on a chat model's answers; serves until a target's own text says more."""
        return cls.load(_USUAL / f"{'table' if with_table else 'text'}.safetensors")

    @classmethod
    def fit(cls, kinds: npt.NDArray[np.int64], is_right: npt.NDArray[np.bool_]) -> Belief:
        """From candidates: ``kinds`` [n, 4] of evidence and the place, and whether each is what came next.

        A kind that was hardly ever seen stays near what the others say (ridge regression).
        """
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import OneHotEncoder

        sizes = list(_SIZES.values())
        kinds = np.minimum(kinds, np.array(sizes) - 1)
        if is_right.all() or not is_right.any():
            raise ValueError("candidates of one outcome only teach nothing")
        features = OneHotEncoder(categories=[np.arange(size) for size in sizes]).fit_transform(kinds)
        model = LogisticRegression(max_iter=500).fit(features, is_right)
        weights = model.coef_[0].astype(np.float64)
        text, table, recycled, rank = np.split(weights, np.cumsum(sizes)[:-1])
        return cls(text, table, recycled, rank + model.intercept_[0])

    def save(self, path: Path) -> None:
        """Write a safetensors artefact; ArtifactError where that fails."""
        write_tensors(path, KIND, SCHEMA_VERSION, {name: getattr(self, name) for name in _SIZES})

    @classmethod
    def load(cls, path: Path) -> Belief:
        """Read what ``save`` wrote; ArtifactError if the file is missing, damaged or something else."""
        nothing = {"recycled": np.zeros(1 + RUNNERS_UP)}  # older files know of no runners-up
        arrays = nothing | read_tensors(path, KIND, SCHEMA_VERSION)
        if {name: array.size for name, array in arrays.items()} != _SIZES or not all(
            np.isfinite(array).all() for array in arrays.values()
        ):
            raise ArtifactError(f"{path} does not hold the weights of a belief; calibrate again")
        return cls(*(arrays[name].astype(np.float64) for name in _SIZES))
