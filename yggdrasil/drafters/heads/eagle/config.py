"""Read an EAGLE head's config.json, as EAGLE, SpecForge or the speculators library write it.

``max_position_embeddings`` is ignored: heads have no limit of length, and many files have an arbitrary 2048.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from yggdrasil.artifacts import parse_json, shown
from yggdrasil.drafters.heads.rotary import rope_of, section_of
from yggdrasil.errors import YggdrasilError

HEAD_INPUT = -1  # stands for the input of the target's LM head, in place of a layer number

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_USUAL_LAYERS = 3
_LAYER_SECTIONS = ("transformer_layer_config", "model")  # sections of speculators' files, and of vLLM's files
_FC_BIAS = ("bias", "fusion_bias")

# Whether layer numbers denote a layer's input or output. Published files do not record this, and their writers differ.
Convention = Literal["inputs", "outputs"]
CONVENTION = "layer_convention"  # the field of our own files


@dataclass(frozen=True)
class HeadSettings:
    """Sizes and options of an EAGLE head, an MTP module, or the layers of a block head."""

    hidden_size: int
    intermediate_size: int
    query_heads: int
    key_heads: int
    head_size: int
    norm_eps: float
    activation: str
    vocab_size: int  # the target's vocabulary
    draft_vocab_size: int
    target_hidden_size: int
    rope: dict[str, Any]  # with rope_type and rope_theta
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False  # the residual branch takes the normalised feature
    norm_before_fc: bool = False  # one norm over the concatenated hidden states of the target
    fc_norm: bool = False  # or one norm per hidden state
    norm_output: bool = False  # outputs are normalised before they are fed back
    layers: tuple[int, ...] | None = None  # the target's layers as in the file, if it lists them
    convention: Convention = "inputs"  # how ``layers`` are numbered
    convention_is_said: bool = False  # the file records the convention
    qkv_bias: bool = False
    is_first: bool = False  # EAGLE-1, EAGLE-2 or MTP: reads and predicts the input of the target's LM head
    fc_bias: bool | None = None  # with is_first: whether fc has a bias; None if not recorded
    normed_inputs: bool = False  # with is_first: embedding and feature are normalised first
    head_norms: bool = False  # queries and keys are normalised per head, as in Qwen3
    window: int = 0  # attention window in keys, a row's own included; 0: unlimited
    num_layers: int = 1
    layer_of: str = ""  # for an MTP module: JSON of the target's configuration, whose type of layer the module has

    @property
    def num_states(self) -> int:
        """Number of the target's hidden states that are concatenated to one input feature."""
        if self.is_first:
            return 1
        return _USUAL_LAYERS if self.layers is None else len(self.layers)

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the head drafts only some of the target's tokens."""
        return self.draft_vocab_size != self.vocab_size

    def with_draft_vocabulary(self, count: int) -> Self:
        """Return the settings of the same head with a draft vocabulary of ``count`` tokens."""
        return replace(self, draft_vocab_size=count)

    def readings(self, num_layers: int) -> list[tuple[int, ...]]:
        """Return the layers of the target whose outputs the head may read; -1 stands for the LM head's input.

        There is one tuple for each convention that the file's layer numbers may follow (a layer's input or its output),
        the usual convention's first. There is only one tuple if the file records its convention, or for EAGLE-1,
        EAGLE-2 and MTP.

        Args:
            num_layers: number of the target's layers.
        """
        if self.is_first:
            return [(HEAD_INPUT,)]
        half, third = num_layers // 2, num_layers - 3
        inputs = self.layers or (2, half, third)
        if self.layers is not None and self.convention == "outputs":
            inputs = tuple(layer + 1 for layer in self.layers)
        usual = tuple(min(max(layer - 1, 0), num_layers - 1) for layer in inputs)
        if self.convention_is_said:
            return [usual]
        step = -1 if self.layers is not None and self.convention == "outputs" else 1
        other = tuple(min(max(layer - 1 + step, 0), num_layers - 1) for layer in inputs)
        return [usual, other]


def read_settings(folder: Path, *, is_first: bool = False) -> HeadSettings:
    """Read an EAGLE head's settings from config.json in ``folder``.

    Args:
        is_first: the head is of EAGLE-1 or EAGLE-2; False: of EAGLE-3.

    Raises:
        YggdrasilError: the file is missing, damaged or describes an unsupported head.
    """
    return read_config(folder, "an EAGLE head", partial(settings_of, is_first=is_first))


Settings = TypeVar("Settings", bound=HeadSettings)


def read_config(folder: Path, kind: str, settings_of: Callable[[Mapping[str, Any]], Settings]) -> Settings:
    """Return what ``settings_of`` returns for the content of config.json in ``folder``.

    Args:
        kind: kind of the head with article, such as "an EAGLE head", for error messages.

    Raises:
        YggdrasilError: the file is missing or damaged, or ``settings_of`` raises ValueError, TypeError or KeyError.
    """
    file = folder / "config.json"
    try:
        config = parse_json(file.read_bytes())
    except FileNotFoundError as error:
        raise YggdrasilError(f"{shown(file)} is missing; fetch the head again") from error
    except ValueError as error:
        raise YggdrasilError(f"{shown(file)} is not valid JSON; fetch the head again") from error
    if not isinstance(config, dict):
        raise YggdrasilError(f"{shown(file)} is not a JSON mapping; fetch the head again")
    try:
        return settings_of(config)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise YggdrasilError(f"{shown(file)}: not {kind} that is served: {reason}") from error


