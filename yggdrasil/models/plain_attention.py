"""Transformers' own attention, for passes over batches of whole texts that no step computes."""

from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from yggdrasil.models.attention import own_attention


def plain_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """The model with the quickest attention of transformers that it has, while the block runs."""
    # Gemma 2 bounds its scores, which PyTorch's operator does not.
    return own_attention(model, "sdpa" if model._supports_sdpa else "eager")
