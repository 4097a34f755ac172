"""How far a wide pass is from width-1 decoding on the same tokens, and what tolerance follows from it.

Kernels that sum in another order for another number of rows give logits that differ in their last bits; where two
tokens are nearly equal, that flips a greedy choice. Dims: P positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from yggdrasil.artifacts import parse_dataclass, read_yaml, to_plain, write_yaml

KIND, SCHEMA_VERSION = "parity", 1
_CONTENDERS = 16  # best tokens whose logits are compared: nothing further down can win
_SAFETY = 1.5  # texts that were not probed may differ by more than those that were


@dataclass(frozen=True)
class Mismatch:
    """One position at which a wide pass chooses another token than a width-1 pass."""

    prompt: str
    position: int  # in the generated text
    width: int
    expected: int  # the width-1 choice
    found: int
    expected_margin: float  # logits, in the width-1 pass
    found_margin: float


@dataclass(frozen=True)
class WidthParity:
    """One compiled width against width 1."""

    width: int
    positions: int
    flips: int
    largest_flip_margin: float  # logits; the widest lead that was lost, in either pass
    largest_difference: float  # logits, among the best tokens of a position
    mean_difference: float


@dataclass(frozen=True)
class LayerDivergence:
    """Where the worst position's difference comes from: states after one layer, by the two passes."""

    layer: int
    largest_difference: float
    relative: float  # to the largest state


@dataclass(frozen=True)
class ParityReport:
    """What was measured for one model on one machine."""

    model: str
    dtype: str
    kernels: str  # native or portable
    threads: int
    prompts: int
    widths: list[WidthParity]
    tolerance: float  # logits: a lead above it survives any width
    worst: list[LayerDivergence] = field(default_factory=list)  # empty where all bits are equal
    worst_position: str = ""

    def save(self, folder: Path) -> Path:
        path = _file(folder, self.dtype)
        write_yaml(path, KIND, SCHEMA_VERSION, to_plain(self))
        return path

    @classmethod
    def load(cls, folder: Path, dtype: str) -> "ParityReport":
        """Read what ``save`` wrote; ArtifactError where it is missing or damaged."""
        path = _file(folder, dtype)
        return parse_dataclass(cls, read_yaml(path, KIND, SCHEMA_VERSION), str(path))


def read_tolerance(folder: Path, dtype: str) -> float | None:
    """The tolerance measured for a plan in this dtype; None where there is none."""
    return ParityReport.load(folder, dtype).tolerance if _file(folder, dtype).exists() else None


def _file(folder: Path, dtype: str) -> Path:
    return folder / f"parity-{dtype}.yaml"


def differences(reference: Tensor, found: Tensor) -> Tensor:
    """Largest difference [P] among the best tokens of each position; both inputs [P, V]."""
    reference, found = reference.float(), found.float()
    count = min(_CONTENDERS, reference.shape[1])
    contenders = torch.cat([reference.topk(count).indices, found.topk(count).indices], dim=1)  # [P, 2K]
    return (reference.gather(1, contenders) - found.gather(1, contenders)).abs().amax(1)


def margins(logits: Tensor) -> Tensor:
    """Lead of the best token over the next, [P], of ``logits`` [P, V]."""
    best = logits.float().topk(2).values
    return best[:, 0] - best[:, 1]


def mismatches(prompt: str, width: int, reference: Tensor, found: Tensor) -> list[Mismatch]:
    """Positions whose best tokens differ; ``reference`` and ``found`` [P, V]."""
    expected, chosen = reference.argmax(1), found.argmax(1)
    leads = margins(reference), margins(found)
    return [
        Mismatch(prompt, p, width, int(expected[p]), int(chosen[p]), float(leads[0][p]), float(leads[1][p]))
        for p in torch.nonzero(expected != chosen).flatten().tolist()
    ]


def summarise_width(width: int, apart: Tensor, flips: Sequence[Mismatch]) -> WidthParity:
    """Figures of one width; ``apart`` [P] are its differences at all positions."""
    lost = max((max(flip.expected_margin, flip.found_margin) for flip in flips), default=0.0)
    return WidthParity(width, apart.shape[0], len(flips), lost, float(apart.max()), float(apart.mean()))


def tolerance_of(widths: Sequence[WidthParity]) -> float:
    """A lead that no probed width can turn: both contenders may move, each by the largest difference seen."""
    return 2 * _SAFETY * max((width.largest_difference for width in widths), default=0.0)
