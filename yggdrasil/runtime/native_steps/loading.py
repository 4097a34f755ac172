"""Loads a natively supported model by packing its weights directly from the mapped file, without transformers."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yggdrasil.artifacts import check_weights, parse_json
from yggdrasil.artifacts.gguf import read_gguf_layout
from yggdrasil.artifacts.memory import take_reserved
from yggdrasil.checkpoints.facts import MOST_LAYERS, load_config, refuse_unverifiable
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.formats.rows import PackedRows
from yggdrasil.checkpoints.gguf.mapped import MappedGguf
from yggdrasil.checkpoints.head_copy import copy_in_8_bits, is_copy_faster
from yggdrasil.checkpoints.mapped import MappedSafetensors
from yggdrasil.checkpoints.model_sizes import ModelSizes
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.native.arena import Arena
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.native_steps.description import Description, describe
from yggdrasil.runtime.native_steps.families import BOTH, FAMILIES, FULL, SLIDING, Config, with_defaults
from yggdrasil.runtime.native_steps.weights import EMBEDDING, HEAD, is_tied, weight_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def description_of(source: Source) -> tuple[Config, Description] | None:
    """Return the configuration (config.json as a mapping) and the layer properties of the model in ``source``.

    Returns None if native steps do not cover the model, or config.json is missing or invalid.
    """
    try:
        config = parse_json((source.folder / "config.json").read_bytes())
        is_sized = isinstance(config, dict) and int(config["num_hidden_layers"]) <= MOST_LAYERS
        described = describe(config) if is_sized else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return None  # the general loader raises the error
    return None if described is None or not _fits(described) else (config, described)


def sizes_of(source: Source) -> ModelSizes:
    """Return the sizes of the model in ``source``.

    Transformers is imported only if native steps do not cover the model.

    Raises:
        YggdrasilError: the model's configuration is missing or invalid, or the model is unsupported.
    """
    found = description_of(source)
    if found is None:
        config = load_config(source)
        refuse_unverifiable(config, source.given)
        return ModelSizes.of(config)
    return _sizes(*found)


def _sizes(config: Config, described: Description) -> ModelSizes:
    full = with_defaults(config)
    assert full is not None, "it was described"
    attends = [shape.kind in (FULL, SLIDING, BOTH) for shape in described.layers]
    return ModelSizes.of_facts(full, described.ropes[FULL], attends, described.recurrence)


def refuse_uncovered(source: Source) -> None:
    """Check, before weights are read, that native steps can run the model in ``source``.

    Raises:
        YggdrasilError: native steps do not cover the model's architecture, or the native library is missing.
    """
    if not is_native():
        raise YggdrasilError("native steps need the native library, which is not installed; use --backend inductor")
    if description_of(source) is None:
        raise YggdrasilError(
            f"{source.given}: native steps do not cover its architecture; use --backend inductor, which compiles it"
        )


def _fits(described: Description) -> bool:
    """Return whether the sizes are positive and consistent, and even where the kernels require even sizes."""
    sizes = (
        described.vocab_size, described.hidden_size, described.inner_size, described.query_heads, described.key_heads,
        described.head_size, len(described.layers),
    )  # fmt: skip
    return (
        min(sizes) > 0
        and described.query_heads % described.key_heads == 0
        and described.hidden_size % 2 == described.inner_size % 2 == described.head_size % 2 == 0
    )


def load_described(
    source: Source, dtype: torch.dtype, num_threads: int, weights: Weights, build: Callable[[], "PreTrainedModel"]
) -> LoadedModel | None:
    """Load and pack the model in ``source`` for native steps on a CPU, directly from its mapped file.

    Returns None without the native library, and for families, files or formats that can only be loaded in another way.

    Args:
        weights: "full", or "file" to keep a GGUF file's quantised blocks; other formats give None.
        build: loads the transformers model; called only if ``LoadedModel.model`` is read.

    Raises:
        YggdrasilError: weights of the model are missing from the checkpoint, or others are in it.
    """
    found = description_of(source) if is_native() and weights in ("full", "file") else None
    if found is None or not FAMILIES[found[0]["model_type"]].is_mapped or (weights == "file" and source.gguf is None):
        return None
    config, described = found
    packer = _Packer(_mapped(source, config, described), dtype, keeps_blocks=weights == "file")
    packer.add(EMBEDDING, is_linear=False)
    packer.add_head(is_tied=is_tied(config))  # first, as the largest weight needs most memory while it is packed
    for name, shape in weight_shapes(config, described).items():
        if name not in (EMBEDDING, HEAD):
            packer.add(name, is_linear=len(shape) == 2)
    packer.finish()
    return LoadedModel(
        source.given, _sizes(config, described), num_threads, dtype, torch.device("cpu"), packer.tensors,
        packer.formats, config, json.dumps(config, sort_keys=True), build, is_described=True,
    )  # fmt: skip


def _mapped(source: Source, config: Config, described: Description) -> MappedGguf | MappedSafetensors:
    """Map the file of the weights of ``source``. Raises YggdrasilError if they are not the weights of the model."""
    shapes = weight_shapes(config, described)
    if source.gguf is not None:
        return MappedGguf(read_gguf_layout(source.gguf), shapes, (described.query_heads, described.key_heads))
    check_weights(source.folder)
    optional = HEAD if is_tied(config) else ""
    shapes.setdefault(HEAD, shapes[EMBEDDING])
    drafting: Any = config.get("num_nextn_predict_layers") or 0
    return MappedSafetensors(source.folder, source.given, shapes, optional, int(drafting))


class _Packer:
    """Pack a model's weights contiguously in one arena, in the order in which steps read them."""

    def __init__(self, mapped: MappedGguf | MappedSafetensors, dtype: torch.dtype, *, keeps_blocks: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.formats: dict[str, int] = {}
        self._mapped, self._dtype, self._keeps_blocks = mapped, dtype, keeps_blocks
        if not keeps_blocks:
            mapped.stop_packing()
        self._reserved = take_reserved()
        self._arena = Arena(None if self._reserved is None else self._reserved.region)

    def add(self, name: str, *, is_linear: bool) -> None:
        """Store the weight ``name`` in ``tensors``: packed if it is linear or read as quantised blocks, else a copy."""
        stem = name.rpartition(".")[0]
        if (is_linear or name == EMBEDDING) and (rows := self._rows(name)) is not None:
            self._keep(stem, rows)
        elif is_linear:
            self.tensors[f"{stem}.packed"] = self._packed(self._mapped.values(name, self._dtype))
        else:
            values = self._mapped.values(name, self._dtype)
            kept = self._arena.zeros(values.shape, self._dtype)
            self.tensors[name] = kept.copy_(values)
        self._mapped.release(name)

    def add_head(self, *, is_tied: bool) -> None:
        """Pack the LM head from its own weight or from the embedding.

        A tied quantised embedding is used as LM head without packing it again.
        """
        own = HEAD in self._mapped
        if not own and is_tied and "model.embed_tokens.packed" in self.tensors:
            return
        source = HEAD if own else EMBEDDING
        rows = self._rows(source)
        if rows is not None:
            self._keep("lm_head", rows)
        else:
            values = self._mapped.values(HEAD, self._dtype) if own else self.tensors[EMBEDDING]
            self.tensors["lm_head.packed"] = self._packed(values)
            if is_copy_faster(values):
                copy, factors = copy_in_8_bits(values, self._arena)
                self.tensors |= {"lm_head.copy": copy, "lm_head.factors": factors}
        self._mapped.release(source)

    def finish(self) -> None:
        """Give the unused rest of the memory that was reserved for the weights back to the system."""
        if self._reserved is not None:
            self._reserved.stop()
            self._arena.free_rest()

    def _rows(self, name: str) -> PackedRows | None:
        return self._mapped.packed(name) if self._keeps_blocks else None

    def _keep(self, stem: str, rows: PackedRows) -> None:
        self.tensors[f"{stem}.packed"], self.formats[stem] = rows.packed, rows.format

    def _packed(self, values: Tensor) -> Tensor:
        packed = self._arena.zeros(torch.ops.yggdrasil.packed_shape(values), values.dtype)
        torch.ops.yggdrasil.pack_linear(values, packed)
        return packed
