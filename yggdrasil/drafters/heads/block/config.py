"""Read a block head's (DFlash, DFlash2, DSpark, JetSpec) config.json, as its authors or speculators write it.

The head's layers are Qwen3's; their common fields are read like the fields of an EAGLE head's layer. JetSpec differs
from DFlash only in that rows of a block attend causally. DSpark's confidence head is not read: calibration measures
acceptance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yggdrasil.drafters.heads.block.successors import SuccessorKind
from yggdrasil.drafters.heads.eagle.config import CONVENTION, HeadSettings, positive, read_config, settings_of
from yggdrasil.drafters.heads.rotary import section_of

_SECTION = "dflash_config"
_LAYER = "transformer_layer_config"  # section that speculators writes
_SLIDING = "sliding_attention"
# Options and their supported values: related architectures compute another function with similar tensors.
_NOT_SERVED = {"shift_label": (False,), "projector_type": ("dflash", "dspark")}
_DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")  # these draft from the block's first row too
_CAUSAL = ("causal", "causal_head")  # fields that DFlash's and JetSpec's authors write
_MARKOV_CANDIDATES = 128  # tokens of a depth that DSpark's bias ranks again; the bias of all tokens would cost more


@dataclass(frozen=True)
class BlockSettings(HeadSettings):
    """Sizes and options of a block head. The inherited fields describe each of the head's layers."""

    block_size: int = 2  # rows of a block: the last accepted token, and masks
    mask_token: int = 0
    # Per layer: the attention window in keys (0: unlimited), and whether attention within the block is causal.
    views: tuple[tuple[int, bool], ...] = ()
    target_layers: int | None = None  # number of the target's layers, if recorded
    first_row: int = 1  # the first row that predicts: the last accepted token's (0), or the first mask's
    convolution: tuple[int, int] | None = None  # DFlash2's: taps, channels per group
    successors: SuccessorKind | None = None
    rank: int = 0  # rank of the successor head
    num_successors: int = 0  # candidates of a depth that the successor head ranks again
    input_scale: float = 1.0  # factor of the block's embeddings
    output_scale: float = 1.0  # factor of the logits
    softcap: float = 0.0  # the logits x become softcap * tanh(x / softcap); 0: unchanged

    @property
    def num_guesses(self) -> int:
        """Number of tokens that one block drafts."""
        return self.block_size - self.first_row


def read_block_settings(folder: Path) -> BlockSettings:
    """Read a block head's settings from config.json in ``folder``.

    Raises:
        YggdrasilError: the file is missing, damaged or describes an unsupported head.
    """
    return read_config(folder, "a block head", block_settings_of)


def block_settings_of(config: Mapping[str, Any]) -> BlockSettings:
    """Return the settings of a block head from ``config``, the content of its config.json.

    Raises:
        ValueError, TypeError or KeyError: the head is unsupported or a field is missing.
    """
    own, layer = section_of(config, _SECTION), section_of(config, _LAYER) or config
    for name, usual in _NOT_SERVED.items():
        if (value := own.get(name, config.get(name))) not in (None, *usual):
            raise ValueError(f"{name} is {value!r}")

    def number(name: str, least: int) -> int:
        value = own.get(name, config.get(name))
        if value is None:
            raise KeyError(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}, not a number from {least} on")
        return value

    settings = BlockSettings(
        **{**vars(_layer_settings(config, layer, own)), "num_layers": positive(layer, "num_hidden_layers")},
        block_size=number("block_size", 2),
        mask_token=number("mask_token_id", 0),
        target_layers=number("num_target_layers", 1) if config.get("num_target_layers") else None,
    )  # fmt: skip
    if settings.mask_token >= settings.vocab_size:
        raise ValueError(f"mask_token_id is {settings.mask_token}, and there are {settings.vocab_size} tokens")
    return _with_options(_with_masks(settings, config, layer, own), {**config, **own}, number)


def _with_options(settings: BlockSettings, said: Mapping[str, Any], number: Callable[[str, int], int]) -> BlockSettings:
    """Return ``settings`` with the options of DFlash2 and DSpark. ``number`` reads a required integer."""
    is_dspark = said.get("speculators_model_type") == "dspark" or any(
        name in _DSPARK for name in said.get("architectures") or ()
    )
    from_first = said.get("sample_from_anchor")
    settings = replace(
        settings, first_row=0 if (is_dspark if from_first is None else from_first) else 1,
        input_scale=float(said.get("input_embedding_scale") or 1.0),
        output_scale=float(said.get("output_multiplier") or 1.0),
        softcap=float(said.get("final_logit_softcapping") or 0.0),
    )  # fmt: skip
    if said.get("conv_kernel_size"):
        convolution = number("conv_kernel_size", 1), number("conv_group_size", 1)
        if settings.hidden_size % convolution[1]:
            raise ValueError(f"conv_group_size ({convolution[1]}) does not divide {settings.hidden_size} channels")
        settings = replace(settings, convolution=convolution)
    if said.get("selector_rank"):
        rank, count = number("selector_rank", 1), number("selector_top_k", 1)
        return replace(settings, successors="selector", rank=rank, num_successors=count)
    if not said.get("markov_rank"):
        return settings
    kind = said.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise ValueError(f"markov_head_type is {kind!r}")
    rank = number("markov_rank", 1)
    return replace(settings, successors=kind, rank=rank, num_successors=_MARKOV_CANDIDATES)


def _layer_settings(config: Mapping[str, Any], layer: Mapping[str, Any], own: Mapping[str, Any]) -> HeadSettings:
    """Return the settings of one layer. Files number target layers by output, files of speculators by input."""
    outputs = own.get("target_layer_ids", config.get("target_layer_ids"))
    inputs = config.get("aux_hidden_state_layer_ids")
    if not outputs and not inputs:
        raise KeyError("target_layer_ids")
    written = {"eagle_aux_hidden_state_layer_ids": outputs or inputs, CONVENTION: "outputs" if outputs else "inputs"}
    sizes = {name: config[name] for name in ("draft_vocab_size", "target_hidden_size") if config.get(name)}
    one = {"num_hidden_layers": 1, "logit_scale": config.get("logit_scale", 1.0), "layer_types": None}
    return replace(settings_of({**layer, **one, **sizes, **written}), head_norms=True)


def _with_masks(
    settings: BlockSettings, config: Mapping[str, Any], layer: Mapping[str, Any], own: Mapping[str, Any]
) -> BlockSettings:
    """Return ``settings`` with the ``views`` of all layers. Sliding layers default to causal, as in vLLM."""
    kinds = list(layer.get("layer_types") or [None] * settings.num_layers)
    if len(kinds) != settings.num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, and there are {settings.num_layers}")
    if own.get("use_swa") and _SLIDING not in kinds:
        kinds = [_SLIDING] * settings.num_layers
    window: Any = own.get("swa_window_size") or layer.get("sliding_window")
    if _SLIDING in kinds and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window is {window!r}, not a number from 1 on")
    said = config.get("is_causal", next((own[name] for name in _CAUSAL if name in own), None))
    if said is None and config.get("sliding_window_non_causal"):
        said = False
    views = []
    for slides in (kind == _SLIDING for kind in kinds):
        is_causal = slides if said is None else bool(said)
        # With bidirectional attention all rows see the same context, so the window also covers the drafted rows.
        views.append((window + (0 if is_causal else settings.block_size - 1) if slides else 0, is_causal))
    return replace(settings, views=tuple(views))
