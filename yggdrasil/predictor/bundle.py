"""What a calibration learned about a pair, in one safetensors file beside the plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from yggdrasil.artifacts import read_tensors, write_tensors
from yggdrasil.errors import ArtifactError
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import EvidenceSizes

KIND, SCHEMA_VERSION, FILE_NAME = "predictor", 2, "predictor.safetensors"


@dataclass(frozen=True, eq=False)
class Learned:
    """Acceptance calibration, depth predictor, and the tables that relate shapes to predicted survival."""

    acceptance: AcceptanceCalibration
    depth: DepthPredictor
    reads: EvidenceSizes  # what the depth predictor's features are made of
    mean_survival: npt.NDArray[np.float32]  # [D] of the reference tree, on the training documents
    ratios: dict[int, npt.NDArray[np.float32]]  # draft width -> [D budget, D level, V verify widths]
    lift: float | None = None  # what drafting adds to guesses that cost no pass; None of an earlier calibration

    def __post_init__(self) -> None:
        if self.reads.total != self.depth.num_features:
            raise ValueError(f"the predictor takes {self.depth.num_features} features, its evidence has {self.reads}")

    def save(self, folder: Path) -> None:
        tables: dict[str, Any] = {f"ratio.{width}": table for width, table in self.ratios.items()}
        arrays = {
            **self.acceptance.to_arrays(),
            **self.depth.to_arrays(),
            "reads": np.array(self.reads, dtype=np.int64),
            "mean_survival": self.mean_survival,
            **tables,
        }
        if self.lift is not None:
            arrays["lift"] = np.array(self.lift)
        write_tensors(folder / FILE_NAME, KIND, SCHEMA_VERSION, arrays)

    @classmethod
    def load(cls, folder: Path) -> "Learned":
        """Read what ``save`` wrote; ArtifactError where it is missing, damaged or incomplete."""
        arrays = read_tensors(folder / FILE_NAME, KIND, SCHEMA_VERSION)
        try:
            lift = float(arrays["lift"]) if "lift" in arrays else None
            ratios = {int(k.partition(".")[2]): v for k, v in arrays.items() if k.startswith("ratio.")}
            return cls(
                AcceptanceCalibration.from_arrays(arrays), DepthPredictor.from_arrays(arrays),
                EvidenceSizes(*arrays["reads"].tolist()), arrays["mean_survival"], ratios, lift,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{folder / FILE_NAME} is not complete ({error}); run `yggdrasil calibrate` again"
            ) from error
