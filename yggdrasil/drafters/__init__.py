"""Drafters: whoever grows a token tree from what is certain so far. ``Drafter`` is the whole seam."""

from yggdrasil.drafters.draft_model import DraftModel
from yggdrasil.drafters.joint import JointDrafter
from yggdrasil.drafters.ngram import NGramDrafter, NGramOptions
from yggdrasil.drafters.protocol import Drafter

__all__ = ["DraftModel", "Drafter", "JointDrafter", "NGramDrafter", "NGramOptions"]
