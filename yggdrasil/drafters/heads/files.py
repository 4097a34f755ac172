"""Load EAGLE and block heads: tensors are renamed to one spelling and checked against the configuration."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from yggdrasil.artifacts import shown
from yggdrasil.drafters.heads.block.config import read_block_settings
from yggdrasil.drafters.heads.block.module import BlockHead
from yggdrasil.drafters.heads.eagle.config import HeadSettings, read_settings
from yggdrasil.drafters.heads.eagle.eagle1 import FirstEagleHead
from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead
from yggdrasil.drafters.heads.kinds import kind_of
from yggdrasil.drafters.heads.tensors import drafted_tokens, fill, read_tensors, refuse_others, under_our_names
from yggdrasil.errors import YggdrasilError

EMBEDDING = "embed_tokens.weight"
_OUTPUT = "lm_head.weight"
# Tensors that a head's module does not have: copies of the target's tensors, and tables that are computed.
_IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
_CONFIDENCE = "confidence_head."  # DSpark's estimate of acceptance, which a calibration measures instead
_HEAD_NORM = ".self_attn.q_norm.weight"  # configurations do not always record these norms
_WAY_BACK = "t2d"  # [V] bool: the target's tokens that can be drafted; redundant with d2t
# Prefixes of tensor names of other writers, and ours.
_SPELLINGS = {"layers.0.": "midlayer."}
_FIRST_SPELLINGS = {"transformer.": "layers.0.", "fusion_fc.": "fc."}
_BLOCK_SPELLINGS = {
    "candidate_selector.predecessor_codebook": "successors.previous",
    "candidate_selector.successor_codebook": "successors.following",
    "candidate_selector.hidden_projection.": "successors.projection.",
    "markov_head.markov_w1": "successors.previous",
    "markov_head.markov_w2": "successors.following",
    "markov_head.gate_proj.": "successors.projection.",
    "markov_head.joint_proj.": "successors.projection.",
}
_TABLES = ("successors.previous", "successors.following")  # some files have them as parameters, some as layers
_MASK_EMBEDDING = "mask_embedding.pt"  # some block heads have it instead of an embedding row for the mask token


def open_head(folder: Path, dtype: torch.dtype) -> tuple[EagleHead | FirstEagleHead, Tensor | None]:
    """Load an EAGLE head from ``folder``, with weights in ``dtype``.

    Returns:
        The head, and its token embedding [V, H], or None if the head uses the target's embedding.

    Raises:
        YggdrasilError: the configuration is unsupported or the tensors do not match it.
    """
    is_first = kind_of(folder) == "eagle"
    settings = read_settings(folder, is_first=is_first)
    tensors = _renamed(folder, read_tensors(folder), _FIRST_SPELLINGS if is_first else _SPELLINGS)
    drafted = tensors.pop(_WAY_BACK, None)
    if is_first and settings.fc_bias is None:
        settings = replace(settings, fc_bias="fc.bias" in tensors)
    if any(name.endswith(_HEAD_NORM) for name in tensors):
        settings = replace(settings, head_norms=True)
    head = _empty(settings, brings_output=_OUTPUT in tensors)
    return head, _fill(folder, head, settings, tensors, drafted, dtype)


def open_block(folder: Path, dtype: torch.dtype) -> tuple[BlockHead, Tensor | None]:
    """Load a block head (DFlash, DSpark, JetSpec) from ``folder``, with weights in ``dtype``.

    Returns:
        The head, and its token embedding [V, H], or None if the head uses the target's embedding.

    Raises:
        YggdrasilError: the configuration is unsupported or the tensors do not match it.
    """
    settings = read_block_settings(folder)
    if (folder / _MASK_EMBEDDING).is_file():
        raise YggdrasilError(f"{shown(folder)} brings {_MASK_EMBEDDING}, and masks of a head's own are not served")
    tensors = _renamed(folder, read_tensors(folder), _BLOCK_SPELLINGS)
    drafted = tensors.pop(_WAY_BACK, None)
    with torch.device("meta"):
        head = BlockHead(settings)
        if _OUTPUT in tensors or settings.has_own_vocabulary:
            head.lm_head = nn.Linear(settings.hidden_size, settings.draft_vocab_size, bias=False)
    return head, _fill(folder, head, settings, tensors, drafted, dtype)


def _fill(
    folder: Path,
    head: nn.Module,
    settings: HeadSettings,
    tensors: dict[str, Tensor],
    drafted: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Load ``tensors`` into ``head`` and return the embedding among them, if any; ``drafted`` is t2d or None."""
    embedding_shape = settings.vocab_size, settings.hidden_size
    refuse_others(folder, tensors, head, {EMBEDDING: embedding_shape} if EMBEDDING in tensors else {})
    if settings.has_own_vocabulary:
        tokens = drafted_tokens(folder, "d2t", tensors["d2t"], settings.vocab_size, are_offsets=True)
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        if drafted is not None:
            _check_way_back(folder, tokens, drafted, settings.vocab_size)
    embedding = tensors.pop(EMBEDDING, None)
    fill(head, tensors, dtype)
    return None if embedding is None else embedding.to(dtype)


def _empty(settings: HeadSettings, *, brings_output: bool) -> EagleHead | FirstEagleHead:
    """Return a head on the meta device; ``brings_output`` gives an EAGLE-1 head an LM head."""
    with torch.device("meta"):
        if not settings.is_first:
            return EagleHead(settings)
        head = FirstEagleHead(settings)
        if brings_output:
            head.lm_head = nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)
    return head


def _check_way_back(folder: Path, tokens: Tensor, t2d: Tensor, vocab_size: int) -> None:
    """Raise YggdrasilError if t2d and d2t list different tokens; a t2d of another dtype or shape is ignored."""
    expected = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, tokens, value=True)
    if t2d.dtype == torch.bool and t2d.shape == expected.shape and not torch.equal(t2d, expected):
        raise YggdrasilError(f"{shown(folder)}: {_WAY_BACK} and d2t name other tokens; fetch the head again")


def _renamed(folder: Path, tensors: dict[str, Tensor], spellings: dict[str, str]) -> dict[str, Tensor]:
    """Return ``tensors`` with names in our spelling, without those that the head's module does not have."""

    def ours(name: str) -> str:
        name = name.removeprefix("model.")
        for theirs, own in spellings.items():
            if name.startswith(theirs):
                named = own + name.removeprefix(theirs)
                return named.removesuffix(".weight") if named.startswith(_TABLES) else named
        return name

    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(_IGNORED) and not name.removeprefix("model.").startswith(_CONFIDENCE)
    }
    return under_our_names(folder, kept, ours)
