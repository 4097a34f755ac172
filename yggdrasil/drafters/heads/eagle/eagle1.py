"""A head of EAGLE-1 or EAGLE-2 as a module whose parameters have the names of published files.

The head reads the input of the target's LM head and predicts the next such hidden state, from which an LM head, by
default the target's, predicts the token. EAGLE-2 has the same module and only builds another tree.

Dims: W rows, H hidden size.
"""

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.eagle.state_head import StateHead
from yggdrasil.drafters.heads.layers import Attend, DecoderLayer, Norm, RotaryEmbedding


class FirstEagleHead(StateHead):
    """One decoder layer that predicts the target's next hidden state."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__(settings)
        hidden, eps = settings.hidden_size, settings.norm_eps
        if settings.normed_inputs:
            self.embedding_layernorm, self.hidden_states_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=settings.fc_bias is not False)
        self.layers = nn.ModuleList([DecoderLayer(settings, norms_input=False)])
        self.rotary = RotaryEmbedding(settings)

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Return the predicted next hidden states of the target, [.., W, H], inputs of its LM head.

        Args:
            embedded: [.., W, H] embeddings of W tokens.
            features: [.., W, H] hidden states of the tokens before them.
            positions: [W] int64 positions for the rotary embedding.
            attend: attention of rotated queries to keys and values (``layers.Attend``).
            rows: [R] int64 indices of the rows whose outputs [R, H] are returned; None returns those of all W rows.
                Keys and values are computed for all rows. Inputs must be [W, H] if ``rows`` is given.
        """
        if self.settings.normed_inputs:
            embedded, features = self.embedding_layernorm(embedded), self.hidden_states_layernorm(features)
        fused = self.fc(torch.cat([embedded, features], dim=-1))
        output: Tensor = self.layers[0](fused, self.rotary(positions, embedded.dtype), attend, rows)
        return output
