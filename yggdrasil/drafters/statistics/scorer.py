"""N-gram scorer: how likely each counted candidate is to be what the target says next.

A layer of hidden units reads, of every context that could be looked up, how often it was seen, how often the candidate
followed it and which share of the times that is, and the candidate's place among the target's runners-up. One number
for each candidate comes of it, and their softmax, beside a number for what no candidate is, is their probability: so
those of one place know of each other, and together they say how much is known there.

Dims: K contexts, those of the text from one token on and then those of the table; H hidden units; R runners-up.
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
from yggdrasil.drafters.statistics.portable import HIDDEN, NUM_CONTEXTS, RUNNERS_UP
from yggdrasil.errors import ArtifactError

FloatArray: TypeAlias = npt.NDArray[np.float64]

KIND, SCHEMA_VERSION = "scorer", 2
_USUAL = Path(__file__).parents[2] / "assets" / "scorers"
SHAPES = {
    "counts": (NUM_CONTEXTS, 2, HIDDEN),
    "totals": (NUM_CONTEXTS, HIDDEN),
    "recycled": (1 + RUNNERS_UP, HIDDEN),
    "bias": (HIDDEN,),
    "out": (HIDDEN,),
    "nothing": (1,),
}


@dataclass(frozen=True, eq=False)
class NGramScorer:
    """The network's weights.

    A candidate's number is ``out`` · relu(``bias`` + ``recycled[place]`` + a sum over the contexts k that were seen:
    ``totals[k]`` · log(1 + seen) + ``counts[k, 0]`` · log(1 + followed) + ``counts[k, 1]`` · followed / seen), and
    ``nothing`` is that of all other tokens.
    """

    counts: FloatArray  # [K, 2, H]
    totals: FloatArray  # [K, H]
    recycled: FloatArray  # [1 + R, H]; place 0 is none
    bias: FloatArray  # [H]
    out: FloatArray  # [H]
    nothing: FloatArray  # [1]

    @classmethod
    def none(cls) -> NGramScorer:
        """A scorer that gives all candidates of a context, and none of them, the same probability."""
        return cls(**{name: np.zeros(shape) for name, shape in SHAPES.items()})

    @classmethod
    def usual(cls, *, with_table: bool) -> NGramScorer:
        """The scorer fitted to a chat model's answers; serves until a target has text of its own."""
        return cls.load(_USUAL / f"{'table' if with_table else 'text'}.safetensors")

    @classmethod
    def of_shipped_text(cls) -> NGramScorer:
        """The scorer fitted beside the table of shipped text; without a table it scores as ``usual`` does."""
        return cls.load(_USUAL / "shipped-text.safetensors")

    def tensors(self) -> list[Tensor]:
        """The fields in order, float64, as ``Counts`` takes them."""
        return [torch.from_numpy(getattr(self, field.name).copy()) for field in fields(self)]

    def save(self, path: Path) -> None:
        """Write a safetensors artefact; ArtifactError where that fails."""
        write_tensors(path, KIND, SCHEMA_VERSION, {name: getattr(self, name) for name in SHAPES})

    @classmethod
    def load(cls, path: Path) -> NGramScorer:
        """Read what ``save`` wrote; ArtifactError if the file is missing, damaged or something else."""
        arrays = read_tensors(path, KIND, SCHEMA_VERSION)
        if {name: array.shape for name, array in arrays.items()} != SHAPES or not all(
            np.isfinite(array).all() for array in arrays.values()
        ):
            raise ArtifactError(f"{path} does not hold the weights of a scorer; calibrate again")
        return cls(**{name: arrays[name].astype(np.float64) for name in SHAPES})
