"""Load the pair that is to be calibrated."""

from typing import TYPE_CHECKING

import torch

from yggdrasil.engine.build import Assembly, assemble
from yggdrasil.engine.decoder import DTYPES
from yggdrasil.models.loading import load_model
from yggdrasil.models.selfcheck import check_tree_attention

if TYPE_CHECKING:
    from yggdrasil.calibration.settings import PairSource


def build_assembly(source: "PairSource", knots: torch.Tensor | None = None) -> Assembly:
    """Load both models and define their steps."""
    device, dtype = torch.device("cpu"), DTYPES[source.dtype]
    target = load_model(source.target, dtype, device, source.target_threads)
    drafter = load_model(source.drafter, dtype, device, source.drafter_threads)
    for model in (target, drafter):
        check_tree_attention(model)
    return assemble(target, drafter, source.shapes, "inductor", knots=knots)
