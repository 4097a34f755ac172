"""Rank a block's candidates again, given the token before them: DSpark's Markov heads and DFlash2's candidate selector.

A block pass finds the likeliest tokens of every depth, whatever comes before. A successor head adds the product of two
vectors to their logits: a query computed from the token before, and a row of a table for each candidate. So candidates
depend on the path that they follow, without another pass.

Dims: W nodes, M candidates of a depth, H hidden size, R rank, V target vocabulary, Vd draft vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor, nn

# ``selector`` is DFlash2's; the others are DSpark's.
SuccessorKind = Literal["selector", "vanilla", "gated", "rnn"]


class SuccessorHead(nn.Module):
    """Add to each candidate's logit the product of ``following[candidate]`` and a query.

    The query is computed from ``previous[token before]``, from the block's output unless the kind is ``vanilla``, and
    from a state of the path if the kind is ``rnn``.
    """

    def __init__(
        self, kind: SuccessorKind, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int
    ) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.previous = nn.Parameter(torch.zeros(vocab_size, rank))
        self.following = nn.Parameter(torch.zeros(draft_vocab_size, rank))
        joint = hidden_size + rank
        sizes = {"selector": (hidden_size, rank), "gated": (joint, rank), "rnn": (joint + rank, 3 * rank)}
        if kind in sizes:
            self.projection = nn.Linear(*sizes[kind], bias=kind != "selector")

    def forward(
        self, logits: Tensor, drafted: Tensor, before: Tensor, outputs: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return candidates' logits [W, M] given the token before each, and the path states [W, R] after that token.

        Args:
            logits: [W, M] logits of the candidates, from the block pass.
            drafted: [W, M] int64, draft vocabulary ids of the candidates.
            before: [W] int64, the target's ids of the tokens before the candidates.
            outputs: [W, H] outputs of the block's rows that predict the candidates.
            state: [W, R] path states before these tokens; zeros at the root. Only the kind ``rnn`` changes them.
        """
        query, state = self._query(self.previous[before], outputs, state)
        return logits + (self.following[drafted] * query[:, None]).sum(-1), state

    def _query(self, known: Tensor, outputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "vanilla":
            return known, state
        if self.kind == "selector":
            return known * self.projection(outputs), state
        if self.kind == "gated":
            return known * torch.sigmoid(self.projection(torch.cat([outputs, known], dim=-1))), state
        gate, new, query = self.projection(torch.cat([state, known, outputs], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(query), gate * state + (1 - gate) * torch.tanh(new)
