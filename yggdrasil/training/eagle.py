"""Training recipe of EAGLE-3 heads, which start from the target's last layer and train on their own outputs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from yggdrasil.drafters.heads.eagle.config import CONVENTION, HeadSettings
from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.training.start import initial_head, settings_for
from yggdrasil.training.target_head import target_embedding
from yggdrasil.training.unroll import Batch, StepOutput, unroll


class EagleRecipe:
    """Recipe of a one-layer EAGLE-3 head that reads the outputs of three of the target's layers."""

    title = "EAGLE-3 head"
    rate = 1.5e-3
    num_taught = 3  # trained draft steps; each reads the outputs of the step before

    def __init__(self, loaded: LoadedModel, vocabulary: Tensor) -> None:
        self._loaded, self.vocabulary = loaded, vocabulary
        self._settings = settings_for(loaded, len(vocabulary))
        self.layers = self._settings.readings(loaded.num_layers)[0]
        self._embedding = target_embedding(loaded).float()

    def initial(self) -> EagleHead:
        """Return the untrained head in float32, initialised from the target; the same in every call."""
        return initial_head(self._loaded, self._settings, self.vocabulary)

    def steps(self, model: nn.Module, batch: Batch, count: int) -> Iterator[StepOutput]:
        """Run the head on its own outputs for ``count`` draft steps, and yield each step's logits.

        The logits are for the trained positions of ``batch`` that the step reaches.
        """
        assert isinstance(model, EagleHead)
        return unroll(model, self._embedding, batch, count)

    def write(self, model: nn.Module, folder: Path) -> None:
        """Write a trained head to the existing ``folder``: bfloat16 weights and config.json.

        A head with a draft vocabulary also has the token tables ``d2t`` and ``t2d``. Files of the same names are
        replaced.
        """
        settings = self._settings
        tensors = {
            name: tensor.detach() if name == "d2t" else tensor.detach().bfloat16().contiguous()
            for name, tensor in model.state_dict().items()
        }
        if settings.has_own_vocabulary:
            tensors["t2d"] = torch.zeros(settings.vocab_size, dtype=torch.bool).index_fill(0, self.vocabulary, True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        content = json.dumps(config_of(settings, self.layers, self._loaded.num_layers), indent=2)
        (folder / "config.json").write_text(content + "\n", encoding="utf-8")


def config_of(settings: HeadSettings, layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    """Return the content of config.json of an EAGLE-3 head, in the format that vLLM and SGLang load.

    Args:
        layers: indices of the target's layers whose outputs the head reads.
        num_layers: number of the target's layers.
    """
    rope = {name: value for name, value in settings.rope.items() if name != "rope_theta"}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": settings.query_heads,
        "num_key_value_heads": settings.key_heads,
        "head_dim": settings.head_size,
        "hidden_act": settings.activation,
        "rms_norm_eps": settings.norm_eps,
        "rope_theta": settings.rope["rope_theta"],
        "vocab_size": settings.vocab_size,
        "draft_vocab_size": settings.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        CONVENTION: "inputs",
    }
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    if layers != settings.readings(num_layers)[0]:  # the default layers are not recorded
        config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in layers]
    return config
