"""Tree attention, registered as a transformers attention function.

Steps call a model with the tree mask [1, 1, W, T] bool, which transformers passes on unchanged, and with the keyword
argument ``step_cache``, which every supported model passes on to its attention function.

Dims: W rows of the pass, T tree slots that the mask covers, Hq query heads, Hkv key heads, D head size.
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


# Arguments of some families' attention that tree attention does not support. Ignoring them would give wrong outputs.
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
    """Write a pass's keys and values to the KV cache, and compute each row's attention over the keys that it sees.

    Args:
        module: the attention layer.
        query: [1, Hq, W, D].
        key, value: [1, Hkv, W, D]; the head size of ``value`` may be smaller.
        attention_mask: [1, 1, W, T] bool; entry (w, t) says whether row w sees slot context length + t. All rows see
            the slots before the context length.
        scaling: factor of the scores; None means 1 / sqrt(D).
        sliding_window: number of last keys that a row sees; None means all, or the row's chunk (``attention_chunk``).
        softcap: bound of the scores by tanh as in Gemma 2; None means no bound.
        s_aux: [Hq], attention sinks: one extra score per head without a value; None means no sinks.
        step_cache: the step's KV cache and offsets.
        num_threads: CPU threads of the operator.

    Returns:
        (Outputs [1, W, Hq, D of ``value``], None in place of the attention weights)

    Raises:
        YggdrasilError: ``extra`` has an argument that tree attention does not support.
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
    """Raise an error if a layer calls its attention function with an argument that tree attention does not support.

    Args:
        module: the layer; the message has its class.
        extra: keyword arguments that have no parameter in ``tree_attention``. Unknown names are accepted.

    Raises:
        YggdrasilError: position_bias, alibi, indices or head_mask is present and not None.
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
    """Context manager: switch ``model`` to an attention implementation of transformers, and on exit to tree attention.

    ``name`` is the implementation; None means "sdpa", or "eager" if the model does not support sdpa.
    """
    # Models with soft-capped scores, such as Gemma 2, do not support sdpa.
    model.set_attn_implementation(name or ("sdpa" if model._supports_sdpa else "eager"))
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


AttentionInterface.register(ATTENTION_NAME, tree_attention)
AttentionMaskInterface.register(ATTENTION_NAME, keep_mask)
