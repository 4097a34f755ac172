"""The token tree of an iteration as a stream shows it."""

from typing import Any

from yggdrasil.engine.trace import SeenTree
from yggdrasil.serving.texts import Texts


def shown_tree(texts: Texts, tree: SeenTree) -> dict[str, Any]:
    """Nodes with their texts; node 0 is the root."""
    return {
        "drafter": tree.drafter,
        "drafted": tree.drafted,
        "tokens": [texts.token_text(token) for token in tree.tokens],
        "parents": tree.parents,
        "verified": tree.verified,
        "accepted": tree.accepted,
        "bonus": texts.token_text(tree.bonus),
    }
