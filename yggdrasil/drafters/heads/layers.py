"""Norm, attention, feed-forward and rotary modules of all heads; parameters have the names of published files.

The attention function is a parameter: drafting attends over a cache under the tree mask, training over the steps of an
unrolled head.

Dims: W rows, R rows whose outputs are returned, H hidden size, D attention head size, Hq query heads, Hkv key heads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.drafters.heads.block.convolution import BlockConvolution
from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.rotary import rotary_turns

# query [.., Hq, R, D], keys and values [.., Hkv, W, D], after the rotary embedding -> [.., R, Hq, D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class Norm(nn.Module):
    """RMS norm, computed in float32 for any dtype of the weights."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        """``offset`` is added to the weights: 1 for Gemma and Qwen3.5, which store weights minus 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self._offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over its last dimension, in the dtype of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self._offset:
            return (wide * (self._offset + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention with rotary embedding, over rows of ``inputs`` channels."""

    def __init__(self, settings: HeadSettings, inputs: int) -> None:
        super().__init__()
        size, bias = settings.head_size, settings.attention_bias or settings.qkv_bias
        self.q_proj = nn.Linear(inputs, settings.query_heads * size, bias=bias)
        self.k_proj = nn.Linear(inputs, settings.key_heads * size, bias=bias)
        self.v_proj = nn.Linear(inputs, settings.key_heads * size, bias=bias)
        self.o_proj = nn.Linear(settings.query_heads * size, settings.hidden_size, bias=settings.attention_bias)
        if settings.head_norms:
            self.q_norm, self.k_norm = Norm(size, settings.norm_eps), Norm(size, settings.norm_eps)
        self.size, self._norms_heads = size, settings.head_norms

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Return the attention outputs, [.., W, H], or only those of ``rows``, [R, H].

        Args:
            x: [.., W, inputs] rows.
            rotation: cosines and sines of the rotary embedding, [W, D] each.
            attend: attention of rotated queries to keys and values (``layers.Attend``).
            rows: [R] int64 indices of the rows whose outputs are returned; None returns the outputs of all W rows. Keys
                and values are computed for all rows. ``x`` must be [W, inputs] if ``rows`` is given.
        """
        asking, query_rotation = x, rotation
        if rows is not None:
            asking, query_rotation = x[rows], (rotation[0][rows], rotation[1][rows])
        query = self._heads(self.q_proj(asking))
        key, value = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        if self._norms_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        output: Tensor = self.o_proj(attend(rotated(query, query_rotation), rotated(key, rotation), value).flatten(-2))
        return output

    def keys(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys, with rotary embedding, and values, [.., Hkv, W, D] each, of rows ``x`` [.., W, inputs].

        Args:
            rotation: cosines and sines of the rotary embedding, [W, D] each.
        """
        key, value = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return rotated(self.k_norm(key) if self._norms_heads else key, rotation), value

    def _heads(self, rows: Tensor) -> Tensor:
        heads: Tensor = rows.unflatten(-1, (-1, self.size)).transpose(-3, -2)
        return heads


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        hidden, inner, bias = settings.hidden_size, settings.intermediate_size, settings.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self._activation = _ACTIVATIONS[settings.activation]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return output


class DecoderLayer(nn.Module):
    """A decoder layer. A layer of EAGLE-1 has no input norm; one of DFlash2 convolves rows around both sublayers."""

    def __init__(
        self, settings: HeadSettings, *, norms_input: bool = True, convolution: tuple[int, int] | None = None
    ) -> None:
        """``convolution`` is (taps, channels per group), or None for a layer without convolutions."""
        super().__init__()
        hidden, eps = settings.hidden_size, settings.norm_eps
        self.input_layernorm: nn.Module = Norm(hidden, eps) if norms_input else nn.Identity()
        self.self_attn = Attention(settings, hidden)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = FeedForward(settings)
        if convolution is not None:
            self.attention_conv, self.mlp_conv = (BlockConvolution(hidden, *convolution) for _ in range(2))
        self._convolves = convolution is not None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Return the layer's outputs, [.., W, H], or only those of ``rows``, [R, H].

        Args:
            x: [.., W, H] rows.
            rotation: cosines and sines of the rotary embedding, [W, D] each.
            attend: attention of rotated queries to keys and values (``layers.Attend``).
            rows: [R] int64 indices of the rows whose outputs are returned; None returns the outputs of all W rows. It
                must be None for a layer with a convolution.
        """
        normed = self.input_layernorm(x)
        if self._convolves:
            return self._convolved(x, normed, rotation, attend)
        h = (x if rows is None else x[rows]) + self.self_attn(normed, rotation, attend, rows)
        output: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return output

    def _convolved(self, x: Tensor, normed: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed, weights = self.attention_conv.before(normed)
        h = x + self.attention_conv.after(self.self_attn(normed, rotation, attend), weights)
        normed, weights = self.mlp_conv.before(self.post_attention_layernorm(h))
        output: Tensor = h + self.mlp_conv.after(self.mlp(normed), weights)
        return output


class DraftingVocabulary(nn.Module):
    """Base class of heads, with the vocabulary that a head drafts: all or some of the target's tokens.

    ``lm_head`` covers this vocabulary. If a head has no LM head, loading sets ``lm_head`` to the target's.

    Dims: Vd draft vocabulary, by default the target's whole vocabulary.
    """

    settings: Any
    lm_head: nn.Module | None
    d2t: Tensor  # [Vd] int64 offsets from draft vocabulary ids to the target's token ids; absent if these are equal

    def restrict_to(self, tokens: Tensor, rows: Callable[[nn.Module | None], nn.Module]) -> None:
        """Restrict drafting to the token ids ``tokens``, which changes the settings, the LM head and ``d2t``.

        Args:
            tokens: [Vd] int64 token ids of the target, ascending.
            rows: returns an LM head over ``tokens`` alone, given this head's LM head or None for the target's.
        """
        self.lm_head = rows(self.lm_head)
        self._draft_only(tokens)

    def _draft_only(self, tokens: Tensor) -> None:
        self.settings = self.settings.with_draft_vocabulary(len(tokens))
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """Map draft vocabulary ids ``drafted`` (int64, any shape) to the target's token ids."""
        return target_tokens(drafted, self.d2t if self.settings.has_own_vocabulary else None)


def target_tokens(drafted: Tensor, d2t: Tensor | None) -> Tensor:
    """Map draft vocabulary ids to the target's token ids: ``drafted + d2t[drafted]``.

    Args:
        drafted: draft vocabulary ids, int64 of any shape.
        d2t: [Vd] int64 offset of each id. If it is None, both vocabularies are equal, and ``drafted`` is returned.
    """
    return drafted if d2t is None else drafted + d2t[drafted]


class RotaryEmbedding(nn.Module):
    """Compute the cosines and sines of the rotary embedding."""

    turns: Tensor  # [D / 2], radians per position

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.register_buffer("turns", rotary_turns(settings.rope, settings.head_size), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines in ``dtype``, [.., W, D] each, of ``positions`` [.., W]."""
        angles = positions[..., None].float() * self.turns
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding (rotate_half) to ``x`` [.., heads, W, D], same shape.

    Args:
        rotation: cosines and sines, [W, D] each.
    """
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]
