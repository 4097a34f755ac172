"""Loads a model with placeholders (one NaN, expanded to the full shape) for weights that are read as quantised blocks.

Dequantising these weights would take 60 GB of disk and, until they are packed, of memory for an 18 GB mixture.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from yggdrasil.checkpoints.gguf.checkpoint import empty_model
from yggdrasil.checkpoints.gguf.experts import own_weights
from yggdrasil.checkpoints.mxfp4 import BLOCKS, SCALES

_PARTS = (BLOCKS, SCALES)


def load_with_placeholders(
    folder: Path, dtype: torch.dtype, values: Callable[[str, torch.dtype], Tensor | None] | None = None, **options: Any
) -> Any:
    """Load the transformers model in ``folder`` with placeholders, tensors of NaN, for the weights that it lacks.

    ``values`` (weight name, dtype) may return the values of a lacking weight, or None for a placeholder. ``options``
    are passed to ``from_pretrained``, whose result is returned.
    """
    config = AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)  # transformers must not read the quantised blocks
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            weights |= {name: stored.get_tensor(name) for name in stored.keys() if not name.endswith(_PARTS)}  # noqa: SIM118
    for name, weight in own_weights(empty_model(config)).items():
        if name in weights:
            continue
        known = None if values is None else values(name, dtype)
        if known is not None:
            weights[name] = known
        else:  # NaN, so that reading it by mistake is noticed
            weights[name] = torch.full((), torch.nan, dtype=dtype).expand(weight.shape)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **options)


def check_no_placeholders(model: PreTrainedModel) -> None:
    """Raise AssertionError if a parameter of ``model`` is a placeholder, a tensor with zero strides."""
    left = [name for name, weight in model.named_parameters() if weight.numel() > 1 and not any(weight.stride())]
    assert not left, f"blocks were to be read in the place of {left}"
