"""A loaded model, ready for static-shape steps: its tensors by name, sizes, and the module that is traced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yggdrasil.checkpoints.model_sizes import ModelSizes

if TYPE_CHECKING:  # native steps never import transformers' models
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LoadedModel:
    """A model with packed weights and tree attention, from which steps are built."""

    name: str  # the name that the user gave, for messages; for a draft head its folder
    sizes: ModelSizes
    num_threads: int  # CPU threads of the model's kernels
    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, Tensor]  # parameters and buffers by name, which steps take as their weights
    formats: dict[str, int]  # GGUF type numbers of quantised layers, by layer name
    config: Mapping[str, Any]  # the text model's configuration as in config.json; empty for a draft head
    described: str  # the whole configuration as JSON text
    build: Callable[[], "PreTrainedModel"]  # returns the transformers model, for ``model``
    is_described: bool = False  # whether ``tensors`` have names and layouts that only native steps can read

    @cached_property
    def model(self) -> "PreTrainedModel":
        """The transformers model, built at the first access. Native steps do not need it."""
        return self.build()

    @property
    def max_context(self) -> int:
        """Largest number of positions, in tokens, that the model supports."""
        return self.sizes.max_context

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding: at least the tokenizer's tokens, often padded."""
        return self.sizes.vocab_size

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.sizes.key_heads)

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states."""
        return self.sizes.hidden_size
