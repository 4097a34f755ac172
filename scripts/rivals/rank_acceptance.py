"""Measures how often the drafter's j-th best token is the target's token, for building static trees."""

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
    """Count for each rank how many of the ``generated`` tokens after ``prompt`` are the draft of that rank, [K] int64.

    ``tree`` is the tree that ``drafter`` writes its candidates to.
    """
    hits = np.zeros(tree.candidates, dtype=np.int64)
    drafter.begin(prompt)
    for token in generated:
        drafter.head()
        hits += tree.pool_tokens[: tree.candidates].cpu().numpy() == token
        drafter.extend([token], {})
    return hits
