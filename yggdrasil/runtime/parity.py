"""Measures how logits of wide passes differ from width-1 decoding, and derives the tolerance of ``exactness="strict"``.

Kernels may sum in a different order for a different number of rows, so logits differ in their last bits. If two tokens
are nearly tied, the argmax can flip. Dims: P positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from yggdrasil.artifacts import parse_dataclass, read_yaml, to_plain, write_yaml

KIND, SCHEMA_VERSION = "parity", 1
_CONTENDERS = 16  # top-k tokens whose logits are compared; lower ones cannot become the argmax
_SAFETY = 1.5  # margin for texts that were not probed


@dataclass(frozen=True)
class Mismatch:
    """A position at which the argmax of a wide pass differs from that of a width-1 pass."""

    prompt: str
    position: int  # index in the generated text
    width: int
    expected: int  # argmax token of the width-1 pass
    found: int  # argmax token of the wide pass
    expected_margin: float  # difference of the two largest logits in the width-1 pass
    found_margin: float  # difference of the two largest logits in the wide pass


@dataclass(frozen=True)
class WidthParity:
    """Comparison of passes of one width (number of rows) with passes of width 1."""

    width: int
    positions: int  # number of positions compared
    flips: int  # positions with a different argmax
    largest_flip_margin: float  # in logits: the largest margin in either pass at a flipped position; 0 without flips
    largest_difference: float  # in logits: the largest difference at any position among its top tokens
    mean_difference: float  # in logits: the mean over positions of the largest difference among the top tokens


@dataclass(frozen=True)
class LayerDivergence:
    """Difference after a layer between the hidden states of a wide and a width-1 pass, where logits differ most."""

    layer: int
    largest_difference: float
    relative: float  # ``largest_difference`` over the largest absolute hidden state of the width-1 pass


@dataclass(frozen=True)
class ParityReport:
    """Parity measurements of one model on one machine."""

    model: str
    dtype: str
    kernels: str  # native or portable
    threads: int
    prompts: int  # number of prompts
    widths: list[WidthParity]
    tolerance: float  # in logits: an argmax with a larger margin is the same at every width
    worst: list[LayerDivergence] = field(default_factory=list)  # by layer; empty if all logits are bitwise equal
    worst_position: str = ""  # names the text, token and width to which ``worst`` refers

    def save(self, folder: Path) -> Path:
        """Write the parity report as a YAML file to ``folder``, and return the file's path.

        An older report of the same dtype is replaced.

        Raises:
            ArtifactError: the file cannot be written.
        """
        path = _file(folder, self.dtype)
        write_yaml(path, KIND, SCHEMA_VERSION, to_plain(self))
        return path

    @classmethod
    def load(cls, folder: Path, dtype: str) -> "ParityReport":
        """Read the parity report of a dtype ("bfloat16" or "float32") from ``folder``.

        Raises:
            ArtifactError: the report is missing or damaged.
        """
        path = _file(folder, dtype)
        return parse_dataclass(cls, read_yaml(path, KIND, SCHEMA_VERSION), str(path))


def read_tolerance(folder: Path, dtype: str) -> float | None:
    """Return the margin in logits above which an argmax is the same at every width; None without a parity report.

    Args:
        folder: folder with the parity report.
        dtype: "bfloat16" or "float32".

    Raises:
        ArtifactError: the report is damaged.
    """
    return ParityReport.load(folder, dtype).tolerance if _file(folder, dtype).exists() else None


def _file(folder: Path, dtype: str) -> Path:
    return folder / f"parity-{dtype}.yaml"


def differences(reference: Tensor, found: Tensor) -> Tensor:
    """Return the largest absolute difference of two passes' logits at each position, [P], over the likeliest tokens.

    Only tokens that are among the 16 likeliest of the position in either pass are compared.

    Args:
        reference, found: logits [P, V] of the two passes.
    """
    reference, found = reference.float(), found.float()
    count = min(_CONTENDERS, reference.shape[1])
    contenders = torch.cat([reference.topk(count).indices, found.topk(count).indices], dim=1)  # [P, 2K]
    return (reference.gather(1, contenders) - found.gather(1, contenders)).abs().amax(1)


def margins(logits: Tensor) -> Tensor:
    """Return the difference [P] between the two largest of ``logits`` [P, V]."""
    best = logits.float().topk(2).values
    return best[:, 0] - best[:, 1]


def mismatches(prompt: str, width: int, reference: Tensor, found: Tensor) -> list[Mismatch]:
    """Return one ``Mismatch`` for each position whose argmax tokens differ between two kinds of passes, in order.

    Args:
        prompt: the prompt's id.
        width: number of rows of the wide passes.
        reference: logits [P, V] of width-1 passes.
        found: logits [P, V] of the wide passes.
    """
    expected, chosen = reference.argmax(1), found.argmax(1)
    leads = margins(reference), margins(found)
    return [
        Mismatch(prompt, p, width, int(expected[p]), int(chosen[p]), float(leads[0][p]), float(leads[1][p]))
        for p in torch.nonzero(expected != chosen).flatten().tolist()
    ]


def summarise_width(width: int, distances: Tensor, flips: Sequence[Mismatch]) -> WidthParity:
    """Return the summary of the comparison of passes of ``width`` rows with width-1 passes.

    Args:
        distances: [P], the result of ``differences``; P must be at least 1.
        flips: the result of ``mismatches``.
    """
    lost = max((max(flip.expected_margin, flip.found_margin) for flip in flips), default=0.0)
    return WidthParity(width, distances.shape[0], len(flips), lost, float(distances.max()), float(distances.mean()))


def tolerance_of(widths: Sequence[WidthParity]) -> float:
    """Return the margin in logits above which no width flips the argmax: three times the largest difference measured.

    An argmax can flip only if its margin is at most twice the largest difference. The factor 1.5 allows for texts that
    were not measured. The result is 0 if ``widths`` is empty.
    """
    return 2 * _SAFETY * max((width.largest_difference for width in widths), default=0.0)
