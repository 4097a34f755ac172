"""The steps of the target (calls with a fixed number of rows, which may be compiled): a plain token, a verified tree.

Dims: W verified nodes (root included), N tree nodes, V vocabulary, H hidden size.
"""

import torch
from torch import Tensor

from yggdrasil.acceptance.greedy import accept_greedy
from yggdrasil.acceptance.tensor_rules import PassRows, accept
from yggdrasil.acceptance.tensor_sampling import (
    SamplingInputs,
    SamplingKind,
    counts_on_path,
    draw,
    logprob_words,
    process,
)
from yggdrasil.runtime.passes import CallStep, Forward, ModelCall, StepModule
from yggdrasil.tree.token_tree import TokenTree


class PlainLogitsStep(CallStep[ModelCall]):
    """Step that runs one committed token through the target and returns its logits."""

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one committed token, as ``read_token`` does.

        Returns:
            (logits [1, V], hidden [1, H] float32, [1, H] of each layer that a drafter reads)
        """
        found = read_token(self._call, weights, caches, token, position)
        return found.logits, found.hidden.float(), *found.layers


class VerifyLogitsStep(CallStep[ModelCall]):
    """Step that runs the W best nodes of a tree through the target and returns their logits."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,
        chosen: Tensor,
        *tree_buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run nodes of a tree through the target, write their KV entries, and accept none.

        Args:
            root: [1] int64, the root's index in the request, counted from the first prompt token.
            chosen: [W] int64, node indices in any order.
            tree_buffers: ``TokenTree.tensors``.

        Returns:
            (rows as ``layout_of`` packs them, logits [W, V], hidden [W, H] float32, [W, H] of each layer that a drafter
                reads)
        """
        tree = TokenTree(*tree_buffers)
        rows, found = read_tree(self._call, weights, caches, root, chosen, tree)
        return layout_of(rows), found.logits, found.hidden.float(), *found.layers


def read_token(
    call: ModelCall, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor
) -> Forward:
    """Run one committed token through the target, write its KV entry, and return logits and hidden states.

    Args:
        token: [1] int64 token id.
        position: [1] int64, the token's index in the request, counted from the first prompt token.
    """
    mask = torch.ones(1, 1, dtype=torch.bool, device=token.device)
    return call(weights, caches, token, position, mask, position.expand(2).contiguous())


def read_tree(
    call: ModelCall, weights: list[Tensor], caches: list[Tensor], root: Tensor, chosen: Tensor, tree: TokenTree
) -> tuple[PassRows, Forward]:
    """Run the nodes ``chosen`` [W] int64 of a tree through the target, with tree attention.

    KV entries are written to ``caches``, in the slots from ``root`` on.

    Args:
        root: [1] int64, the root's index in the request, counted from the first prompt token.

    Returns:
        (the rows of the pass in ascending node order, logits and hidden states of these rows)
    """
    rows = rows_of(chosen, tree)
    offsets = root.expand(2).contiguous()
    return rows, call(weights, caches, rows.tokens, root + tree.depths[rows.nodes], rows.ancestors, offsets)


def rows_of(chosen: Tensor, tree: TokenTree) -> PassRows:
    """Return the rows of a pass over the nodes ``chosen`` [W] int64 of ``tree``, in ascending node order.

    Parents are given as row indices, so ``chosen`` must have the parent of each node. Entries of the tree without a
    node, whose score is -inf, become padding.
    """
    nodes = chosen.sort().values  # parents before children
    row_of = torch.zeros_like(tree.tokens).index_copy(0, nodes, torch.arange(nodes.shape[0], device=nodes.device))
    return PassRows(
        nodes=nodes,
        tokens=tree.tokens[nodes],
        parents=row_of[tree.parents[nodes]],
        ancestors=tree.ancestors[nodes][:, nodes],
        exist=torch.isfinite(tree.scores[nodes]),
    )


class PlainStep(CallStep[ModelCall]):
    """Step that runs one committed token and chooses the next by argmax: plain decoding."""

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], token: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one committed token, as ``read_token`` does.

        Returns:
            (argmax token [1] int64, its logit [1], hidden [1, H] float32, [1, H] of each layer that a drafter reads)
        """
        found = read_token(self._call, weights, caches, token, position)
        best, choice = found.best_tokens()
        return choice, best, found.hidden.float(), *found.layers


