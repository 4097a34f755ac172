"""Training recipe of DFlash heads (arXiv 2602.06036), which draft a block of tokens in one pass.

A block is a token of the text, its anchor, and masks at the positions after it. The rows of a block attend to each
other and to the target's states before the anchor; row k predicts the token k positions after the anchor. Rows of
different blocks do not attend to each other. Token embedding and LM head are the target's and are not trained.

Dims: B windows, T tokens of a window, N anchors, K rows of a block, H hidden size.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from yggdrasil.drafters.heads.block.config import block_settings_of
from yggdrasil.drafters.heads.block.module import BlockHead
from yggdrasil.drafters.heads.layers import Attend
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.traced import decoder_layers
from yggdrasil.training.eagle import config_of
from yggdrasil.training.start import copy_layer, copy_norm, settings_for
from yggdrasil.training.target_head import target_embedding, target_head
from yggdrasil.training.unroll import Batch, StepOutput

_BLOCK = 8  # rows: an anchor and seven masks
_LAYERS = 2
_ANCHORS = 4  # trained tokens of a window for each anchor
_NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}


class DFlashRecipe:
    """Recipe of a DFlash head of two layers that reads the outputs of three of the target's layers."""

    title = "DFlash head"
    rate = 1.5e-3
    num_taught = _BLOCK - 1

    def __init__(self, loaded: LoadedModel, vocabulary: Tensor) -> None:
        """Prepare the recipe; the loss covers the tokens ``vocabulary`` [Vd] int64, but the head drafts all tokens."""
        self._loaded = loaded
        self._embedding = target_embedding(loaded).float()
        self._output = target_head(loaded).restricted_to(vocabulary)
        self._config = _config_of(loaded, mask_token=int(self._embedding.any(-1).nonzero()[-1]))
        self._settings = block_settings_of(self._config)
        self.layers = self._settings.readings(loaded.num_layers)[0]

    @torch.no_grad()
    def initial(self) -> BlockHead:
        """Return the untrained float32 head, with layers from the target's last; the same in every call."""
        torch.manual_seed(0)
        head, hidden = BlockHead(self._settings), self._settings.hidden_size
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        head.fc.weight.zero_()
        head.fc.weight[:, -hidden:] = torch.eye(hidden)
        layers: Any = decoder_layers(self._loaded.model)
        for ours, theirs in zip(head.layers, layers[-_LAYERS:], strict=False):
            copy_layer(ours, theirs, hidden, _NORMS)
        copy_norm(head.norm, getattr(self._loaded.model.base_model, "norm", None), hidden)
        return head

    def steps(self, model: nn.Module, batch: Batch, count: int) -> Iterator[StepOutput]:
        """Yield, for k = 1 to ``count`` (at most 7), the logits for trained tokens k positions after an anchor.

        Row k of the anchor's block gives the logits. Step k reaches only tokens k positions after an anchor.
        """
        assert isinstance(model, BlockHead)
        anchors, exists = choose_anchors(batch.learned)
        outputs = block_outputs(model, self._embedding, batch, anchors)
        windows, positions = batch.places
        block_of = torch.full_like(batch.tokens, -1)  # [B, T]: the block whose anchor a token is
        places = exists.nonzero(as_tuple=True)
        block_of[places[0], anchors[places]] = places[1]
        for step in range(min(count, self.num_taught)):
            anchor = positions - step
            blocks = torch.where(anchor < 0, -1, block_of[windows, anchor.clamp(min=0)])
            reached = blocks >= 0
            rows = outputs[windows[reached], blocks[reached], step + 1]
            yield StepOutput(self._output.logits(rows), reached)

    def write(self, model: nn.Module, folder: Path) -> None:
        """Write a trained head to the existing ``folder``: bfloat16 weights without embedding or LM head, config.json.

        Files of the same names are replaced.
        """
        tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")


def choose_anchors(learned: Tensor) -> tuple[Tensor, Tensor]:
    """Choose N positions of each window at random as anchors; with gradients disabled, always the same positions.

    ``learned`` [B, T] bool marks the positions whose next token is trained on; anchors are chosen from these. N is a
    quarter of the marked positions of the window that has most, at least 1.

    Returns:
        Positions of the anchors, [B, N] int64, and whether each exists, [B, N] bool: a window may have fewer than N.
    """
    generator = None if torch.is_grad_enabled() else torch.Generator().manual_seed(0)
    order = torch.rand(learned.shape, generator=generator).to(learned.device).masked_fill(~learned, -1.0)
    found = order.topk(max(1, int(learned.sum(1).max()) // _ANCHORS), dim=1)
    return found.indices, found.values >= 0


def block_outputs(head: BlockHead, embedding: Tensor, batch: Batch, anchors: Tensor) -> Tensor:
    """Return the head's outputs, after the last norm, for the blocks of all anchors, [B, N, K, H].

    A block is the token of its anchor and K - 1 masks. Its rows attend to each other and to the text before the anchor.

    Args:
        embedding: [V, H] token embedding of the target.
        batch: windows of training text.
        anchors: [B, N] int64 positions in the windows.
    """
    size, device = head.settings.block_size, anchors.device
    tokens = torch.full((*anchors.shape, size), head.settings.mask_token, device=device)
    tokens[..., 0] = batch.tokens.gather(1, anchors)
    positions = anchors[..., None] + torch.arange(size, device=device)
    text = torch.arange(batch.tokens.shape[1], device=device)
    context = head.context(batch.states, text)
    before = (text < anchors[..., None]).repeat_interleave(size, 1)  # [B, N * K, T]
    own = torch.eye(anchors.shape[1], dtype=torch.bool, device=device)
    own = own.repeat_interleave(size, 0).repeat_interleave(size, 1).expand(len(anchors), -1, -1)
    mask = torch.cat([before, own], dim=-1)[:, None]
    attends = [_attention(*rows, mask) for rows in context]
    embedded = functional.embedding(tokens.flatten(1), embedding)
    outputs: Tensor = head(embedded, positions.flatten(1)[:, None], attends.__getitem__)
    return outputs.view(*tokens.shape, -1)


def _attention(keys: Tensor, values: Tensor, mask: Tensor) -> Attend:
    """Return the attention of blocks over the text's ``keys`` and ``values`` [B, Hkv, T, D] and their own rows."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        all_keys = torch.cat([keys, key], dim=2).repeat_interleave(groups, dim=1)
        all_values = torch.cat([values, value], dim=2).repeat_interleave(groups, dim=1)
        output: Tensor = functional.scaled_dot_product_attention(query, all_keys, all_values, attn_mask=mask)
        return output.transpose(1, 2)

    return attend


def _config_of(loaded: LoadedModel, mask_token: int) -> dict[str, Any]:
    """Return the content of config.json of a DFlash head for a target, with z-lab's field names."""
    settings = settings_for(loaded, loaded.vocab_size)
    layers = settings.readings(loaded.num_layers)[0]
    common = config_of(settings, layers, loaded.num_layers)
    for name in ("draft_vocab_size", "layer_convention", "eagle_aux_hidden_state_layer_ids"):
        common.pop(name, None)
    return {
        **common,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": _LAYERS,
        "num_target_layers": loaded.num_layers,
        "block_size": _BLOCK,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": list(layers)},
    }
