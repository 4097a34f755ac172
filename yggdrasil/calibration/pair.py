"""Load the pair that is to be calibrated."""

from typing import TYPE_CHECKING

import torch

from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.options import NGramOptions
from yggdrasil.engine.build import Assembly, assemble, default_backend, open_device
from yggdrasil.engine.decoder import DTYPES
from yggdrasil.models.compiled import Backend
from yggdrasil.models.loading import load_model
from yggdrasil.models.selfcheck import check_tree_attention
from yggdrasil.scheduling.plan import Shapes

if TYPE_CHECKING:
    from yggdrasil.calibration.settings import PairSource


def build_assembly(source: "PairSource", knots: torch.Tensor | None = None, backend: Backend | None = None) -> Assembly:
    """Load the target and its drafter, and define their steps."""
    device, dtype = open_device(source.device), DTYPES[source.dtype]
    backend = backend or default_backend(device)
    target = load_model(source.target, dtype, device, source.target_threads, weights=source.weights)
    check_tree_attention(target)
    if isinstance(source.drafter, NGramOptions):
        return assemble(target, NGramDrafter(source.drafter), source.shapes, backend)
    drafter = load_model(source.drafter, dtype, device, source.drafter_threads)
    check_tree_attention(drafter)
    return assemble(target, drafter, source.shapes, backend, knots=knots, other_stages=source.schedules)


def sibling(assembly: Assembly, shapes: Shapes | None = None, backend: Backend | None = None) -> Assembly:
    """The same models, one copy of their weights, behind caches and a tree of their own: other shapes or backend."""
    drafter = assembly.drafter.loaded if assembly.drafter is not None else assembly.engine.drafter
    return assemble(assembly.target.loaded, drafter, shapes or assembly.shapes, backend or assembly.target.backend)