class VerifyStep(CallStep[ModelCall]):
    """Step that runs the W best nodes of a tree and accepts the path that the target's argmax tokens follow."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        root: Tensor,
        chosen: Tensor,
        *tree_buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run nodes of a tree through the target, write their KV entries, and accept the path of argmax tokens.

        Args:
            root: [1] int64, the root's index in the request, counted from the first prompt token.
            chosen: [W] int64, node indices in any order.
            tree_buffers: ``TokenTree.tensors``.

        Returns:
            (summary [2 + 4W] int64, hidden [W, H] float32, [W, H] of each layer that a drafter reads). The summary has
                the number n of accepted rows (root included), whether their logits are finite, W entries of which the
                first n are the accepted rows, W entries of which the first n are the target's tokens after these, then
                the target's token after every row and every row's node.
        """
        rows, found = read_tree(self._call, weights, caches, root, chosen, TokenTree(*tree_buffers))
        best, choices = found.best_tokens()
        _, path = accept_greedy(rows.tokens, rows.parents, rows.ancestors, rows.exist, choices)
        return _summary(rows, path, best, choices), found.hidden.float(), *found.layers


def layout_of(rows: PassRows) -> Tensor:
    """Pack the rows of a pass into one [4, W] int64 tensor, which the host copies at once.

    Column i describes row i by four numbers: node index in the drafted tree, token id, row index of the parent (0 for
    the root itself), and 1 for a node or 0 for padding, whose other numbers have no meaning.
    """
    return torch.stack([rows.nodes, rows.tokens, rows.parents, rows.exist.to(torch.int64)])


def _summary(rows: PassRows, path: Tensor, best: Tensor, choices: Tensor) -> Tensor:
    """Return the summary of ``VerifyStep`` [2 + 4W] from the accepted rows and each row's best logit and token [W]."""
    width = choices.shape[0]
    numbers = torch.arange(width, device=path.device)
    accepted = torch.where(path, numbers, width).sort().values.clamp(max=width - 1)
    finite = torch.isfinite(torch.where(path, best, 0.0)).all()
    return torch.cat([path.sum()[None], finite.to(torch.int64)[None], accepted, choices[accepted], choices, rows.nodes])


class AcceptStep(StepModule):
    """Step that samples and accepts tokens from the logits of a pass.

    Random numbers depend on the seed and the position in the text, not on the tree.
    """

    def __init__(self, kind: SamplingKind) -> None:
        super().__init__()
        self._kind = kind

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        logits: Tensor,
        root: Tensor,
        chosen: Tensor,
        *buffers: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Sample a token after every row of a pass by a request's parameters, and accept a path by the request's rule.

        Args:
            weights, caches: unused; every step takes them.
            logits: [W, V] float32.
            root: [1] int64, the root's index in the request, counted from the first prompt token.
            chosen: [W] int64, the rows' nodes.
            buffers: ``TokenTree.tensors``, then the fields of ``SamplingInputs``.

        Returns:
            (summary [2 + 4W] int64 as ``VerifyStep`` returns it, words int64). The words are those of
                ``logprob_words``; empty if the request reports no log-probabilities.
        """
        num_tree, kind = len(buffers) - len(SamplingInputs._fields), self._kind
        tree, inputs = TokenTree(*buffers[:num_tree]), SamplingInputs(*buffers[num_tree:])
        rows = rows_of(chosen, tree)
        path_counts = counts_on_path(rows.tokens, rows.ancestors, logits.shape[1]) if kind.shapes else None
        positions = root + tree.depths[rows.nodes] + 1
        scores = process(kind, logits, path_counts, positions, inputs)
        choices = draw(scores, positions, inputs)
        path, choices = accept(kind.rule, rows, scores, choices, inputs)
        words = choices[:0] if kind.num_top is None else logprob_words(logits, choices, kind.num_top)
        return _summary(rows, path, logits.amax(-1), choices), words
