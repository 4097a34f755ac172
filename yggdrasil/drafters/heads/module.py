"""An EAGLE-3 head as a module whose tensors have the names of published files.

The target's embedding belongs to the target and is handed in as rows; how rows attend to each other is the caller's:
over a tree's cache when drafting, over steps of an unrolled head when training.

Dims: W rows, H the head's hidden size, S the target's states side by side, D head size, Hq and Hkv heads.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.drafters.heads.settings import HeadSettings

# query [.., Hq, W, D], keys and values [.., Hkv, W, D], turned by their positions -> [.., W, Hq, D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class Norm(nn.Module):
    """Root-mean-square norm, in float32 whatever the weights are."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        inputs, size, bias = 2 * settings.hidden_size, settings.head_size, settings.attention_bias
        self.q_proj = nn.Linear(inputs, settings.query_heads * size, bias=bias)
        self.k_proj = nn.Linear(inputs, settings.key_heads * size, bias=bias)
        self.v_proj = nn.Linear(inputs, settings.key_heads * size, bias=bias)
        self.o_proj = nn.Linear(settings.query_heads * size, settings.hidden_size, bias=bias)
        self.size = size

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.size)).transpose(-3, -2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        output: Tensor = self.o_proj(attend(turned(query, turn), turned(key, turn), value).flatten(-2))
        return output


class _FeedForward(nn.Module):
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


class _MiddleLayer(nn.Module):
    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        hidden, eps = settings.hidden_size, settings.norm_eps
        self.input_layernorm = Norm(hidden, eps)
        self.hidden_norm = Norm(hidden, eps)
        self.self_attn = _Attention(settings)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = _FeedForward(settings)
        self._keeps_normed = settings.norm_before_residual

    def forward(self, embedded: Tensor, features: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        h = (normed if self._keeps_normed else features) + self.self_attn(both, turn, attend)
        output: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return output


class EagleHead(nn.Module):
    """One layer between the target's states and guesses at the token after next."""

    turns: Tensor  # [D / 2], radians a position
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
        turns, self._scale = rotary_turns(settings.rope, settings.head_size)
        self.register_buffer("turns", turns, persistent=False)
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

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Outputs [.., W, H] of rows that each read a token's embedding and the feature of the position before it."""
        angles = positions[..., None].float() * self.turns
        angles = torch.cat([angles, angles], dim=-1)
        turn = (angles.cos() * self._scale).to(embedded.dtype), (angles.sin() * self._scale).to(embedded.dtype)
        output: Tensor = self.midlayer(embedded, features, turn, attend)
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


def target_tokens(drafted: Tensor, d2t: Tensor | None) -> Tensor:
    """The target's tokens of drafted ones; ``d2t`` as in ``EagleHead``, None where both vocabularies are one."""
    return drafted if d2t is None else drafted + d2t[drafted]


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """``x`` [.., heads, W, D] by cosines and sines [W, D]: the two halves of a head are the pairs' first and second."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


def rotary_turns(rope: dict[str, Any], size: int) -> tuple[Tensor, float]:
    """Radians a position of each pair of channels, [size / 2], and what cosines and sines are multiplied by."""
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    # On the host even where a module without memory is made: it is no weight that a file would bring.
    turns = theta ** -(torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
    if kind == "linear":
        return turns / float(rope["factor"]), 1.0
    if kind == "llama3":
        length = float(rope["original_max_position_embeddings"])
        low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
        cycles = length * turns / (2 * math.pi)
        smooth = ((cycles - low) / (high - low)).clamp(0.0, 1.0)
        return turns * ((1 - smooth) / factor + smooth), 1.0
    return turns, 1.0
