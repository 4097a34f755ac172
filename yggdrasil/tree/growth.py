"""Equal-Growth Tree (paper section 4.2): every draft step attaches exactly W_d nodes, anywhere in the tree.

Pure tensor functions over a ``TokenTree``, without data-dependent branches or shapes, so that they can be traced into
the drafter's compiled step. A chain is the case W_d = 1.

Dims: W nodes attached per step, K candidates per node, N node capacity, V vocabulary.
"""

import torch
from torch import Tensor

import yggdrasil.native  # noqa: F401  (registers torch.ops.yggdrasil)
from yggdrasil.native.portable import reweighed
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree

MIN_LOG_PROBABILITY = -12.0


def calibrated(log_probability: Tensor, knots: Tensor) -> Tensor:
    """Return log acceptance probabilities for a drafter's log-probabilities, by linear interpolation.

    ``knots`` [M] float32 are the values at M equally spaced log-probabilities from -12 to 0. All are below 0, so a
    child's score is strictly below its parent's.
    """
    last = knots.shape[0] - 1
    position = (log_probability.clamp(MIN_LOG_PROBABILITY, 0.0) - MIN_LOG_PROBABILITY) * (last / -MIN_LOG_PROBABILITY)
    low = position.floor().clamp(max=last - 1)
    index = low.to(torch.int64)
    fraction = position - low
    return knots[index] * (1 - fraction) + knots[index + 1] * fraction


def plant_root(tree: TokenTree, token: Tensor) -> None:
    """Remove all nodes and candidates of the tree, and make ``token`` [1] int64 its root."""
    tree.scores.fill_(NO_SCORE)
    tree.scores[:1] = 0.0
    tree.pool_scores.fill_(NO_SCORE)
    tree.tokens[:1] = token
    tree.parents[:1] = 0
    tree.depths[:1] = 0
    tree.edges[:1] = 0.0
    tree.ancestors.copy_(torch.eye(tree.num_nodes, dtype=torch.bool, device=token.device))


def offer_candidates(tree: TokenTree, nodes: Tensor, logits: Tensor, knots: Tensor) -> None:
    """Add the K likeliest tokens after each of ``nodes`` [W] int64 to the tree's pool of candidates.

    ``logits`` [W, V] are the drafter's after these nodes. ``knots`` [M] float32 is the acceptance calibration of their
    scores.
    """
    edges, tokens = likeliest(logits, tree.candidates)
    offer(tree, nodes, edges, tokens, knots)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities float32, tokens int64) of the ``count`` likeliest tokens of ``logits`` [W, V].

    Both are [W, count], the likeliest first.
    """
    logits = logits.float()
    top, tokens = torch.ops.yggdrasil.top_candidates(logits, count)
    edges = top - logits.logsumexp(-1, keepdim=True)
    edges = torch.where(edges.isnan(), MIN_LOG_PROBABILITY, edges)  # NaN from a damaged drafter
    return edges, tokens


def offer(tree: TokenTree, nodes: Tensor, edges: Tensor, tokens: Tensor, knots: Tensor) -> None:
    """Add candidates below ``nodes`` [W] int64 to the tree's pool, with ``tokens`` and ``edges`` [W, K].

    ``edges`` are their log-probabilities. A candidate's score is that of its node plus the log-probability calibrated
    with ``knots`` [M] float32; where the target samples, plus the log-probability that follows from its draws.
    """
    k, likely = tree.candidates, calibrated(edges, knots)
    if tree.draws is not None and tree.draw_weights is not None:
        reweigh = torch.ops.yggdrasil.reweigh if edges.is_cpu else reweighed  # compiled steps for a GPU fuse it
        likely = reweigh(likely, edges, tokens, tree.depths[nodes], tree.draws, tree.draw_weights)
    entries = (nodes[:, None] * k + torch.arange(k, device=nodes.device)).flatten()
    tree.pool_scores[entries] = (tree.scores[nodes][:, None] + likely).flatten()
    tree.pool_edges[entries] = edges.flatten()
    tree.pool_tokens[entries] = tokens.flatten()


def attach_best(tree: TokenTree, first: Tensor, width: int) -> Tensor:
    """Attach the ``width`` candidates with the highest scores in the tree's pool as nodes number ``first`` [1] onwards.

    Return the numbers of the new nodes, [W] int64.
    """
    best, indices = torch.ops.yggdrasil.top_candidates(tree.pool_scores[None], width)
    scores, entries = best[0], indices[0]
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
    """Return a tree's nodes by descending score, [N] int64, and the expected number of tokens, [N] float32.

    Entry i of the latter is for a pass over the first i + 1 nodes, bonus token included. A child's score is below its
    parent's, so every prefix is a connected subtree and the best one of its size; the dynamic programme of paper
    section 4.2 is not needed.
    """
    order, expected = torch.empty_like(tree.tokens), torch.empty_like(tree.scores)
    torch.ops.yggdrasil.rank_nodes(tree.scores, order, expected)
    return order, expected
