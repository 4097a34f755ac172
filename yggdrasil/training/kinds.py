"""The recipe of each kind of drafter."""

from torch import Tensor

from yggdrasil.models.loaded import LoadedModel
from yggdrasil.models.source import Source
from yggdrasil.training.draft_model import DraftModelRecipe
from yggdrasil.training.eagle import EagleRecipe
from yggdrasil.training.medusa import MedusaRecipe
from yggdrasil.training.recipe import Recipe
from yggdrasil.training.settings import Kind


def recipe_for(kind: Kind, loaded: LoadedModel, source: Source, vocabulary: Tensor) -> Recipe:
    """How a drafter of ``kind`` that drafts ``vocabulary`` is trained for the target."""
    if kind == "eagle3":
        return EagleRecipe(loaded, vocabulary)
    return MedusaRecipe(loaded, vocabulary) if kind == "medusa" else DraftModelRecipe(loaded, source)
