"""An EAGLE-3 head as a module whose tensors have the names of published files.

The target's embedding belongs to the target and is handed in as rows.

Dims: W rows, H the head's hidden size, S the target's states side by side.
"""

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.layers import Attend, Attention, FeedForward, Norm, RotaryEmbedding, target_tokens


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


class EagleHead(nn.Module):
    """One layer between the target's states and guesses at the token after next."""

    d2t: Tensor  # [draft vocabulary] int64: what to add to a drafted token to have the target's

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
        """The feature [.., H] of the target's states side by side [.., S]."""
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
        """Outputs [.., W, H] of rows that each read a token's embedding and the feature of the position before it.

        With ``rows`` [R] int64 theirs alone, [R, H]: of the others there are keys and values, a third of the work.
        """
        output: Tensor = self.midlayer(embedded, features, self.rotary(positions, embedded.dtype), attend, rows)
        return output

    def fed_back(self, outputs: Tensor) -> Tensor:
        """What the next drafted row reads as its feature."""
        return self.norm(outputs) if self.settings.norm_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Of the draft vocabulary, [.., draft vocabulary]."""
        logits: Tensor = self.lm_head(self.norm(outputs))
        return logits

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """The target's tokens of drafted ones."""
        return target_tokens(drafted, self.d2t if self.settings.has_own_vocabulary else None)
