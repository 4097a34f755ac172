"""A smaller target from a finished one: some of its layers and units to begin with.

Dims: B sequences, S tokens of a sequence, U units of an MLP.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM


def begin_as(student: LlamaForCausalLM, teacher: LlamaForCausalLM, tokens: Tensor) -> None:
    """Copy evenly spaced layers of ``teacher`` into ``student``, with the MLP units that give most on ``tokens``.

    Both have the same hidden size and heads. tokens [B, S].
    """
    layers, chosen = teacher.model.layers, student.model.layers
    count = len(chosen)
    kept = [round(i * (len(layers) - 1) / max(count - 1, 1)) for i in range(count)]
    strength = _unit_strength(teacher, tokens)
    with torch.no_grad():
        student.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
        student.model.norm.load_state_dict(teacher.model.norm.state_dict())
        for own, index in zip(chosen, kept, strict=True):
            theirs = layers[index]
            for name in ("self_attn", "input_layernorm", "post_attention_layernorm"):
                getattr(own, name).load_state_dict(getattr(theirs, name).state_dict())
            units = strength[index].topk(own.mlp.down_proj.in_features).indices.sort().values
            own.mlp.gate_proj.weight.copy_(theirs.mlp.gate_proj.weight[units])
            own.mlp.up_proj.weight.copy_(theirs.mlp.up_proj.weight[units])
            own.mlp.down_proj.weight.copy_(theirs.mlp.down_proj.weight[:, units])


def round_to_eight_bits(folder: Path) -> None:
    """Store a checkpoint's matrices as float8 (e4m3), which transformers widens on loading. It has one weight file."""
    file = folder / "model.safetensors"
    weights = {name: each.to(torch.float8_e4m3fn) if each.ndim == 2 else each for name, each in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def _unit_strength(teacher: LlamaForCausalLM, tokens: Tensor) -> list[Tensor]:
    """How much each unit of each MLP gives on average: activation times the length of its output. [layers] of [U]."""
    found: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        found.append(inputs[0].float().abs().mean((0, 1)) * module.weight.float().norm(dim=0))

    handles = [layer.mlp.down_proj.register_forward_pre_hook(note) for layer in teacher.model.layers]
    try:
        with torch.no_grad():
            teacher(tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found
