"""Initial weights of an EAGLE-3 head: from the target's last layer, final norm and LM head, or from another head.

A head that starts from the target recomputes the target's last layer from the highest state that the head reads, and
ignores the next token at first.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.artifacts import shown
from yggdrasil.drafters.heads.eagle.config import ACTIVATIONS, HeadSettings
from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.kinds import kind_of
from yggdrasil.drafters.heads.layers import Norm
from yggdrasil.drafters.heads.rotary import USUAL_THETA, rope_of
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.traced import decoder_layers
from yggdrasil.training.target_head import target_head

_NORMS = {"hidden_norm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}


def settings_for(loaded: LoadedModel, draft_vocab_size: int) -> HeadSettings:
    """Return the settings of an EAGLE-3 head with the target's hidden size, attention heads and rotary embedding.

    A rotary embedding or activation that heads do not support is replaced by the default.

    Args:
        draft_vocab_size: number of tokens that the head drafts.
    """
    text = loaded.model.config.get_text_config()
    key_heads, head_size = loaded.sizes.attention
    activation = getattr(text, "hidden_act", None)
    return HeadSettings(
        hidden_size=loaded.hidden_size,
        intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * loaded.hidden_size),
        query_heads=loaded.sizes.query_heads,
        key_heads=key_heads,
        head_size=head_size,
        norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        activation=activation if activation in ACTIVATIONS else "silu",
        vocab_size=loaded.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=loaded.hidden_size,
        rope=_rope_for(getattr(text, "rope_parameters", None) or {}, head_size),
    )


def _rope_for(target: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    """Return the target's rotary parameters in a head's format; default RoPE if heads do not support the type."""
    try:
        return rope_of({"rope_parameters": target}, head_size)
    except ValueError:
        return {"rope_type": "default", "rope_theta": float(target.get("rope_theta") or USUAL_THETA)}


@torch.no_grad()
def initial_head(loaded: LoadedModel, settings: HeadSettings, vocabulary: Tensor) -> EagleHead:
    """Return an EAGLE-3 head in float32 with weights copied from the target's last layer, final norm and LM head.

    Parts of another shape get random weights, the same in every call. The call sets PyTorch's global seed to 0.

    Args:
        vocabulary: [Vd] int64 token ids that the head drafts.

    Raises:
        YggdrasilError: the target's LM head has no weight of shape [V, H].
    """
    torch.manual_seed(0)
    head, model = EagleHead(settings), loaded.model
    hidden = settings.hidden_size
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    head.fc.weight.zero_()
    head.fc.weight[:, -settings.target_hidden_size :] = torch.eye(hidden)
    layer: Any = decoder_layers(model)[-1]
    copy_layer(head.midlayer, layer, hidden, _NORMS)
    copy_norm(head.norm, getattr(model.base_model, "norm", None), hidden)
    head.lm_head.weight.copy_(target_head(loaded).rows[vocabulary])
    if settings.has_own_vocabulary:
        head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    return head


def load_start_head(folder: Path, loaded: LoadedModel) -> EagleHead:
    """Load the EAGLE-3 head in ``folder`` in float32, to start a training run for this target from it.

    Raises:
        YggdrasilError: ``folder`` has no EAGLE-3 head, or the head's settings are not those of ``settings_for``.
    """
    if kind_of(folder) != "eagle3":
        raise YggdrasilError(f"--start {shown(folder)} is no folder of an EAGLE-3 head; leave --start out, or name one")
    head, _ = open_head(folder, torch.float32)
    assert isinstance(head, EagleHead)
    wanted, layers = settings_for(loaded, head.settings.draft_vocab_size), head.settings.readings(loaded.num_layers)[0]
    found = replace(
        head.settings, layers=wanted.layers, convention=wanted.convention, convention_is_said=wanted.convention_is_said
    )
    others = _unlike(found, wanted)
    if layers != wanted.readings(loaded.num_layers)[0]:
        others.append("layers")
    if others:
        raise YggdrasilError(
            f"--start {shown(folder)} is not as heads are that are trained for {loaded.name} (other "
            f"{', '.join(others)}); leave --start out, or name a head of a model of its shape"
        )
    return head


def _unlike(found: HeadSettings, wanted: HeadSettings) -> list[str]:
    return [each.name for each in fields(found) if getattr(found, each.name) != getattr(wanted, each.name)]


def copy_layer(middle: Any, layer: Any, hidden: int, norms: Mapping[str, str]) -> None:
    """Copy the weights of the target's decoder layer ``layer`` to the head's layer ``middle``, where shapes fit.

    Args:
        hidden: the target's hidden size.
        norms: name of a norm in the head's layer -> its name in the target's layer.
    """
    for ours, theirs in norms.items():
        copy_norm(getattr(middle, ours), getattr(layer, theirs, None), hidden)
    for part in ("self_attn", "mlp"):
        for name, linear in getattr(middle, part).named_children():
            found = getattr(getattr(getattr(layer, part, None), name, None), "weight", None)
            if found is None or found.shape[0] != linear.weight.shape[0]:
                continue
            if found.shape == linear.weight.shape:
                linear.weight.copy_(found)
            elif found.shape[1] == hidden:  # ignores the token embedding at first
                linear.weight.zero_()
                linear.weight[:, hidden:] = found


def copy_norm(ours: Norm, theirs: nn.Module | None, size: int) -> None:
    """Copy the factors of the target's norm ``theirs`` to ``ours``; do nothing if ``theirs`` is None.

    The factors are read from outputs for vectors of ``size`` elements, 1 and -1 in turn: an RMS norm whose weights are
    the factors minus 1, and a layer norm, whose bias the difference of two outputs cancels, give them too.
    """
    if theirs is not None:
        weight = getattr(theirs, "weight", torch.ones(1))
        signs = torch.ones(1, size, dtype=weight.dtype, device=weight.device)
        signs[:, 1::2] = -1.0
        ours.weight.copy_(((theirs(signs) - theirs(-signs)) * signs)[0] / 2.0)
