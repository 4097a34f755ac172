"""Where each row and column of a wide weight comes from, and the weights made so.

Dims: R rows (outputs), C columns (inputs) of a weight.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from widening.shapes import ModelShape, least_kv_heads
from widening.source import ARCHITECTURES, EMBEDDING, FINAL_NORM, OUTPUT_HEAD, Source
from yggdrasil.errors import YggdrasilError

ROPE_TYPES_WITHOUT_DIMENSION = ("default", "linear", "llama3")  # scale each frequency by itself
RANDOM, ZERO = -1, -2  # what fills a row or column that has no source; ZERO wins where both meet


def place_heads(source: ModelShape, wide: ModelShape) -> tuple[list[int], list[int]]:
    """Return the source head of each wide query head and of each wide key-value head, RANDOM where it is new.

    A wide group holds query heads of one source group only; a source group too large for one wide group takes several,
    and its key-value head is repeated in each. ``wide`` has at least the source's number of query heads.
    """
    if wide.num_heads % wide.num_kv_heads:
        raise YggdrasilError(f"--num-heads {wide.num_heads} is not a multiple of --num-kv-heads {wide.num_kv_heads}.")
    group, wide_group = source.num_heads // source.num_kv_heads, wide.num_heads // wide.num_kv_heads
    wide_groups_each = math.ceil(group / wide_group)
    needed = source.num_kv_heads * wide_groups_each
    if needed > wide.num_kv_heads:
        least = least_kv_heads(source, wide.num_heads)
        raise YggdrasilError(
            f"--num-kv-heads {wide.num_kv_heads} with --num-heads {wide.num_heads} cannot hold the source's "
            f"{source.num_kv_heads} groups of {group}; the least that can is --num-kv-heads {least}."
        )
    queries = [RANDOM] * wide.num_heads
    keys = [RANDOM] * wide.num_kv_heads
    for wide_kv in range(needed):
        kv, part = divmod(wide_kv, wide_groups_each)
        keys[wide_kv] = kv
        for offset in range(min(wide_group, group - part * wide_group)):
            queries[wide_kv * wide_group + offset] = kv * group + part * wide_group + offset
    return queries, keys


def _head_axis(heads: list[int], channels: list[int], source_dim: int, new_channel: int, new_head: int) -> Tensor:
    """Expand a placement of heads to one of their channels; ``channels`` gives the source of each channel of a head."""
    axis: list[int] = []
    for head in heads:
        if head < 0:
            axis += [new_head] * len(channels)
        else:
            axis += [head * source_dim + channel if channel >= 0 else new_channel for channel in channels]
    return torch.tensor(axis)


def _padded_axis(size: int, wide_size: int, fill: int) -> Tensor:
    return torch.cat((torch.arange(size), torch.full((wide_size - size,), fill)))


@dataclass(frozen=True, slots=True)
class Layout:
    """For each weight of a block, the source index of every wide row [R] and column [C], or RANDOM or ZERO."""

    shape: ModelShape
    axes: dict[str, tuple[Tensor, Tensor]]  # by module name; norms have no columns of their own
    embedding: tuple[Tensor, Tensor]
    output_head: tuple[Tensor, Tensor]
    layers: list[tuple[int, bool]]  # the source block of each wide block, and whether it is a mute copy of it
    norm_scale: float
    query_scale: float

    @classmethod
    def between(cls, narrow: ModelShape, wide: ModelShape, filler_token: int) -> "Layout":
        """Place the parts of a ``narrow`` model in a ``wide`` one, whose shape ``check_shape`` passed."""
        factor, half = wide.head_dim // narrow.head_dim, wide.head_dim // 2
        # Frequency j of d channels is frequency factor*j of factor*d; rotary pairs are channels (i, i + half).
        rotary = [
            channel // half * (narrow.head_dim // 2) + channel % half // factor if channel % factor == 0 else ZERO
            for channel in range(wide.head_dim)
        ]
        plain = [channel if channel < narrow.head_dim else ZERO for channel in range(wide.head_dim)]
        queries, keys = place_heads(narrow, wide)
        hidden_in = _padded_axis(narrow.hidden_size, wide.hidden_size, RANDOM)
        hidden_out = _padded_axis(narrow.hidden_size, wide.hidden_size, ZERO)
        units_in = _padded_axis(narrow.intermediate_size, wide.intermediate_size, RANDOM)
        units_out = _padded_axis(narrow.intermediate_size, wide.intermediate_size, ZERO)
        vocabulary = _padded_axis(narrow.vocab_size, wide.vocab_size, filler_token)
        first_copies = [layer * wide.num_layers // narrow.num_layers for layer in range(narrow.num_layers)]
        origins = [bisect_right(first_copies, layer) - 1 for layer in range(wide.num_layers)]
        # A padded query channel is zero, so the key channel it meets may be anything.
        return cls(
            shape=wide,
            axes={
                "input_layernorm": (hidden_in, torch.zeros(1, dtype=torch.long)),
                "self_attn.q_proj": (_head_axis(queries, rotary, narrow.head_dim, ZERO, RANDOM), hidden_in),
                "self_attn.k_proj": (_head_axis(keys, rotary, narrow.head_dim, RANDOM, RANDOM), hidden_in),
                "self_attn.v_proj": (_head_axis(keys, plain, narrow.head_dim, RANDOM, RANDOM), hidden_in),
                "self_attn.o_proj": (hidden_out, _head_axis(queries, plain, narrow.head_dim, ZERO, ZERO)),
                "post_attention_layernorm": (hidden_in, torch.zeros(1, dtype=torch.long)),
                "mlp.gate_proj": (units_in, hidden_in),
                "mlp.up_proj": (units_in, hidden_in),
                "mlp.down_proj": (hidden_out, units_out),
            },
            embedding=(vocabulary, hidden_out),
            output_head=(vocabulary, hidden_in),
            layers=[(origin, first_copies[origin] != layer) for layer, origin in enumerate(origins)],
            norm_scale=math.sqrt(narrow.hidden_size / wide.hidden_size),
            query_scale=math.sqrt(factor),
        )


def check_shape(source: Source, wide: ModelShape) -> None:
    """Refuse, by the option that gives it, a dimension in which ``wide`` cannot hold ``source``."""
    narrow = source.shape
    for field in fields(ModelShape):
        least, requested = getattr(narrow, field.name), getattr(wide, field.name)
        if requested < least:
            raise YggdrasilError(
                f"--{field.name.replace('_', '-')} must be at least the source's {least}, not {requested}."
            )
    place_heads(narrow, wide)
    if wide.head_dim % narrow.head_dim:
        raise YggdrasilError(
            f"--head-dim {wide.head_dim} is not a multiple of the source's {narrow.head_dim}, "
            "which rotary positions ask for."
        )
    rope_type = (source.config.get("rope_parameters") or {}).get("rope_type", "default")
    if wide.head_dim != narrow.head_dim and rope_type not in ROPE_TYPES_WITHOUT_DIMENSION:
        raise YggdrasilError(
            f"--head-dim must stay {narrow.head_dim}: rotary scaling of type {rope_type} depends on the head dimension."
        )
    if wide.hidden_size % wide.num_heads:
        raise YggdrasilError(
            f"--hidden-size {wide.hidden_size} is not a multiple of --num-heads {wide.num_heads}, "
            "which transformers asks of a Llama."
        )


def wide_tensors(source: Source, layout: Layout, tie: bool, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of every wide weight, one at a time, in the order of the model."""
    _refuse_unknown_weights(source, layout)
    yield EMBEDDING, widened(source.read(EMBEDDING), layout.embedding, generator)
    for layer, (origin, is_mute) in enumerate(layout.layers):
        for module, (rows, columns) in layout.axes.items():
            for kind in ("weight", "bias"):
                name = f"model.layers.{origin}.{module}.{kind}"
                if kind == "bias" and name not in source.files:
                    continue
                narrow = source.read(name)
                if module.endswith("layernorm"):
                    narrow = scaled(narrow, layout.norm_scale)
                elif module.endswith("q_proj"):
                    narrow = scaled(narrow, layout.query_scale)
                wide = widened(narrow, (rows, columns), generator)
                if is_mute and module in ("self_attn.o_proj", "mlp.down_proj"):
                    wide.zero_()
                yield f"model.layers.{layer}.{module}.{kind}", wide
    narrow = scaled(source.read(FINAL_NORM), layout.norm_scale)
    yield FINAL_NORM, widened(narrow, layout.axes["input_layernorm"], generator)
    if not tie:
        is_absent = source.is_tied() and OUTPUT_HEAD not in source.files
        narrow = source.read(EMBEDDING if is_absent else OUTPUT_HEAD)
        yield OUTPUT_HEAD, widened(narrow, layout.output_head, generator)


