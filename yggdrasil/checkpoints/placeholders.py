"""A model beside whose weights blocks are read: one number stands in for all of a weight that no layer will read.

Loaded the usual way, a mixture of 18 GB would take 60 GB of disk and, until it is packed, of memory.
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


def load_beside_blocks(
    folder: Path, dtype: torch.dtype, values: Callable[[str, torch.dtype], Tensor | None] | None = None, **options: Any
) -> Any:
    """What ``from_pretrained`` gives of a folder, where placeholders take the place of weights that it lacks.

    ``values`` may give the numbers of such a weight by its name.
    """
    config = AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)  # blocks are ours to read
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
        else:  # not a number: should it be read after all, it is seen
            weights[name] = torch.full((), torch.nan, dtype=dtype).expand(weight.shape)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **options)


def stands_in(weight: Tensor) -> bool:
    """Whether ``weight`` is one number for all."""
    return weight.numel() > 1 and not any(weight.stride())


def refuse_placeholders(model: PreTrainedModel) -> None:
    """AssertionError where a layer still holds one after packing."""
    left = [name for name, weight in model.named_parameters() if stands_in(weight)]
    assert not left, f"blocks were to be read in the place of {left}"
