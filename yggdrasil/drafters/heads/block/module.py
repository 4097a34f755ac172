"""A block head (DFlash, DFlash2, DSpark, JetSpec) as a module whose parameters have the names of published files.

A block is the last accepted token followed by masks, each at its position; the output at a mask predicts the token
there. The rows attend to the block and to the earlier text. Keys and values of the earlier text are computed in every
layer from one feature per position, a projection of the target's hidden states. Embedding and LM head are the target's.

Dims: W rows, H hidden size, S concatenated hidden states of the target, Hkv key heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.block.config import BlockSettings
from yggdrasil.drafters.heads.block.convolution import BlockConvolution
from yggdrasil.drafters.heads.block.successors import SuccessorHead
from yggdrasil.drafters.heads.layers import Attend, Attention, DraftingVocabulary, FeedForward, Norm, RotaryEmbedding


class _Layer(nn.Module):
    def __init__(self, block: BlockSettings) -> None:
        super().__init__()
        settings = block.layer
        self.input_layernorm = Norm(settings.hidden_size, settings.norm_eps)
        self.self_attn = Attention(settings, settings.hidden_size)
        self.post_attention_layernorm = Norm(settings.hidden_size, settings.norm_eps)
        self.mlp = FeedForward(settings)
        if block.convolution is not None:
            self.attention_conv, self.mlp_conv = (
                BlockConvolution(settings.hidden_size, *block.convolution) for _ in range(2)
            )
        self._convolves = block.convolution is not None

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        if self._convolves:
            return self._convolved(x, turn, attend)
        h = x + self.self_attn(self.input_layernorm(x), turn, attend)
        output: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return output

    def _convolved(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed, weights = self.attention_conv.before(self.input_layernorm(x))
        h = x + self.attention_conv.after(self.self_attn(normed, turn, attend), weights)
        normed, weights = self.mlp_conv.before(self.post_attention_layernorm(h))
        output: Tensor = h + self.mlp_conv.after(self.mlp(normed), weights)
        return output


class BlockHead(DraftingVocabulary):
    """Layers that draft a whole block of tokens at once, given the target's hidden states of the earlier text."""

    successors: SuccessorHead | None

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.settings = settings
        layer = settings.layer
        self.fc = nn.Linear(layer.num_states * layer.target_hidden_size, layer.hidden_size, bias=False)
        self.hidden_norm = Norm(layer.hidden_size, layer.norm_eps)
        self.layers = nn.ModuleList(_Layer(settings) for _ in range(settings.num_layers))
        self.norm = Norm(layer.hidden_size, layer.norm_eps)
        self.rotary = RotaryEmbedding(layer)
        self.lm_head, self.successors = None, None
        if settings.successors is not None:
            sizes = layer.hidden_size, layer.vocab_size, layer.draft_vocab_size
            self.successors = SuccessorHead(settings.successors, settings.rank, *sizes)
        if layer.has_own_vocabulary:
            self.register_buffer("d2t", torch.zeros(layer.draft_vocab_size, dtype=torch.int64))

    def restrict_to(self, tokens: Tensor, rows: Callable[[nn.Module | None], nn.Module]) -> None:
        """Restrict drafting to ``tokens`` [Vd] int64, token ids of the target in ascending order."""
        super().restrict_to(tokens, rows)
        if self.successors is not None:
            self.successors.following = nn.Parameter(self.successors.following[tokens], requires_grad=False)

    def context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of earlier text in every layer, pairs of [.., Hkv, W, D].

        Args:
            states: [.., W, S] concatenated hidden states of the target.
            positions: [W] int64 positions of the rows in the text.
        """
        features = self.hidden_norm(self.fc(states))
        turn = self.rotary(positions, features.dtype)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.keys(features, turn) for attention in attentions]

    def forward(self, embedded: Tensor, positions: Tensor, attend: Callable[[int], Attend]) -> Tensor:
        """Return the normalised outputs of a block's rows, [.., W, H].

        Args:
            embedded: [.., W, H] embeddings of the last accepted token and of masks.
            positions: [W] int64 positions of the rows in the text.
            attend: returns the attention function of a layer, by its index.
        """
        embedded = embedded * self.settings.input_scale
        turn = self.rotary(positions, embedded.dtype)
        for number, layer in enumerate(self.layers):
            embedded = layer(embedded, turn, attend(number))
        outputs: Tensor = self.norm(embedded)
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [.., draft vocabulary] of normalised ``outputs`` [.., H], whatever token comes before."""
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(outputs) * self.settings.output_scale
        cap = self.settings.softcap
        return torch.tanh(logits / cap) * cap if cap else logits
