"""Heads that draft the target's states, as they are trained: EAGLE-1's, and a target's module for MTP.

The target's own output layer says which tokens the drafted states are. While they are taught it tells only the most
frequent ones apart, at a sixth of what all would cost; in decoding all can be drafted.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from yggdrasil.drafters.heads.eagle.config import CONVENTION, HEAD_INPUT
from yggdrasil.drafters.heads.eagle.eagle1 import FirstEagleHead
from yggdrasil.drafters.heads.eagle.state_head import StateHead
from yggdrasil.drafters.heads.mtp.files import MTP_NAMES, empty_mtp, has_targets_norm, published_mtp
from yggdrasil.drafters.heads.mtp.module import MtpHead
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.traced import decoder_layers
from yggdrasil.training.eagle import config_of
from yggdrasil.training.start import copy_norm, settings_for
from yggdrasil.training.target_head import target_embedding, target_head
from yggdrasil.training.unroll import Batch, StepOutput, unroll

_STD = 0.02
_OF_EAGLE3 = ("draft_vocab_size", CONVENTION)


class StateRecipe:
    """What both kinds have in common."""

    layers: tuple[int, ...] = ()
    rate = 1e-3
    num_taught = 3  # each on what the one before gave

    def __init__(self, loaded: LoadedModel, vocabulary: Tensor) -> None:
        self._loaded, self.vocabulary = loaded, vocabulary
        self._embedding = target_embedding(loaded).float()
        self._head = target_head(loaded).of(vocabulary)

    def steps(self, model: nn.Module, batch: Batch, count: int) -> Iterator[StepOutput]:
        assert isinstance(model, StateHead)
        return unroll(model, self._embedding, batch._replace(states=batch.last), count, self._head.logits)


class FirstEagleRecipe(StateRecipe):
    """EAGLE-1's head, which EAGLE-2 drafts with too: begun as the state that it reads."""

    title = "EAGLE-1 head"

    def __init__(self, loaded: LoadedModel, vocabulary: Tensor) -> None:
        super().__init__(loaded, vocabulary)
        self._settings = replace(settings_for(loaded, loaded.vocab_size), is_first=True, fc_bias=True)

    @torch.no_grad()
    def initial(self) -> FirstEagleHead:
        torch.manual_seed(0)
        head = FirstEagleHead(self._settings)
        hidden, model = self._settings.hidden_size, self._loaded.model
        ours: Any = head.layers[0]
        layer: Any = decoder_layers(model)[-1]
        _begin_at_random(head)
        head.fc.weight[:, hidden:] = torch.eye(hidden)
        _copy_what_fits(ours, layer)
        copy_norm(ours.post_attention_layernorm, getattr(layer, "post_attention_layernorm", None), hidden)
        # It has no first norm: what the target's last layer adds to a normed state would grow at every step.
        for linear in (ours.self_attn.o_proj, ours.mlp.down_proj):
            linear.weight.zero_()
        for linear in (ours.self_attn.q_proj, ours.self_attn.k_proj, ours.self_attn.v_proj):
            linear.weight.mul_(_weight_of(layer, "input_layernorm") / _weight_of(model.base_model, "norm"))
        return head

    def write(self, model: nn.Module, folder: Path) -> None:
        """Weights in bfloat16, under the names that EAGLE publishes."""
        _save({name: tensor.bfloat16() for name, tensor in model.state_dict().items()}, folder)
        config = config_of(self._settings, (HEAD_INPUT,), 0) | {"architectures": ["LlamaForCausalLM"], "bias": True}
        _write_config({name: value for name, value in config.items() if name not in _OF_EAGLE3}, folder)


class MtpRecipe(StateRecipe):
    """A target's module, for one that was tuned without it: begun as the target's last layer."""

    title = "MTP module"

    def __init__(self, loaded: LoadedModel, vocabulary: Tensor) -> None:
        super().__init__(loaded, vocabulary)
        self._config = loaded.model.config

    @torch.no_grad()
    def initial(self) -> MtpHead:
        torch.manual_seed(0)
        head = empty_mtp(self._config)
        head.block.to_empty(device="cpu")
        head.float()
        _begin_at_random(head)
        hidden = head.settings.hidden_size
        reads_state = slice(None, hidden) if head.is_hidden_first else slice(hidden, None)
        head.projection.weight[:, reads_state] = torch.eye(hidden)
        model: Any = self._loaded.model
        _copy_what_fits(head.block, decoder_layers(model)[-1])
        _copy_what_fits(head.norm, model.base_model.norm)
        head.norm.requires_grad_(not has_targets_norm(self._config))
        return head

    def write(self, model: nn.Module, folder: Path) -> None:
        """The tensors as they lie among those of the target, and its configuration."""
        _save(published_mtp(self._config, model.state_dict()), folder)
        _write_config(self._config.to_dict(), folder)


def check_family(config: PretrainedConfig, name: str) -> None:
    """YggdrasilError where targets of that family have no modules."""
    if config.model_type not in MTP_NAMES:
        raise YggdrasilError(
            f"--kind mtp: {name} is of the family {config.model_type}, and modules are those of "
            f"{', '.join(MTP_NAMES)}; give another --kind"
        )


def _begin_at_random(head: nn.Module) -> None:
    """Matrices of small numbers; norms of ones and biases of zeros."""
    for name, parameter in head.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=_STD)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


def _weight_of(module: nn.Module, name: str) -> float:
    """The norm's weight in the mean; 1 where there is none."""
    weight = getattr(getattr(module, name, None), "weight", None)
    return 1.0 if weight is None else max(float(weight.float().pow(2).mean().sqrt()), _STD)


def _copy_what_fits(ours: nn.Module, theirs: nn.Module) -> None:
    """What both have under one name in one shape."""
    own = ours.state_dict()
    for name, tensor in theirs.state_dict().items():
        if name in own and own[name].shape == tensor.shape:
            own[name].copy_(tensor)


def _save(tensors: Mapping[str, Tensor], folder: Path) -> None:
    apart = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(apart, folder / "model.safetensors", {"format": "pt"})


def _write_config(config: Mapping[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
