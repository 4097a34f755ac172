"""The recipe of each kind of drafter."""

from collections.abc import Callable

from torch import Tensor

from yggdrasil.checkpoints.source import Source
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.training.draft_model import DraftModelRecipe
from yggdrasil.training.eagle import EagleRecipe
from yggdrasil.training.medusa import MedusaRecipe
from yggdrasil.training.recipe import Recipe
from yggdrasil.training.settings import Kind
from yggdrasil.training.states import FirstEagleRecipe, MtpRecipe


def recipe_for(kind: Kind, loaded: LoadedModel, source: Source, vocabulary: Tensor) -> Recipe:
    """How a drafter of ``kind`` that learns to tell ``vocabulary`` apart is trained for the target."""
    if kind == "draft-model":
        return DraftModelRecipe(loaded, source)
    recipes: dict[str, Callable[[LoadedModel, Tensor], Recipe]] = {
        "eagle3": EagleRecipe, "eagle": FirstEagleRecipe, "mtp": MtpRecipe, "medusa": MedusaRecipe,
    }  # fmt: skip
    return recipes[kind](loaded, vocabulary)
