"""Equal-Growth Tree (paper section 4.2): every draft step attaches exactly W_d nodes, anywhere in the tree.

Pure tensor functions over a ``TokenTree``, written to be traced into the drafter's compiled step: no branch on data,
no shape that depends on it. A chain is the case W_d = 1.

Dims: W nodes attached in a step, K candidates a node, N node capacity, V vocabulary.
"""

import torch
from torch import Tensor

import yggdrasil.native  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree

MIN_LOG_PROBABILITY = -12.0


def calibrated(log_probability: Tensor, knots: Tensor) -> Tensor:
    """Acceptance estimate (log) of drafter log-probabilities: linear between ``knots``, uniform over [-12, 0].

    ``knots`` [M] float32 are log-acceptances below 0, so a child's score is strictly below its parent's.
    """
    last = knots.shape[0] - 1
    place = (log_probability.clamp(MIN_LOG_PROBABILITY, 0.0) - MIN_LOG_PROBABILITY) * (last / -MIN_LOG_PROBABILITY)
    low = place.floor().clamp(max=last - 1)
    index = low.to(torch.int64)
    fraction = place - low
    return knots[index] * (1 - fraction) + knots[index + 1] * fraction


def plant_root(tree: TokenTree, token: Tensor) -> None:
    """Empty the tree and make ``token`` [1] its root."""
    tree.scores.fill_(NO_SCORE)
    tree.scores[:1] = 0.0
    tree.pool_scores.fill_(NO_SCORE)
    tree.tokens[:1] = token
    tree.parents[:1] = 0
    tree.depths[:1] = 0
    tree.edges[:1] = 0.0
    tree.ancestors.copy_(torch.eye(tree.num_nodes, dtype=torch.bool, device=token.device))


def offer_candidates(tree: TokenTree, nodes: Tensor, logits: Tensor, knots: Tensor) -> None:
    """Put the K likeliest continuations of ``nodes`` [W] into the pool; ``logits`` [W, V] are the drafter's."""
    edges, tokens = likeliest(logits, tree.candidates)
    offer(tree, nodes, edges, tokens, knots)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens of the ``count`` likeliest continuations, [W, count] each."""
    logits = logits.float()
    top, tokens = torch.ops.yggdrasil.top_candidates(logits, count)
    edges = top - logits.logsumexp(-1, keepdim=True)
    edges = torch.where(edges.isnan(), MIN_LOG_PROBABILITY, edges)  # a damaged drafter's guesses are guesses too
    return edges, tokens


def offer(tree: TokenTree, nodes: Tensor, edges: Tensor, tokens: Tensor, knots: Tensor) -> None:
    """Put known continuations of ``nodes`` [W] into the pool: ``edges`` and ``tokens`` are [W, K]."""
    k = tree.candidates
    entries = (nodes[:, None] * k + torch.arange(k, device=nodes.device)).flatten()
    tree.pool_scores[entries] = (tree.scores[nodes][:, None] + calibrated(edges, knots)).flatten()
    tree.pool_edges[entries] = edges.flatten()
    tree.pool_tokens[entries] = tokens.flatten()


def attach_best(tree: TokenTree, first: Tensor, width: int) -> Tensor:
    """Attach the ``width`` best candidates of the whole pool as nodes ``first`` [1] onwards; returns them [W]."""
    best, places = torch.ops.yggdrasil.top_candidates(tree.pool_scores[None], width)
    scores, entries = best[0], places[0]
    parents = entries // tree.candidates
    nodes = first + torch.arange(width, device=first.device)
    tree.tokens[nodes] = tree.pool_tokens[entries]
    tree.edges[nodes] = tree.pool_edges[entries]
    tree.parents[nodes] = parents
    tree.depths[nodes] = tree.depths[parents] + 1
    tree.scores[nodes] = scores
    itself = nodes[:, None] == torch.arange(tree.num_nodes, device=nodes.device)
    tree.ancestors[nodes] = tree.ancestors[parents] | itself
    tree.pool_scores[entries] = NO_SCORE
    return nodes


def rank_nodes(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """All nodes, best score first [N], and the expected accepted tokens of each prefix, bonus included [N].

    With path-product scores a child never beats its parent, so every prefix is a connected subtree and is the best
    of its size: the dynamic programme of paper section 4.2 is not needed.
    """
    order, expected = torch.empty_like(tree.tokens), torch.empty_like(tree.scores)
    torch.ops.yggdrasil.rank_nodes(tree.scores, order, expected)
    return order, expected
