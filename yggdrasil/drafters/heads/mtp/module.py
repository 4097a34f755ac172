"""A target's MTP (multi-token prediction) module: one more decoder layer of its family, which predicts hidden states.

The decoder layer is transformers' own class; the caller supplies the attention, as for all heads. Only the first module
of a target is used, repeatedly for deeper tokens.

Dims: W rows, H hidden size.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.eagle.state_head import StateHead
from yggdrasil.drafters.heads.layers import Attend, Norm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ATTENTION_NAME = "yggdrasil_head"
# Changes by which a configuration's only layer is of the kind that the family's module has, with or without experts.
_CHANGES = {"glm4_moe": {"first_k_dense_replace": 0}, "ernie4_5_moe": {"moe_layer_start_index": 1}}


class MtpHead(StateHead):
    """One decoder layer that predicts the target's next hidden state, as the target's last norm would return it."""

    def __init__(
        self, settings: HeadSettings, config: "PretrainedConfig", *, is_hidden_first: bool, norm_offset: float
    ) -> None:
        super().__init__(settings)
        hidden, eps = settings.hidden_size, settings.norm_eps
        self.embedding_norm, self.hidden_norm, self.norm = (Norm(hidden, eps, norm_offset) for _ in range(3))
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        self.block, self.rotary = _layer_of(config)
        self.is_hidden_first = is_hidden_first

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Return predicted hidden states of the target [.., W, H], inputs of its LM head.

        Args:
            embedded: [.., W, H] embeddings of W tokens.
            features: [.., W, H] hidden states of the tokens before them.
            positions: [W] int64 positions for the rotary embedding.
            attend: attention of rotated queries to keys and values (``layers.Attend``).
            rows: [R] int64 indices of the rows whose outputs [R, H] are returned; None returns those of all W rows.
                Outputs are computed for all rows. Inputs must be [W, H] if ``rows`` is given.
        """
        parts = [self.embedding_norm(embedded), self.hidden_norm(features)]
        fused = self.projection(torch.cat(parts[::-1] if self.is_hidden_first else parts, dim=-1))
        is_one = fused.dim() == 2  # the layer wants a batch
        x = fused[None] if is_one else fused
        output: Tensor = self.block(
            x, position_ids=positions[None], position_embeddings=self.rotary(x, self._rotary_positions(positions)),
            attend=_in_a_batch(attend) if is_one else attend,
        )  # fmt: skip
        if is_one:
            output = output[0] if rows is None else output[0, rows]
        normed: Tensor = self.norm(output)
        return normed

    def _rotary_positions(self, positions: Tensor) -> Tensor:
        """Return the positions [W] as the rotary embedding takes them: [1, W], or [3, 1, W] in multimodal families."""
        if hasattr(self.rotary, "mrope_section"):
            return positions[None, None].expand(3, 1, -1)  # transformers before 5.19 does not expand them itself
        return positions[None]


def _layer_of(config: "PretrainedConfig") -> tuple[nn.Module, nn.Module]:
    """Return a decoder layer of the family on the meta device, and its rotary embedding on the CPU."""
    from transformers import AttentionInterface, AutoModelForCausalLM  # imported here: it loads transformers' models

    AttentionInterface.register(_ATTENTION_NAME, _attention)
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    if getattr(one, "layer_types", None):
        one.layer_types = ["full_attention"]
    for name, value in _CHANGES.get(one.model_type, {}).items():
        setattr(one, name, value)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(one, attn_implementation=_ATTENTION_NAME)
    decoder = model.get_decoder()
    with torch.device("cpu"):  # the rotary embedding is computed, and files do not have it
        return decoder.layers[0], type(decoder.rotary_emb)(one)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, attend: Attend, **__: object
) -> tuple[Tensor, None]:
    """Call ``attend`` on [B, heads, W, D] as transformers calls an attention; return ([B, W, Hq, D], None)."""
    return attend(query, key, value), None


def _in_a_batch(attend: Attend) -> Attend:
    def of_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query[0], key[0], value[0])[None]

    return of_one
