"""N-gram scorer: a small network that estimates the probability of each counted candidate as the target's next token.

The inputs of a candidate are, for every known context, the context's count, the candidate's count after this context
and the ratio of both. One hidden layer maps the inputs to a logit. The softmax over the candidates and a constant logit
for all other tokens gives the probabilities.

Dims: K contexts (of the text by ascending length, then of the table); H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.artifacts.store import read_tensors, write_tensors
from yggdrasil.drafters.statistics.contexts import HIDDEN, NUM_CONTEXTS
from yggdrasil.errors import ArtifactError

FloatArray: TypeAlias = npt.NDArray[np.float64]

KIND, SCHEMA_VERSION = "scorer", 2
_USUAL = Path(__file__).parents[2] / "assets" / "scorers"
SHAPES = {
    "counts": (NUM_CONTEXTS, 2, HIDDEN),
    "totals": (NUM_CONTEXTS, HIDDEN),
    "bias": (HIDDEN,),
    "out": (HIDDEN,),
    "nothing": (1,),
}


@dataclass(frozen=True, eq=False)
class NGramScorer:
    """The weights of an n-gram scorer.

    A candidate's logit is ``out`` · relu(``bias`` + a sum over the contexts k that were seen: ``totals[k]`` ·
    log(1 + seen) + ``counts[k, 0]`` · log(1 + followed) + ``counts[k, 1]`` · followed / seen), and ``nothing`` is the
    logit of all other tokens.
    """

    counts: FloatArray  # [K, 2, H]
    totals: FloatArray  # [K, H]
    bias: FloatArray  # [H]
    out: FloatArray  # [H]
    nothing: FloatArray  # [1]

    @classmethod
    def none(cls) -> NGramScorer:
        """Return a scorer with zero weights: each of n candidates, and all other tokens together, get 1 / (n + 1)."""
        return cls(**{name: np.zeros(shape) for name, shape in SHAPES.items()})

    @classmethod
    def default(cls, *, with_table: bool) -> NGramScorer:
        """Load the shipped n-gram scorer, fitted to a chat model's answers, for targets without a calibration.

        Args:
            with_table: load the scorer for n-gram counts of the text and of a table; False: of the text alone.
        """
        return cls.load(_USUAL / f"{'table' if with_table else 'text'}.safetensors")

    @classmethod
    def of_shipped_text(cls) -> NGramScorer:
        """Load the shipped n-gram scorer for use with the table of the shipped text.

        Until that table exists, this scorer gives the same scores as the default scorer without a table.
        """
        return cls.load(_USUAL / "shipped-text.safetensors")

    def tensors(self) -> list[Tensor]:
        """Return copies of the weights as float64 tensors, in field order: counts, totals, bias, out, nothing."""
        return [torch.from_numpy(getattr(self, field.name).copy()) for field in fields(self)]

    def save(self, path: Path) -> None:
        """Write the weights to the safetensors file ``path``, replacing an existing file.

        Raises:
            ArtifactError: the file cannot be written.
        """
        write_tensors(path, KIND, SCHEMA_VERSION, {name: getattr(self, name) for name in SHAPES})

    @classmethod
    def load(cls, path: Path) -> NGramScorer:
        """Load an n-gram scorer from the safetensors file ``path``.

        Raises:
            ArtifactError: the file is missing, damaged or of another kind.
        """
        arrays = read_tensors(path, KIND, SCHEMA_VERSION)
        if "recycled" in arrays and "bias" in arrays:  # an earlier version's weights by rank; the first is for no rank
            arrays["bias"] = arrays["bias"] + arrays.pop("recycled")[0]
        if {name: array.shape for name, array in arrays.items()} != SHAPES or not all(
            np.isfinite(array).all() for array in arrays.values()
        ):
            raise ArtifactError(f"{path} does not hold the weights of a scorer; calibrate again")
        return cls(**{name: arrays[name].astype(np.float64) for name in SHAPES})
