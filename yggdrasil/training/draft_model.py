"""Training recipe of a draft model: a small Llama on the target's vocabulary, trained on the target's distribution.

Its tied embedding is initialised with a low-rank PCA of the target's LM head.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.training.target_head import target_head
from yggdrasil.training.unroll import Batch, StepOutput

_SHARE = 4  # the target's hidden size over the draft model's
_LEAST, _MOST, _HEAD = 64, 512, 32  # channels
_LAYERS = 2
_STD = 0.02


class DraftModelRecipe:
    """Recipe of a draft model with two layers and a quarter of the target's hidden size."""

    title = "Draft model"
    layers: tuple[int, ...] = ()
    rate = 2e-3
    num_taught = 1  # it reads tokens only, so all draft steps are alike

    def __init__(self, loaded: LoadedModel, source: Source) -> None:
        self.vocabulary = torch.arange(loaded.vocab_size)
        self._source = source
        self._rows = target_head(loaded).rows
        text = loaded.model.config.get_text_config()
        width = min(max(loaded.hidden_size // _SHARE // _LEAST * _LEAST, _LEAST), _MOST)
        self._config = LlamaConfig(
            vocab_size=loaded.vocab_size, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=_LAYERS,
            num_attention_heads=width // _HEAD, num_key_value_heads=width // _HEAD,
            max_position_embeddings=loaded.max_context, tie_word_embeddings=True, use_cache=False,
            bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=None,
        )  # fmt: skip

    @torch.no_grad()
    def initial(self) -> LlamaForCausalLM:
        """Return an untrained model in float32; the same in every call."""
        torch.manual_seed(0)
        model: LlamaForCausalLM = LlamaForCausalLM(self._config).float()
        rows, width = self._rows.float(), self._config.hidden_size
        if width <= min(rows.shape):
            directions = torch.pca_lowrank(rows, q=width, niter=2)[2]
            projected = rows @ directions
            model.model.embed_tokens.weight.copy_(projected * (_STD / projected.std()))
        return model

    def steps(self, model: nn.Module, batch: Batch, count: int) -> Iterator[StepOutput]:
        """Yield the same logits for each of ``count`` steps: the model reads the preceding tokens only."""
        windows, positions = batch.places
        assert isinstance(model, LlamaForCausalLM)
        states = model.model(batch.tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(states[windows, positions])
        reached = torch.ones_like(positions, dtype=torch.bool)
        for _ in range(count):
            yield StepOutput(logits, reached)

    def write(self, model: nn.Module, folder: Path) -> None:
        """Save the model in transformers' format in ``folder``, in bfloat16, with the target's tokenizer."""
        assert isinstance(model, LlamaForCausalLM)
        tensors: dict[str, Tensor] = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
        copied = LlamaForCausalLM(self._config).bfloat16()
        copied.load_state_dict(tensors)
        copied.config.use_cache = True
        copied.save_pretrained(folder)
        load_tokenizer(self._source).save_pretrained(folder)