def settings_of(config: Mapping[str, Any], *, is_first: bool = False) -> HeadSettings:
    """Return the settings of an EAGLE head from ``config``, the content of its config.json.

    Args:
        is_first: the head is of EAGLE-1 or EAGLE-2; False: of EAGLE-3.

    Raises:
        ValueError, TypeError or KeyError: the head is unsupported or a field is missing.
    """
    layer = next((config[name] for name in _LAYER_SECTIONS if name in config), config)
    if not isinstance(layer, Mapping):
        raise ValueError("the section of its layer is no mapping")
    heads, hidden = positive(layer, "num_attention_heads"), positive(layer, "hidden_size")
    head_size = positive(layer, "head_dim", hidden // heads)
    layers, convention, convention_is_said = _layers(config)
    settings = HeadSettings(
        hidden_size=hidden,
        intermediate_size=positive(layer, "intermediate_size"),
        query_heads=heads,
        key_heads=positive(layer, "num_key_value_heads", heads),
        head_size=head_size,
        norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        activation=str(layer.get("hidden_act", "silu")),
        vocab_size=positive(layer, "vocab_size"),
        draft_vocab_size=positive(config, "draft_vocab_size", positive(layer, "vocab_size")),
        target_hidden_size=positive(config, "target_hidden_size", hidden),
        rope=rope_of(layer, head_size),
        attention_bias=bool(layer.get("attention_bias", False)),
        mlp_bias=bool(layer.get("mlp_bias", False)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        layers=layers,
        convention=convention,
        convention_is_said=convention_is_said,
        qkv_bias=bool(layer.get("qkv_bias", False)),
        is_first=is_first,
        fc_bias=next((bool(config[name]) for name in _FC_BIAS if name in config), None),
        normed_inputs=bool(config.get("add_para_norm", False)),
        window=_window(layer),
    )
    _check(settings, layer, config)
    return settings


def _check(settings: HeadSettings, layer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ValueError with a list of all unsupported options."""
    partial, scale = layer.get("partial_rotary_factor") or 1.0, config.get("logit_scale", 1.0)
    own_states = section_of(config, "eagle_config").get("use_aux_hidden_state")
    faults = {
        f"num_hidden_layers is {layer.get('num_hidden_layers')}, and one layer is served": layer.get(
            "num_hidden_layers", 1
        )
        != 1,
        f"num_key_value_heads ({settings.key_heads}) does not divide {settings.query_heads} heads": bool(
            settings.query_heads % settings.key_heads
        ),
        f"head_dim ({settings.head_size}) is odd": bool(settings.head_size % 2),
        f"hidden_act is {settings.activation!r}; served are {', '.join(ACTIVATIONS)}": settings.activation
        not in ACTIVATIONS,
        f"draft_vocab_size ({settings.draft_vocab_size}) is more than {settings.vocab_size}": settings.draft_vocab_size
        > settings.vocab_size,
        "norm_before_fc and fc_norm exclude each other": settings.norm_before_fc and settings.fc_norm,
        f"partial_rotary_factor is {partial}": partial != 1.0,
        f"logit_scale is {scale}": scale != 1.0,
        "eagle_config.use_aux_hidden_state is false": own_states is False,
        "layernorms is true": bool(config.get("layernorms")),
    }
    found = [fault for fault, holds in faults.items() if holds]
    if found:
        raise ValueError("; ".join(found))


def positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return the integer ``config[name]``, or ``default`` if that value is missing or null.

    Raises:
        KeyError: the value is missing or null, and ``default`` is None.
        ValueError: the value is not an integer, or is below 1.
    """
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise KeyError(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, not a number from 1 on")
    return value


def _window(layer: Mapping[str, Any]) -> int:
    """Return the attention window, or 0 unless layer_types has a sliding layer; many files list an unused window."""
    return positive(layer, "sliding_window") if "sliding_attention" in (layer.get("layer_types") or ()) else 0


def _layers(config: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, Convention, bool]:
    """Return the layers as in the file, their numbering convention, and whether the file records the convention."""
    name, said = "eagle_aux_hidden_state_layer_ids", config.get(CONVENTION)
    if said not in (None, *get_args(Convention)):
        raise ValueError(f"{CONVENTION} is {said!r}, not one of {', '.join(get_args(Convention))}")
    usual: Convention = "inputs" if config.get(name) else "outputs"
    found = config.get(name) or section_of(config, "eagle_config").get(name)
    if not found:
        return None, "inputs", said == "inputs"
    if not isinstance(found, list) or not all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in found
    ):
        raise ValueError(f"{name} is {found!r}, not a list of layers")
    return tuple(found), said or usual, said is not None
