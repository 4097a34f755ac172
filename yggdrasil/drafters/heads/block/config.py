"""What a block head (DFlash) is, as its config.json says: in the spelling of its authors, or that of speculators.

A layer of it is a Qwen3's, and what layers have in common is read as an EAGLE head's layer is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yggdrasil.artifacts import parse_json, shown
from yggdrasil.drafters.heads.eagle.config import CONVENTION, HeadSettings, settings_of
from yggdrasil.drafters.heads.rotary import section_of
from yggdrasil.errors import YggdrasilError

_SECTION = "dflash_config"
_LAYER = "transformer_layer_config"  # of speculators
_SLIDING = "sliding_attention"
# Switches of relatives, which compute something else with tensors that may look alike.
_NOT_SERVED = {"sample_from_anchor": False, "shift_label": False, "projector_type": "dflash"}


@dataclass(frozen=True)
class BlockSettings:
    """Sizes and switches of a block head."""

    layer: HeadSettings  # of every layer
    num_layers: int
    block_size: int  # rows of a block: the last certain token, and masks
    mask_token: int
    # Of each layer: keys that a row attends to, as in ``HeadSettings``, and whether it sees only rows before it.
    views: tuple[tuple[int, bool], ...]
    target_layers: int | None = None  # that the target has, where it is said

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.layer.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that can be drafted."""
        return self.layer.draft_vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def num_guesses(self) -> int:
        """Tokens that a block guesses: one for each of its masks."""
        return self.block_size - 1

    def readings(self, num_layers: int) -> list[tuple[int, ...]]:
        """The target's layers whose outputs the head means: both spellings say which."""
        return self.layer.readings(num_layers)


def read_block_settings(folder: Path) -> BlockSettings:
    """The settings in ``folder``'s config.json.

    Raises:
        YggdrasilError: it is missing or damaged, or says what is not served.
    """
    file = folder / "config.json"
    try:
        config = parse_json(file.read_bytes())
        if not isinstance(config, Mapping):
            raise ValueError("it is not a JSON mapping")
        return block_settings_of(config)
    except FileNotFoundError as error:
        raise YggdrasilError(f"{shown(file)} is missing; fetch the head again") from error
    except (ValueError, TypeError, KeyError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise YggdrasilError(f"{shown(file)}: not a block head that is served: {reason}") from error


def block_settings_of(config: Mapping[str, Any]) -> BlockSettings:
    """The settings that a configuration makes. Raises ValueError, TypeError or KeyError."""
    own, layer = section_of(config, _SECTION), section_of(config, _LAYER) or config
    for name, usual in _NOT_SERVED.items():
        if (value := own.get(name, config.get(name))) not in (None, usual):
            raise ValueError(f"{name} is {value!r}")

    def number(name: str, least: int) -> int:
        value = own.get(name, config.get(name))
        if value is None:
            raise KeyError(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}, not a number from {least} on")
        return value

    num_layers = layer["num_hidden_layers"]
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"num_hidden_layers is {num_layers!r}, not a number from 1 on")
    settings = BlockSettings(
        layer=_layer_settings(config, layer, own),
        num_layers=num_layers,
        block_size=number("block_size", 2),
        mask_token=number("mask_token_id", 0),
        views=(),
        target_layers=number("num_target_layers", 1) if config.get("num_target_layers") else None,
    )  # fmt: skip
    if settings.mask_token >= settings.vocab_size:
        raise ValueError(f"mask_token_id is {settings.mask_token}, and there are {settings.vocab_size} tokens")
    return _with_masks(settings, config, layer, own)


def _layer_settings(config: Mapping[str, Any], layer: Mapping[str, Any], own: Mapping[str, Any]) -> HeadSettings:
    """A layer by itself; the target's layers are counted by their outputs, or in speculators by their inputs."""
    outputs, inputs = own.get("target_layer_ids"), config.get("aux_hidden_state_layer_ids")
    if not outputs and not inputs:
        raise KeyError("target_layer_ids")
    written = {"eagle_aux_hidden_state_layer_ids": outputs or inputs, CONVENTION: "outputs" if outputs else "inputs"}
    sizes = {name: config[name] for name in ("draft_vocab_size", "target_hidden_size") if config.get(name)}
    one = {"num_hidden_layers": 1, "logit_scale": config.get("logit_scale", 1.0), "layer_types": None}
    return replace(settings_of({**layer, **one, **sizes, **written}), head_norms=True)


def _with_masks(
    settings: BlockSettings, config: Mapping[str, Any], layer: Mapping[str, Any], own: Mapping[str, Any]
) -> BlockSettings:
    """With what the rows of each layer see. Layers with windows are causal where nothing else is said, as in vLLM."""
    kinds = list(layer.get("layer_types") or [None] * settings.num_layers)
    if len(kinds) != settings.num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, and there are {settings.num_layers}")
    if own.get("use_swa") and _SLIDING not in kinds:
        kinds = [_SLIDING] * settings.num_layers
    window: Any = own.get("swa_window_size") or layer.get("sliding_window")
    if _SLIDING in kinds and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window is {window!r}, not a number from 1 on")
    said = config.get("is_causal", own.get("causal"))
    if said is None and config.get("sliding_window_non_causal"):
        said = False
    views = []
    for slides in (kind == _SLIDING for kind in kinds):
        is_causal = slides if said is None else bool(said)
        # Rows that see the whole block see as much of the text before as its first one: a window holds all of them.
        views.append((window + (0 if is_causal else settings.num_guesses) if slides else 0, is_causal))
    return replace(settings, views=tuple(views))
