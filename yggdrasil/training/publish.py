"""A trained head in the format of published EAGLE-3 heads, with a card that says where it comes from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from yggdrasil.artifacts import atomic_directory
from yggdrasil.drafters.heads.module import EagleHead
from yggdrasil.drafters.heads.settings import HeadSettings
from yggdrasil.training.state import Look

CARD = "README.md"
_MARK = "A drafter for"  # how our cards begin


def publish(head: EagleHead, layers: tuple[int, ...], num_layers: int, facts: Mapping[str, str], look: Look | None,
            out: Path) -> None:  # fmt: skip
    """Write the folder ``out`` as a whole: weights in bfloat16, configuration and card."""
    settings = head.settings
    tensors = {
        name: tensor.detach() if name == "d2t" else tensor.detach().bfloat16().contiguous()
        for name, tensor in head.state_dict().items()
    }
    if settings.has_own_vocabulary:
        drafted = torch.zeros(settings.vocab_size, dtype=torch.bool)
        drafted[head.target_tokens(torch.arange(settings.draft_vocab_size))] = True
        tensors["t2d"] = drafted
    with atomic_directory(out) as folder:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        content = json.dumps(config_of(settings, layers, num_layers), indent=2)
        (folder / "config.json").write_text(content + "\n", encoding="utf-8")
        (folder / CARD).write_text(_card(settings, facts, look), encoding="utf-8")


def config_of(settings: HeadSettings, layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    """The configuration that other loaders of this format know."""
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
    }
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    if layers != settings.readings(num_layers)[0]:  # the usual ones need no words
        config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in layers]
    return config


def is_ours(folder: Path) -> bool:
    """Whether ``folder`` is one that ``publish`` wrote, or may be made into one: not there, or empty."""
    if not folder.exists() or not any(folder.iterdir()):
        return True
    card = folder / CARD
    return card.is_file() and _MARK in card.read_text(encoding="utf-8", errors="replace")


def _card(settings: HeadSettings, facts: Mapping[str, str], look: Look | None) -> str:
    lines = [
        "# EAGLE-3 head\n",
        f"{_MARK} {facts['target']}, trained with `yggdrasil train`, in the format of published EAGLE-3 heads.\n",
        "| | |\n|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        f"| drafted tokens | {settings.draft_vocab_size} of {settings.vocab_size} |",
    ]
    if look is not None:
        lines += [
            f"| tokens learned, counted as often as they were | {look.tokens} |",
            f"| minutes of training | {look.seconds / 60:.1f} |",
            f"| agreement with the target at draft steps 1 to 5, held-out answers | {_shares(look.agreement)} |",
            f"| the target's choice among the four likeliest | {_shares(look.best_four)} |",
            f"| tokens a pass of a chain of four, from these | {look.expected:.2f} |",
        ]
    lines.append(
        "\nLicence: the weights come from the target's last layer and head, and from text that the target wrote; the "
        "target's licence holds for them.\n"
    )
    return "\n".join(lines)


def _shares(shares: list[float]) -> str:
    return " ".join(f"{share:.3f}" for share in shares)
