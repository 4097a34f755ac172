"""Drafters that need nothing but their options."""

from yggdrasil.drafters.lookahead import LookaheadDrafter
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.options import LookaheadOptions, NGramOptions


def without_learning(options: NGramOptions | LookaheadOptions) -> NGramDrafter | LookaheadDrafter:
    """The drafter that ``options`` are of."""
    return NGramDrafter(options) if isinstance(options, NGramOptions) else LookaheadDrafter(options)
