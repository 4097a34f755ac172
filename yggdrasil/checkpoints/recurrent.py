"""Sizes of the recurrent layers of a hybrid model, read from its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONVOLUTION, GATED_DELTA, STATE_SPACE = "short convolution", "gated delta network", "Mamba-2"
# Names of the same size in different model families; the first one present is used.
_STATE_SPACE_NAMES = {
    "conv_kernel": ("mamba_d_conv", "conv_kernel"),
    "heads": ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
    "key_heads": ("mamba_n_groups", "n_groups", "mamba_ngroups"),
    "key_size": ("mamba_d_state", "ssm_state_size"),
    "value_size": ("mamba_d_head", "mamba_head_dim", "mamba_headdim"),
}
_ATTENDING = ("full_attention", "sliding_attention", "attention", "hybrid")
_RECURRENT = ("linear_attention", "conv", "hybrid", "mamba")


@dataclass(frozen=True)
class Recurrence:
    """Sizes common to all recurrent layers: a causal convolution and, except for LFM2, a state [heads, K, V]."""

    kind: str  # CONVOLUTION, GATED_DELTA or STATE_SPACE
    layers: tuple[int, ...]  # layer indices
    conv_kernel: int  # taps
    conv_channels: int
    heads: int = 0  # value heads, also of the state; 0 if there is only the convolution
    key_heads: int = 0
    key_size: int = 0
    value_size: int = 0

    @classmethod
    def of(cls, config: Any) -> "Recurrence | None":
        """Return the sizes of the recurrent layers of a text model, or None without supported ones.

        ``config`` is transformers' configuration or another object with its fields.
        """
        layers = tuple(number for number, kind in enumerate(layer_types(config)) if kind in _RECURRENT)
        if not layers:
            return None
        if hasattr(config, "conv_L_cache"):
            return cls(CONVOLUTION, layers, config.conv_L_cache, config.hidden_size)
        if hasattr(config, "linear_num_value_heads"):
            keys, values = config.linear_num_key_heads, config.linear_num_value_heads
            key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
            channels = 2 * keys * key_size + values * value_size
            return cls(GATED_DELTA, layers, config.linear_conv_kernel_dim, channels, values, keys, key_size, value_size)
        sizes = {
            ours: next((getattr(config, name) for name in names if getattr(config, name, None)), None)
            for ours, names in _STATE_SPACE_NAMES.items()
        }
        if None in sizes.values():
            return None
        known: dict[str, Any] = sizes
        channels = known["heads"] * known["value_size"] + 2 * known["key_heads"] * known["key_size"]
        return cls(STATE_SPACE, layers, conv_channels=channels, **known)

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | None) -> "Recurrence | None":
        """Return the sizes of recurrent layers from a JSON record of ``dataclasses.asdict``; None gives None."""
        return None if record is None else cls(**{**record, "layers": tuple(record["layers"])})

    @property
    def num_buffers(self) -> int:
        """Return the number of state tensors that a step takes per recurrent layer: 5, or 2 for convolutions alone."""
        return 5 if self.heads else 2

    @property
    def state_size(self) -> int:
        """Return the number of elements of one recurrent layer's state."""
        return self.heads * self.key_size * self.value_size


def layer_types(config: Any) -> tuple[str, ...]:
    """Return the kind of every layer of a text model, such as "full_attention"; empty if ``config`` lists none."""
    return tuple(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def attending_layers(config: "PretrainedConfig") -> tuple[bool, ...]:
    """Return for each layer of a text model whether it has attention."""
    kinds = layer_types(config)
    if not any(kind in _RECURRENT for kind in kinds):
        return (True,) * int(config.num_hidden_layers)
    return tuple(kind in _ATTENDING for kind in kinds)
