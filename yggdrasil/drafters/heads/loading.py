"""Load a head together with its target: linears are packed, and the target's embedding is shared without a copy."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from yggdrasil.artifacts import shown
from yggdrasil.checkpoints.formats.layers import formats_of
from yggdrasil.checkpoints.formats.rounding import quantised_to_q4_1
from yggdrasil.checkpoints.fused import fuse_linears
from yggdrasil.checkpoints.model_sizes import ModelSizes
from yggdrasil.checkpoints.packing import pack_linears
from yggdrasil.drafters.heads.block.config import BlockSettings
from yggdrasil.drafters.heads.block.module import BlockHead
from yggdrasil.drafters.heads.draft_vocabulary import Vocabulary
from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.eagle.eagle1 import FirstEagleHead
from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead
from yggdrasil.drafters.heads.eagle.state_head import StateHead
from yggdrasil.drafters.heads.files import open_block, open_head
from yggdrasil.drafters.heads.kinds import kind_of
from yggdrasil.drafters.heads.medusa.files import open_medusa
from yggdrasil.drafters.heads.medusa.module import MedusaHeads, MedusaSettings
from yggdrasil.drafters.heads.mtp.files import open_mtp
from yggdrasil.drafters.heads.mtp.module import MtpHead
from yggdrasil.drafters.heads.target_layers import embedding_of, output_of, rows_of, shared_embedding
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.runtime.loaded import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ANY_LENGTH = 1 << 20


Head = EagleHead | FirstEagleHead | MedusaHeads | MtpHead | BlockHead


class LoadedHead(NamedTuple):
    """A loaded head, its settings, and the target's layers whose outputs it reads."""

    loaded: LoadedModel
    settings: HeadSettings | MedusaSettings
    readings: list[tuple[int, ...]]  # possible ``layers``, one tuple per numbering convention, the default's first
    layers: tuple[int, ...]  # the target's layers whose outputs the head reads

    @property
    def drafts_all_tokens(self) -> bool:
        """Whether the head drafts the target's whole vocabulary, so that it can be restricted to frequent tokens."""
        return not self.settings.has_own_vocabulary


class DraftingHead(nn.Module):
    """A head and its token embedding, which is an Identity for Medusa heads, since these read no tokens."""

    def __init__(self, head: Head, embedding: nn.Module) -> None:
        super().__init__()
        self.head, self.embedding = head, embedding


def load_head(folder: Path, target: LoadedModel, num_threads: int, vocabulary: Vocabulary | None = None) -> LoadedHead:
    """Load the draft head in ``folder`` for ``target``, in the target's dtype.

    ``layers`` of the result is the first of ``readings``; ``with_detected_layers`` finds the right one. On a CPU,
    linear layers are packed, and quantised to 4 bits if the target is quantised or in bfloat16. On a GPU, linear layers
    with the same input are joined.

    Args:
        num_threads: CPU threads of the head's linear layers.
        vocabulary: tokens to draft, for a head whose LM head is over the target's vocabulary: the rows of these tokens
            are copied, and a pass reads no other rows. With None the head drafts all tokens.

    Raises:
        YggdrasilError: the head is unsupported, or the head or ``vocabulary`` belongs to another target.
    """
    head, embedding = _opened(folder, target)
    if vocabulary is not None:
        _draft_among(vocabulary, head, folder, target)
    module = DraftingHead(head.to(target.device), embedding.to(target.device))
    if target.device.type == "cpu":
        # A pass has few rows, so reading weights dominates. Four bits are a third of the bytes; drafts are verified.
        is_rounded = bool(target.formats) or (is_native() and target.dtype == torch.bfloat16)
        pack_linears(module.head, num_threads, quantised_to_q4_1 if is_rounded else None)
    else:
        fuse_linears(module.head)
    if isinstance(head, StateHead | BlockHead) and head.lm_head is None:
        head.lm_head = output_of(target, num_threads)
    settings = head.settings
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    query_heads, rows = _attention_of(settings)
    sizes = ModelSizes(_ANY_LENGTH, settings.vocab_size, settings.hidden_size, query_heads, rows, None)
    loaded = LoadedModel(
        str(folder), sizes, num_threads, target.dtype, target.device, tensors, formats_of(module), {},
        json.dumps(asdict(settings), sort_keys=True), lambda: cast("PreTrainedModel", module),
    )  # fmt: skip
    readings = settings.readings(target.num_layers)
    return LoadedHead(loaded, settings, readings, readings[0])


