"""How often the drafter's j-th likeliest token is the target's: what a static tree is built from."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from yggdrasil.drafters.draft_model import DraftModel
from yggdrasil.tree.token_tree import TokenTree


@torch.inference_mode()
def rank_hits(
    drafter: DraftModel, tree: TokenTree, prompt: Sequence[int], generated: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Count at each generated position which candidate was right, [K]; the rest of ``len(generated)`` was none."""
    hits = np.zeros(tree.candidates, dtype=np.int64)
    drafter.begin(prompt)
    for token in generated:
        drafter.head()
        hits += tree.pool_tokens[: tree.candidates].cpu().numpy() == token
        drafter.extend([token], {})
    return hits
