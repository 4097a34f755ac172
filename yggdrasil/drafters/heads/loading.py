"""A head beside its target, ready for static steps: packed linears, and the target's embedding without a copy."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor, nn

from yggdrasil.artifacts import shown
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.module import EagleHead
from yggdrasil.drafters.heads.settings import HeadSettings
from yggdrasil.errors import YggdrasilError
from yggdrasil.models.formats.layers import QuantisedEmbedding
from yggdrasil.models.formats.rows import PackedRows
from yggdrasil.models.loaded import LoadedModel
from yggdrasil.models.outline import Outline
from yggdrasil.models.packing import pack_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What families call their embedding.
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
_ANY_LENGTH = 1 << 20


class LoadedHead(NamedTuple):
    """A head with its tensors, and the target's layers that it reads."""

    loaded: LoadedModel
    settings: HeadSettings
    readings: list[tuple[int, ...]]  # the layers that it may mean, the usual convention's first
    layers: tuple[int, ...]  # of the target, whose outputs it reads


class DraftingHead(nn.Module):
    """A head and the embedding that it reads tokens through."""

    def __init__(self, head: EagleHead, embedding: nn.Module) -> None:
        super().__init__()
        self.head, self.embedding = head, embedding


def load_head(folder: Path, target: LoadedModel, num_threads: int) -> LoadedHead:
    """The head in ``folder`` over ``target``, in its arithmetic, reading the layers of the usual convention.

    Raises:
        YggdrasilError: the head is not served, or is another target's.
    """
    head, own = open_head(folder, target.dtype)
    settings = head.settings
    _check_fit(folder, settings, target)
    embedding = _embedding_of(target) if own is None else _table(own)
    module = DraftingHead(head.to(target.device), embedding.to(target.device))
    pack_linears(module.head, num_threads)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    outline = Outline(
        _ANY_LENGTH, settings.vocab_size, settings.hidden_size, settings.query_heads,
        ((settings.key_heads, settings.head_size),), None,
    )  # fmt: skip
    formats = [embedding.format] if isinstance(embedding, QuantisedEmbedding) else []
    loaded = LoadedModel(
        str(folder), outline, num_threads, target.dtype, target.device, tensors, formats,
        json.dumps(asdict(settings), sort_keys=True), lambda: cast("PreTrainedModel", module),
    )  # fmt: skip
    readings = settings.readings(target.num_layers)
    return LoadedHead(loaded, settings, readings, readings[0])


def _check_fit(folder: Path, settings: HeadSettings, target: LoadedModel) -> None:
    found = {"states": settings.target_hidden_size, "tokens": settings.vocab_size}
    wanted = {"states": target.hidden_size, "tokens": target.vocab_size}
    for name, size in found.items():
        if size != wanted[name]:
            what = "a hidden size" if name == "states" else "a vocabulary"
            raise YggdrasilError(
                f"{shown(folder)} is a head for {what} of {size}, and {target.name} has {wanted[name]}; give a head "
                "that was trained for this target"
            )


def _embedding_of(target: LoadedModel) -> nn.Module:
    """The target's embedding over the target's own memory."""
    for name, tensor in target.tensors.items():
        *_, module, part = ("", *name.split("."))
        if module in _EMBEDDINGS and part == "weight":
            return _table(tensor)
        if module in _EMBEDDINGS and part == "packed":  # the first of a model's quantised layers
            rows = PackedRows(target.formats[0], target.vocab_size, target.hidden_size, tensor)
            return QuantisedEmbedding(rows, target.dtype)
    weight = getattr(target.model.get_input_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[-1] != target.hidden_size:
        raise YggdrasilError(f"{target.name} has no embedding that a head could read; give a head that brings its own")
    return _table(weight)


def _table(weight: Tensor) -> nn.Module:
    embedding: nn.Module = nn.Embedding.from_pretrained(weight)
    return embedding