def _attention_of(settings: HeadSettings | MedusaSettings) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the number of query heads, and (key heads, head size) of every layer that has a KV cache."""
    if isinstance(settings, MedusaSettings):  # steps take a cache, so heads without attention get a minimal one
        return 1, ((1, 1),)
    return settings.query_heads, ((settings.key_heads, settings.head_size),) * settings.num_layers


def _opened(folder: Path, target: LoadedModel) -> tuple[Head, nn.Module]:
    """Return the head and its token embedding."""
    kind = kind_of(folder)
    if kind == "medusa":
        heads = open_medusa(folder, target.dtype)
        _check_fit(folder, (heads.settings.hidden_size, heads.settings.vocab_size), target)
        return heads, nn.Identity()
    head: EagleHead | FirstEagleHead | MtpHead | BlockHead
    if kind == "dflash":
        head, own = open_block(folder, target.dtype)
        _check_depth(folder, head.settings, target)
    else:
        head, own = (open_mtp(folder, target.dtype), None) if kind == "mtp" else open_head(folder, target.dtype)
    settings = head.settings
    _check_fit(folder, (settings.target_hidden_size, settings.vocab_size), target)
    if own is None or settings.is_first:  # it uses the target's embedding, or predicts the target's hidden states
        _check_fit(folder, (settings.hidden_size, settings.vocab_size), target)
    highest = target.num_layers - (settings.convention_is_said and settings.convention == "outputs")
    if settings.layers is not None and max(settings.layers) > highest:
        raise YggdrasilError(
            f"{shown(folder)} reads layer {max(settings.layers)} of its target, and {target.name} has "
            f"{target.num_layers}; give a head that was trained for this target"
        )
    return head, embedding_of(target) if own is None else shared_embedding(own)


def _draft_among(vocabulary: Vocabulary, head: Head, folder: Path, target: LoadedModel) -> None:
    """Restrict ``head`` to ``vocabulary``, with the rows of its own LM head or, without one, of the target's."""
    tokens = vocabulary.tokens
    if head.settings.has_own_vocabulary:
        raise YggdrasilError(f"{shown(folder)} has an output layer of its own tokens and takes no other vocabulary")
    if int(tokens[-1]) >= target.vocab_size:
        raise YggdrasilError(
            f"{shown(folder)} is to draft token {int(tokens[-1])}, and {target.name} has {target.vocab_size}; "
            "calibrate again"
        )
    head.restrict_to(tokens, lambda own: rows_of(own or output_of(target, 1), tokens, target.dtype))


def _check_depth(folder: Path, settings: BlockSettings, target: LoadedModel) -> None:
    """Raise YggdrasilError if the head records another number of target layers than ``target`` has."""
    if settings.target_layers not in (None, target.num_layers):
        raise YggdrasilError(
            f"{shown(folder)} is a head for {settings.target_layers} layers, and {target.name} has "
            f"{target.num_layers}; give a head that was trained for this target"
        )


def _check_fit(folder: Path, sizes: tuple[int, int], target: LoadedModel) -> None:
    """Raise YggdrasilError if ``sizes``, the head's (hidden size, vocabulary size), differ from the target's."""
    wanted = target.hidden_size, target.vocab_size
    for what, size, has in zip(("a hidden size", "a vocabulary"), sizes, wanted, strict=True):
        if size != has:
            raise YggdrasilError(
                f"{shown(folder)} is a head for {what} of {size}, and {target.name} has {has}; give a head that was "
                "trained for this target"
            )