def _refuse_unknown_weights(source: Source, layout: Layout) -> None:
    known = {EMBEDDING, FINAL_NORM, OUTPUT_HEAD}
    for layer in range(source.shape.num_layers):
        prefix = f"model.layers.{layer}."
        known |= {f"{prefix}{module}.{kind}" for module in layout.axes for kind in ("weight", "bias")}
        known.add(f"{prefix}self_attn.rotary_emb.inv_freq")  # in old checkpoints; never read by transformers
    unknown = sorted(source.files.keys() - known)
    if unknown:
        raise YggdrasilError(f"{source.path} holds {unknown[0]}, which is no weight of {', '.join(ARCHITECTURES)}.")


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Multiply without rounding to less than float32; a power of two is exact in any dtype and keeps it."""
    return tensor * factor if math.frexp(factor)[0] == 0.5 else tensor.float() * factor


def widened(narrow: Tensor, axes: tuple[Tensor, Tensor], generator: torch.Generator) -> Tensor:
    """Return the wide tensor of a source weight [R, C], or of a vector [R] whose column axis is not looked at."""
    device = generator.device
    rows, columns, narrow = axes[0].to(device), axes[1].to(device), narrow.to(device)
    if narrow.dim() == 1:
        return widened(narrow[:, None], (rows, torch.zeros(1, dtype=torch.long)), generator)[:, 0].contiguous()
    size = (len(rows), len(columns))
    if (rows == RANDOM).any() or (columns == RANDOM).any():
        std, mean = (value.item() for value in torch.std_mean(narrow.float(), correction=0))
        wide = torch.randn(size, generator=generator, device=device).mul_(std or 0.02).add_(mean).to(narrow.dtype)
        wide[rows == ZERO] = 0
        wide[:, columns == ZERO] = 0
    else:
        wide = torch.zeros(size, dtype=narrow.dtype, device=device)
    real_rows, real_columns = (rows >= 0).nonzero()[:, 0], (columns >= 0).nonzero()[:, 0]
    wide[real_rows[:, None], real_columns] = narrow[rows[real_rows, None], columns[real_columns]]
    return wide
