"""The tables and networks that a calibration fitted for a target and a drafter, in one safetensors file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from yggdrasil.artifacts import read_tensors, write_tensors
from yggdrasil.errors import ArtifactError
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.depth import DepthPredictor
from yggdrasil.predictor.features import FeatureSizes

KIND, SCHEMA_VERSION, FILE_NAME = "predictor", 2, "predictor.safetensors"


@dataclass(frozen=True, eq=False)
class Learned:
    """Acceptance calibration, depth predictor, and tables from which accepted lengths of tree shapes follow."""

    acceptance: AcceptanceCalibration
    depth: DepthPredictor
    reads: FeatureSizes  # sizes of the parts of the depth predictor's input
    mean_survival: npt.NDArray[np.float32]  # [D] P(accepted length >= d) of the unpruned tree of the widest draft width
    # Draft width -> [D depths, D levels, V verify widths], survival of a shape over ``mean_survival`` (``ShapeTable``).
    ratios: dict[int, npt.NDArray[np.float32]]
    # Accepted tokens that a drafted tree adds if no model-free draft is expected to be accepted; None: not fitted.
    added_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.reads.total != self.depth.num_features:
            raise ValueError(f"the predictor takes {self.depth.num_features} features, its inputs have {self.reads}")

    def save(self, folder: Path) -> None:
        """Write the fitted tables and networks to ``predictor.safetensors`` in ``folder``, replacing an existing file.

        Raises:
            ArtifactError: the file cannot be written.
        """
        tables: dict[str, Any] = {f"ratio.{width}": table for width, table in self.ratios.items()}
        arrays = {
            **self.acceptance.to_arrays(),
            **self.depth.to_arrays(),
            "reads": np.array(self.reads, dtype=np.int64),
            "mean_survival": self.mean_survival,
            **tables,
        }
        if self.added_tokens is not None:
            arrays["added_tokens"] = np.array(self.added_tokens)
        write_tensors(folder / FILE_NAME, KIND, SCHEMA_VERSION, arrays)

    @classmethod
    def load(cls, folder: Path) -> "Learned":
        """Load ``predictor.safetensors`` of ``folder``.

        Raises:
            ArtifactError: the file is missing, damaged or incomplete.
        """
        arrays = read_tensors(folder / FILE_NAME, KIND, SCHEMA_VERSION)
        try:
            added_tokens = float(arrays["added_tokens"]) if "added_tokens" in arrays else None
            ratios = {int(k.partition(".")[2]): v for k, v in arrays.items() if k.startswith("ratio.")}
            return cls(
                AcceptanceCalibration.from_arrays(arrays), DepthPredictor.from_arrays(arrays),
                FeatureSizes(*arrays["reads"].tolist()), arrays["mean_survival"], ratios, added_tokens,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{folder / FILE_NAME} is not complete ({error}); run `yggdrasil calibrate` again"
            ) from error
