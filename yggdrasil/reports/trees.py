"""Records example trees: iterations of real requests with their drafted, verified and accepted nodes."""

import math
from collections.abc import Sequence

import pandas as pd

from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.trace import IterationTree
from yggdrasil.reports.facts import TREE_COLUMNS


def record_trees(
    decoder: Decoder, prompts: Sequence[str | Sequence[int]], each: int = 2, max_new_tokens: int = 32
) -> pd.DataFrame:
    """Decode prompts and return the ``each`` trees per prompt with most accepted tokens, one row per node.

    The columns are ``TREE_COLUMNS``. Rows are sorted by prompt, iteration and node. The role of a node is "root",
    "accepted", "verified" (but rejected by the target) or "drafted" (but pruned before verification). Plain steps are
    left out.

    Args:
        prompts: texts or token ids.
        max_new_tokens: tokens to decode per prompt.
    """
    rows: list[tuple[object, ...]] = []
    for number, prompt in enumerate(prompts):
        watched: list[IterationTree] = []
        decoder.generate(prompt, max_new_tokens=max_new_tokens, watch=watched.append)
        trees = [tree for tree in watched if len(tree.tokens) > 1]
        order = sorted(range(len(trees)), key=lambda i: -len(trees[i].accepted))
        for iteration in sorted(order[:each]):
            rows += _rows(decoder, number, iteration, trees[iteration])
    return pd.DataFrame(rows, columns=list(TREE_COLUMNS))


def _rows(decoder: Decoder, prompt: int, iteration: int, tree: IterationTree) -> list[tuple[object, ...]]:
    def role(node: int) -> str:
        if node == 0:
            return "root"
        if node in tree.accepted:
            return "accepted"
        return "verified" if node in tree.verified else "drafted"

    def text(token: int) -> str:
        return repr(decoder.tokenizer.decode([token]))[1:-1].replace(" ", "␣")  # a space should be seen

    depths = [0]
    for parent in tree.parents[1:]:
        depths.append(depths[parent] + 1)
    return [
        (
            prompt, iteration, node, tree.parents[node] if node else -1, depths[node], role(node), text(token),
            math.exp(tree.scores[node]), text(tree.bonus) if node == 0 else "", " x ".join(map(str, tree.shape)),
        )
        for node, token in enumerate(tree.tokens)
    ]  # fmt: skip
