"""Medusa's heads as they are trained: all from one state of the target, written in the form that vLLM reads.

They share one output layer of the drafted tokens, which begins as those rows of the target's own: else the heads would
read more weights than a small target does.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from yggdrasil.drafters.heads.medusa.module import MedusaHeads, MedusaSettings
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.training.target_head import target_head
from yggdrasil.training.unroll import Batch, StepOutput

_NUM_HEADS = 5


class MedusaRecipe:
    """Five heads of one residual block over one output layer."""

    title = "Medusa heads"
    layers: tuple[int, ...] = ()
    rate = 1e-3
    num_taught = _NUM_HEADS

    def __init__(self, loaded: LoadedModel, vocabulary: Tensor) -> None:
        self.vocabulary = vocabulary
        self._rows = target_head(loaded).rows
        self._settings = MedusaSettings(
            num_heads=_NUM_HEADS, num_layers=1, hidden_size=loaded.hidden_size, vocab_size=loaded.vocab_size,
            draft_vocab_size=len(vocabulary), is_shared=True, has_own_vocabulary=len(vocabulary) != loaded.vocab_size,
        )  # fmt: skip

    @torch.no_grad()
    def initial(self) -> MedusaHeads:
        """Blocks of zeros: every head begins as the target's own."""
        heads = MedusaHeads(self._settings)
        for parameter in heads.blocks.parameters():
            parameter.zero_()
        heads.lm_heads.load_state_dict({"0.weight": self._rows[self.vocabulary]})
        if self._settings.has_own_vocabulary:
            heads.d2t.copy_(self.vocabulary - torch.arange(len(self.vocabulary)))
        return heads

    def steps(self, model: nn.Module, batch: Batch, count: int) -> Iterator[StepOutput]:
        assert isinstance(model, MedusaHeads)
        return medusa_steps(model, batch, count)

    def write(self, model: nn.Module, folder: Path) -> None:
        """Weights in bfloat16, and the drafted tokens as a map."""
        settings = self._settings
        tensors = {
            name: tensor.detach().bfloat16().contiguous()
            for name, tensor in model.state_dict().items()
            if name != "d2t"
        }
        if settings.has_own_vocabulary:
            tensors["token_map"] = self.vocabulary.clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": settings.hidden_size,
            "vocab_size": settings.vocab_size, "truncated_vocab_size": settings.draft_vocab_size,
            "num_heads": settings.num_heads, "num_hidden_layers": settings.num_layers, "original_lm_head": True,
            "medusa_fc_bias": True, "dtype": "bfloat16",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def medusa_steps(heads: MedusaHeads, batch: Batch, count: int) -> Iterator[StepOutput]:
    """Head s drafts a learned token from the state s places before the one that chose it."""
    windows, positions = batch.places
    for step in range(min(count, len(heads.blocks))):
        reached = positions - 1 - step >= 0
        states = batch.last[windows[reached], positions[reached] - 1 - step]
        yield StepOutput(heads.of_head(step, states), reached)
