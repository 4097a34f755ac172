"""Tree attention as a transformers attention function.

Models are called with the step's tree mask [1, 1, W, T] bool; transformers passes a 4-D mask through unchanged. The
cache object (``step_cache``) holds the context length and the slots to write; every supported model passes it to its
attention function as an extra argument.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.step_cache import StepCache

ATTENTION_NAME = "yggdrasil_tree"


# Arguments of some families' attention that tree attention does not support; ignoring one would be silently wrong.
_UNSUPPORTED = ("position_bias", "alibi", "indices", "head_mask")


def tree_attention(  # noqa: PLR0913  (the signature is transformers')
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    step_cache: StepCache,
    num_threads: int,
    **extra: object,
) -> tuple[Tensor, None]:
    """Write a pass's keys and values to the cache, and attend to the committed tokens and the tree's allowed slots.

    Args:
        module: the attention layer.
        query: [1, Hq, W, D].
        key, value: [1, Hkv, W, D].
        attention_mask: [1, 1, W, T] bool; entry (w, t) says whether row w sees slot context length + t.
        scaling: factor of the scores; None: 1 / sqrt(D).
        sliding_window: number of last keys that a row sees; None: all.
        softcap: bound of scores as in Gemma 2; None: no bound.
        s_aux: [Hq], attention sinks: one extra score per head without a value; None: none.
        step_cache: the keys, values and offsets of the step.

    Returns:
        (Outputs [1, W, Hq, D of ``value``], None)

    Raises:
        YggdrasilError: ``extra`` has an argument that tree attention does not compute.
    """
    refuse_extras(module, extra)
    layer = module.layer_idx
    assert isinstance(layer, int)
    step_cache.layers_read.add(layer)
    value_size = value.shape[-1]
    if value_size < key.shape[-1]:  # latent attention: the cache has one head size, so values are padded with zeros
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - value_size))
    output = torch.ops.yggdrasil.tree_attention(
        query, key, value, step_cache.step_keys[layer], step_cache.step_values[layer], step_cache.offsets,
        attention_mask[0, 0], scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window or -attention_chunk(module),
        softcap or 0.0, s_aux, num_threads,
    )  # fmt: skip
    return output[..., :value_size], None


def attention_chunk(module: nn.Module) -> int:
    """Return the chunk size, in positions, of a layer with chunked attention (Llama 4); 0 for other layers."""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None) or ()
    kind = types[module.layer_idx] if types else ""
    return int(config.attention_chunk_size) if kind == "chunked_attention" else 0


def refuse_extras(module: nn.Module, extra: Mapping[str, object]) -> None:
    """Check the keyword arguments of a layer's attention call that have no parameter in ``tree_attention``.

    Args:
        module: the layer, named in messages.
        extra: the arguments. None as a value, and unknown names, are accepted.

    Raises:
        YggdrasilError: position_bias, alibi, indices or head_mask is given, which tree attention does not compute.
    """
    unsupported = [name for name in _UNSUPPORTED if extra.get(name) is not None]
    if unsupported:
        raise YggdrasilError(
            f"{type(module).__name__} adds {unsupported[0]} to its attention, which tree attention does not compute; "
            "this model cannot be served"
        )


def keep_mask(*_: object, **kwargs: object) -> object:
    """Mask function for transformers: return the argument ``attention_mask`` unchanged, or None if it is missing."""
    return kwargs.get("attention_mask")


@contextmanager
def own_attention(model: PreTrainedModel, name: str | None = None) -> Iterator[None]:
    """Context manager: run ``model`` with an attention of transformers in the block, and with tree attention after it.

    ``name`` is that of the attention; None: "sdpa", or "eager" if the model does not support sdpa.
    """
    # Models with soft-capped scores, such as Gemma 2, do not support sdpa.
    model.set_attn_implementation(name or ("sdpa" if model._supports_sdpa else "eager"))
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


AttentionInterface.register(ATTENTION_NAME, tree_attention)
AttentionMaskInterface.register(ATTENTION_NAME, keep_mask)
