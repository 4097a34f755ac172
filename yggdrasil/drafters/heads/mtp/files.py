"""Load the MTP module from the target's files. transformers ignores the module's tensors when it loads the target."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from yggdrasil.checkpoints.facts import load_config
from yggdrasil.checkpoints.model_sizes import ModelSizes
from yggdrasil.drafters.heads.eagle.config import HeadSettings
from yggdrasil.drafters.heads.mtp.gguf import has_mtp, mtp_tensors
from yggdrasil.drafters.heads.mtp.module import MtpHead
from yggdrasil.drafters.heads.tensors import fill, read_tensors, refuse_others

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class MtpNames:
    """Tensor names of a family's MTP module, without ``.weight``; ``{layers}`` is the target's number of layers."""

    block: str  # prefix of the tensors of the module's decoder layer
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str  # norm of the module's outputs
    is_hidden_first: bool = False  # in the projection's input, the hidden state comes before the embedding
    norm_offset: float = 0.0  # added to the weights of the norms around the layer

    def with_layers(self, layers: int) -> Self:
        """Return the names with ``{layers}`` replaced by the target's number of layers."""
        named: dict[str, Any] = {
            name: value.format(layers=layers) for name, value in vars(self).items() if isinstance(value, str)
        }
        return replace(self, **named)

    @property
    def parts(self) -> dict[str, str]:
        """The tensors around the MTP module's decoder layer (norms and projection): name in the file -> our name."""
        ours = "embedding_norm", "hidden_norm", "projection", "norm"
        return {f"{getattr(self, part)}.weight": f"{part}.weight" for part in ours}


_QWEN = MtpNames(
    "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", norm_offset=1.0
)
# By the model type of the target's (text) configuration. ERNIE's module has no last norm, so its outputs pass through
# the target's last norm, as in Baidu's FastDeploy; vLLM leaves this norm out.
MTP_NAMES = {
    "mimo": MtpNames(
        "model.mtp_layers.0.", "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj", "model.mtp_layers.0.final_layernorm", is_hidden_first=True,
    ),
    "glm4_moe": MtpNames(
        "model.layers.{layers}.", "model.layers.{layers}.enorm", "model.layers.{layers}.hnorm",
        "model.layers.{layers}.eh_proj", "model.layers.{layers}.shared_head.norm",
    ),
    "ernie4_5_moe": MtpNames(
        "model.mtp_block.0.", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0",
        "model.norm",
    ),
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}  # fmt: skip


# Copies of the target's tensors that files may have, and tables that are computed.
_IGNORED = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
_BLOCK = "block."  # prefix of our names of the layer's tensors
_GATE_UP = "gate_up_proj"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def open_mtp(folder: Path, dtype: torch.dtype) -> MtpHead:
    """Load the multi-token-prediction (MTP) module that is stored with a model, with weights in ``dtype``.

    Args:
        folder: the model's folder or GGUF file. The MTP module must be of a supported family (``kind_of``).

    Raises:
        YggdrasilError: the configuration cannot be read, or tensors of the module are missing, unexpected or misshapen.
    """
    config = load_config(folder).get_text_config()
    with torch.device("meta"):
        head = empty_mtp(config)
    if has_mtp(folder):
        tensors = mtp_tensors(folder, config, head.state_dict())
    else:
        tensors = _with_experts_together(_renamed(folder, _names_of(config)))
    refuse_others(folder, tensors, head)
    fill(head, tensors, dtype)
    return head


def empty_mtp(config: "PretrainedConfig") -> MtpHead:
    """Return an MTP module on the meta device (without weights) for the target with text configuration ``config``."""
    sizes = ModelSizes.of(config)
    key_heads, head_size = sizes.attention
    settings = HeadSettings(
        hidden_size=sizes.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        query_heads=sizes.query_heads,
        key_heads=key_heads,
        head_size=head_size,
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        vocab_size=sizes.vocab_size,
        draft_vocab_size=sizes.vocab_size,
        target_hidden_size=sizes.hidden_size,
        rope={},
        is_first=True,
        layer_of=config.to_json_string(),
    )
    names = _names_of(config)
    return MtpHead(settings, config, is_hidden_first=names.is_hidden_first, norm_offset=names.norm_offset)


def _names_of(config: "PretrainedConfig") -> MtpNames:
    return MTP_NAMES[config.model_type].with_layers(config.num_hidden_layers)


def _renamed(folder: Path, names: MtpNames) -> dict[str, Tensor]:
    """Return the module's tensors in ``folder``, by our names."""
    parts = names.parts
    found = read_tensors(folder, (*parts, names.block))
    return {
        parts.get(name) or f"{_BLOCK}{name.removeprefix(names.block)}": tensor
        for name, tensor in found.items()
        if not name.endswith(_IGNORED)
    }


def _with_experts_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with the experts, which files store one by one, stacked as transformers' two tensors."""
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = tensor
        else:
            others[name] = tensor
    for name, kinds in experts.items():
        stacked = {
            kind: torch.stack([each[number] for number in sorted(each)])
            for kind, each in kinds.items()
            if len({tensor.shape for tensor in each.values()}) == 1  # else ``refuse_others`` reports them as missing
        }
        if stacked.keys() >= {"gate", "up"} and stacked["gate"].shape == stacked["up"].shape:
            others[f"{name}.{_GATE_UP}"] = torch.cat([stacked["gate"], stacked["up"]], dim=1)
        if "down" in stacked:
            others[f"{name}.down_proj"] = stacked["down"]
    return others
