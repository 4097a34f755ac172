"""Maps each kind of drafter to its training recipe."""

from torch import Tensor

from yggdrasil.checkpoints.source import Source
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.training.draft_model import DraftModelRecipe
from yggdrasil.training.eagle import EagleRecipe
from yggdrasil.training.medusa import MedusaRecipe
from yggdrasil.training.recipe import Recipe
from yggdrasil.training.settings import Kind


def recipe_for(kind: Kind, loaded: LoadedModel, source: Source, vocabulary: Tensor) -> Recipe:
    """Return the training recipe of a drafter of ``kind`` with the draft vocabulary ``vocabulary`` [Vd]."""
    if kind == "draft-model":
        return DraftModelRecipe(loaded, source)
    return MedusaRecipe(loaded, vocabulary) if kind == "medusa" else EagleRecipe(loaded, vocabulary)
