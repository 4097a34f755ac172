"""An EAGLE-3 head as a module whose parameters have the names of published files.

Dims: W rows, H the head's hidden size, S concatenated hidden states of the target.
"""

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.layers import Attend, Attention, DraftingVocabulary, FeedForward, Norm, RotaryEmbedding


class _MiddleLayer(nn.Module):
    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        hidden, eps = settings.hidden_size, settings.norm_eps
        self.input_layernorm = Norm(hidden, eps)
        self.hidden_norm = Norm(hidden, eps)
        self.self_attn = Attention(settings, 2 * hidden)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = FeedForward(settings)
        self._keeps_normed = settings.norm_before_residual

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        turn: tuple[Tensor, Tensor],
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        kept = normed if self._keeps_normed else features
        h = (kept if rows is None else kept[rows]) + self.self_attn(both, turn, attend, rows)
        output: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return output


class EagleHead(DraftingVocabulary):
    """One decoder layer that predicts the token after next from the target's hidden states and the next token."""

    lm_head: nn.Linear

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.settings = settings
        hidden, eps = settings.hidden_size, settings.norm_eps
        states = settings.num_states * settings.target_hidden_size
        if settings.norm_before_fc:
            self.input_norm = Norm(states, eps)
        if settings.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(settings.target_hidden_size, eps) for _ in range(settings.num_states))
        self.fc = nn.Linear(states, hidden, bias=False)
        self.midlayer = _MiddleLayer(settings)
        self.norm = Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, settings.draft_vocab_size, bias=False)
        self.rotary = RotaryEmbedding(settings)
        if settings.has_own_vocabulary:
            self.register_buffer("d2t", torch.zeros(settings.draft_vocab_size, dtype=torch.int64))

    def feature(self, states: Tensor) -> Tensor:
        """Project the target's hidden states, concatenated over the layers that the head reads, to features [.., H].

        Args:
            states: [.., S], where S is the number of these layers times the target's hidden size.
        """
        if self.settings.norm_before_fc:
            states = self.input_norm(states)
        if self.settings.fc_norm:
            parts = states.split(self.settings.target_hidden_size, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        feature: Tensor = self.fc(states)
        return feature

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Return the outputs of the head's decoder layer, [.., W, H], which ``logits`` and ``fed_back`` read.

        Args:
            embedded: [.., W, H] embeddings of W tokens.
            features: [.., W, H] features of the tokens before them, from ``feature`` or ``fed_back``.
            positions: [W] int64 positions for the rotary embedding.
            attend: attention of rotated queries to keys and values (``layers.Attend``).
            rows: [R] int64 indices of the rows whose outputs [R, H] are returned; None returns those of all W rows.
                Keys and values are computed for all rows. Inputs must be [W, H] if ``rows`` is given.
        """
        output: Tensor = self.midlayer(embedded, features, self.rotary(positions, embedded.dtype), attend, rows)
        return output

    def fed_back(self, outputs: Tensor) -> Tensor:
        """Return the features [.., H] that tokens drafted after these read, from the head's ``outputs`` [.., H]."""
        return self.norm(outputs) if self.settings.norm_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [.., Vd] over the draft vocabulary of ``outputs`` [.., H] of ``forward``."""
        logits: Tensor = self.lm_head(self.norm(outputs))
        return logits
