"""Training recipe of Medusa heads, which all read the target's last hidden state. They are saved in vLLM's format.

The heads share one LM head over the draft vocabulary, initialised with the target's rows. With an LM head each they
would read more weights than a small target does.
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
    """Recipe of five Medusa heads with one residual block each and a shared LM head."""

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
        """Return heads whose residual blocks are zero, so that each predicts what the target's LM head does."""
        heads = MedusaHeads(self._settings)
        for parameter in heads.blocks.parameters():
            parameter.zero_()
        heads.lm_heads.load_state_dict({"0.weight": self._rows[self.vocabulary]})
        if self._settings.has_own_vocabulary:
            heads.d2t.copy_(self.vocabulary - torch.arange(len(self.vocabulary)))
        return heads

    def steps(self, model: nn.Module, batch: Batch, count: int) -> Iterator[StepOutput]:
        """Yield the logits of the first ``count`` heads (see ``medusa_steps``)."""
        assert isinstance(model, MedusaHeads)
        return medusa_steps(model, batch, count)

    def write(self, model: nn.Module, folder: Path) -> None:
        """Write weights in bfloat16, the draft vocabulary (``token_map``) and the configuration to ``folder``."""
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
    """Yield, per head s, the trained tokens' logits from the state s positions before the one that predicts them."""
    windows, positions = batch.places
    for step in range(min(count, len(heads.blocks))):
        reached = positions - 1 - step >= 0
        states = batch.last[windows[reached], positions[reached] - 1 - step]
        yield StepOutput(heads.of_head(step, states), reached)
