"""A model ready for static-shape steps: its tensors by name, and the code that is traced over them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yggdrasil.checkpoints.outline import Outline

if TYPE_CHECKING:  # native steps never import transformers' models
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be traced: packed linears, our attention, and its tensors by name."""

    name: str
    outline: Outline
    num_threads: int
    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, Tensor]  # parameters and buffers by name: what a step takes as its weights
    formats: dict[str, int]  # GGUF's numbers for the formats of quantised layers, by their names
    config: Mapping[str, Any]  # what config.json says; nothing of a head
    described: str  # the model's configuration as it runs
    build: Callable[[], "PreTrainedModel"]  # over the same tensors, or the same weights where it is described
    is_described: bool = False  # its tensors are those of native steps, which need no model

    @cached_property
    def model(self) -> "PreTrainedModel":
        """What is traced; native steps never ask for it."""
        return self.build()

    @property
    def max_context(self) -> int:
        """Positions the model was built for."""
        return self.outline.max_context

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: at least the tokens of the tokenizer, often padded."""
        return self.outline.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self.outline.key_heads)

    @property
    def hidden_size(self) -> int:
        return self.outline.hidden_size
