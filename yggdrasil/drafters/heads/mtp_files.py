"""The tensors of an MTP module, read from its target's own files: transformers leaves them out when it loads one."""

import re
from pathlib import Path

import torch
from torch import Tensor

from yggdrasil.drafters.heads.mtp import MtpHead
from yggdrasil.drafters.heads.mtp_names import MTP_NAMES, MtpNames
from yggdrasil.drafters.heads.settings import HeadSettings
from yggdrasil.drafters.heads.tensors import read_tensors, refuse_others
from yggdrasil.models.facts import load_config
from yggdrasil.models.outline import Outline

# Copies of the target's, which files may bring, and tables that are computed.
_IGNORED = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
_IN_FULL = ".e_score_correction_bias"  # float32 whatever the weights are, as transformers keeps it
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def open_mtp(folder: Path, dtype: torch.dtype) -> MtpHead:
    """The module of the model in ``folder``, with weights in ``dtype``.

    Raises:
        YggdrasilError: the configuration cannot be read, or the tensors are not those of its family's modules.
    """
    config = load_config(folder)
    names = MTP_NAMES[config.model_type].of(config.num_hidden_layers)
    outline = Outline.of(config)
    key_heads, head_size = outline.key_heads[0]
    settings = HeadSettings(
        hidden_size=outline.hidden_size,
        intermediate_size=config.intermediate_size,
        query_heads=outline.query_heads,
        key_heads=key_heads,
        head_size=head_size,
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        vocab_size=outline.vocab_size,
        draft_vocab_size=outline.vocab_size,
        target_hidden_size=outline.hidden_size,
        rope={},
        is_first=True,
        layer_of=config.to_json_string(),
    )
    with torch.device("meta"):
        head = MtpHead(settings, config, is_hidden_first=names.is_hidden_first)
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    tensors = _with_experts_together(_renamed(folder, names))
    refuse_others(folder, tensors, expected)
    head.load_state_dict(
        {name: tensor.to(torch.float32 if name.endswith(_IN_FULL) else dtype) for name, tensor in tensors.items()},
        assign=True,
    )
    return head.eval().requires_grad_(False)


def _renamed(folder: Path, names: MtpNames) -> dict[str, Tensor]:
    """What belongs to the module, under our names."""
    parts = {
        f"{names.embedding_norm}.weight": "embedding_norm.weight",
        f"{names.hidden_norm}.weight": "hidden_norm.weight",
        f"{names.projection}.weight": "projection.weight",
        f"{names.norm}.weight": "norm.weight",
    }
    found = read_tensors(folder, (*parts, names.block))
    return {
        parts.get(name) or f"block.{name.removeprefix(names.block)}": tensor
        for name, tensor in found.items()
        if not name.endswith(_IGNORED)
    }


def _with_experts_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts, which files keep one by one, in the two tensors that transformers keeps them in."""
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
            if len({tensor.shape for tensor in each.values()}) == 1  # else they are missed by name
        }
        if stacked.keys() >= {"gate", "up"} and stacked["gate"].shape == stacked["up"].shape:
            others[f"{name}.gate_up_proj"] = torch.cat([stacked["gate"], stacked["up"]], dim=1)
        if "down" in stacked:
            others[f"{name}.down_proj"] = stacked["down"]
    return others
