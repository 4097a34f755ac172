"""A block head (DFlash, DFlash2, DSpark, JetSpec) as a module whose parameters have the names of published files.

A block is the last accepted token followed by masks, each at its position; the output at a mask predicts the token
there (in DSpark, the output of a row predicts the token after it). The rows attend to the block and to earlier text.
Keys and values of the earlier text are computed in every layer from one feature per position, a projection of the
target's hidden states. Embedding and LM head are the target's, unless the head's files have them.

Dims: W rows, H hidden size, S concatenated hidden states of the target, Hkv key heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.block.config import BlockSettings
from yggdrasil.drafters.heads.block.successors import SuccessorHead
from yggdrasil.drafters.heads.layers import Attend, DecoderLayer, DraftingVocabulary, Norm, RotaryEmbedding


class BlockHead(DraftingVocabulary):
    """Layers that draft a whole block of tokens at once, given the target's hidden states of the earlier text."""

    successors: SuccessorHead | None

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.settings = settings
        hidden, eps = settings.hidden_size, settings.norm_eps
        self.fc = nn.Linear(settings.num_states * settings.target_hidden_size, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList(
            DecoderLayer(settings, convolution=settings.convolution) for _ in range(settings.num_layers)
        )
        self.norm = Norm(hidden, eps)
        self.rotary = RotaryEmbedding(settings)
        self.lm_head, self.successors = None, None
        if settings.successors is not None:
            sizes = hidden, settings.vocab_size, settings.draft_vocab_size
            self.successors = SuccessorHead(settings.successors, settings.rank, *sizes)
        if settings.has_own_vocabulary:
            self.register_buffer("d2t", torch.zeros(settings.draft_vocab_size, dtype=torch.int64))

    def restrict_to(self, tokens: Tensor, rows: Callable[[nn.Module | None], nn.Module]) -> None:
        """Restrict drafting to the token ids ``tokens``: the settings, LM head, ``d2t`` and successor head change.

        Args:
            tokens: [Vd] int64 token ids of the target, ascending.
            rows: returns an LM head over ``tokens`` alone, given this head's LM head or None for the target's.
        """
        super().restrict_to(tokens, rows)
        if self.successors is not None:
            self.successors.following = nn.Parameter(self.successors.following[tokens], requires_grad=False)

    def context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of accepted tokens: for each layer, in order, a pair of [.., Hkv, W, D].

        Args:
            states: [.., W, S] concatenated hidden states of the target at these tokens.
            positions: [W] int64 positions of the tokens for the rotary embedding.
        """
        features = self.hidden_norm(self.fc(states))
        turn = self.rotary(positions, features.dtype)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.keys(features, turn) for attention in attentions]

    def forward(self, embedded: Tensor, positions: Tensor, attend: Callable[[int], Attend]) -> Tensor:
        """Return the outputs of a block's rows after the last norm, [.., W, H]; ``logits`` reads them.

        Args:
            embedded: [.., W, H] embeddings of the last accepted token and of W - 1 mask tokens.
            positions: [W] int64 positions of the rows for the rotary embedding.
            attend: returns the attention function of a layer, given its index.
        """
        embedded = embedded * self.settings.input_scale
        turn = self.rotary(positions, embedded.dtype)
        for number, layer in enumerate(self.layers):
            embedded = layer(embedded, turn, attend(number))
        outputs: Tensor = self.norm(embedded)
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [.., Vd] over the draft vocabulary of ``outputs`` [.., H] of ``forward``.

        The logits do not depend on the token drafted before; a successor head corrects the logits for that token.
        """
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(outputs) * self.settings.output_scale
        cap = self.settings.softcap
        return torch.tanh(logits / cap) * cap if cap else logits
