"""Checks and loads the target and the drafter of a calibration."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from yggdrasil.artifacts import check_weights, current_machine
from yggdrasil.artifacts.homes import expanded
from yggdrasil.calibration.measurement.threads import on_threads
from yggdrasil.checkpoints.facts import check_drafter_tokenizer, load_config, load_tokenizer
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.compiler.compiled import Backend
from yggdrasil.drafters.heads.block.config import read_block_settings
from yggdrasil.drafters.heads.convention import with_detected_layers
from yggdrasil.drafters.heads.eagle.config import read_settings
from yggdrasil.drafters.heads.kinds import is_head, kind_of
from yggdrasil.drafters.heads.loading import LoadedHead, load_head
from yggdrasil.drafters.protocol import group_of
from yggdrasil.drafters.registry import make_drafter
from yggdrasil.engine.assembly import Assembly, assemble, default_backend, open_device, usable_backend
from yggdrasil.engine.loading import DTYPES
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.memory_limits import total_card_bytes
from yggdrasil.runtime.native_steps.loading import refuse_uncovered, sizes_of
from yggdrasil.scheduling.plan import DeviceName

_LEAST_LENGTH = 2048  # tokens, whatever the memory, unless a model's context is shorter
_BYTES = 2  # per value of the KV cache
_CACHE_SHARE = 1 / 16  # of the memory, for full caches: on a CPU, untouched pages take no memory

if TYPE_CHECKING:
    from yggdrasil.calibration.calibration_settings import PairSource


def check_pair(source: "PairSource", tokenizer: Tokenizer | None = None) -> Tokenizer:
    """Check target and drafter without loading their weights, and return the target's tokenizer.

    ``tokenizer`` is the target's tokenizer if it is loaded already: a second copy with 150,000 tokens takes 45 MB.

    Raises:
        YggdrasilError: files are missing, damaged or untrusted, a model is unsupported, the tokenizers differ, or
            ``max_length`` exceeds a model's context.
    """
    names = [source.target]
    if source.drafter is not None and is_head(source.drafter):
        _check_head(expanded(source.drafter))
    elif source.drafter is not None:
        names.append(source.drafter)
    found = [Source.find(name) for name in names]
    for model in found:
        context = sizes_of(model).max_context
        if model.gguf is None:
            check_weights(model.folder)
        if source.backend == "native":
            refuse_uncovered(model)
        if source.shapes.max_length > context:
            raise YggdrasilError(
                f"--max-length {source.shapes.max_length} is more than the {context} positions of {model.given}; "
                f"give at most {context}"
            )
    tokenizer = load_tokenizer(found[0]) if tokenizer is None else tokenizer
    if len(found) == 2:
        check_drafter_tokenizer(tokenizer, *found)
    return tokenizer


def _check_head(folder: Path) -> None:
    """Raise YggdrasilError if the configuration of a draft head is unsupported.

    Medusa heads are described by their tensors, and an MTP module by the target. Both are checked at loading.
    """
    kind = kind_of(folder)
    if kind == "mtp":
        load_config(folder)
    elif kind == "dflash":
        read_block_settings(folder)
    elif kind != "medusa":
        read_settings(folder, is_first=kind == "eagle")


def default_max_length(target: str, drafter: str | None, device: DeviceName = "cpu") -> int:
    """Return the default ``max_length`` in tokens: the shorter context of the models, limited by the device's memory.

    The KV caches of both models, if full, take at most 1/16 of the total memory of the GPU or the host. (A limit by the
    free memory would vary from run to run, but compiled steps are cached per length.) The limit by memory is rounded
    down to a power of two and is at least 2048; a model's own context may be shorter.

    Args:
        target: folder, GGUF file or hub id.
        drafter: draft model, given likewise, or draft head; None without either. The cache of a head is not counted.
        device: where the models will run.

    Raises:
        YggdrasilError: a model is missing or unsupported.
    """
    models = [target] if drafter is None or is_head(drafter) else [target, drafter]
    sizes = [sizes_of(Source.find(model)) for model in models]
    slot = sum(2 * heads * size * _BYTES for each in sizes for heads, size in each.key_heads)  # keys and values
    memory = total_card_bytes() if device == "cuda" else None
    affordable = int((memory or current_machine().memory_gib * 2**30) * _CACHE_SHARE / slot)
    allowed = max(_LEAST_LENGTH, 1 << max(affordable, 1).bit_length() - 1)
    return min(allowed, *(each.max_context for each in sizes))


def default_drafter_weights(drafter: str | None, dtype: str, device: str) -> Weights:
    """Return the default weight format of a drafter: "full" for a head or no drafter, else the default of a model."""
    return "full" if drafter is None or is_head(drafter) else usual_weights(drafter, dtype, device)


def build_assembly(source: "PairSource", knots: torch.Tensor | None = None, backend: Backend | None = None) -> Assembly:
    """Load the target and its drafter, and define their steps, which ``Assembly.complete`` builds.

    The tree attention of each model is checked against plain attention.

    Args:
        knots: acceptance calibration of the drafter, [K] float32; None: the drafter's probabilities are used unchanged.
        backend: builder of the steps; None: ``source.backend``, or if that is None the device's default.

    Raises:
        YggdrasilError: a model is missing or unsupported, the device is not available, the backend does not run on it,
            or tree attention differs from plain attention.
    """
    from yggdrasil.runtime.gpu_memory import ToLoad, check_card
    from yggdrasil.runtime.loading import load_model  # imported here: a first use only checks the pair
    from yggdrasil.runtime.selfcheck import check_tree_attention

    device, dtype = open_device(source.device), DTYPES[source.dtype]
    backend = backend or usable_backend(source.backend, device) or default_backend(device)
    models = [ToLoad(Source.find(source.target), source.weights)]
    if source.drafter is not None and not is_head(source.drafter):
        models.append(ToLoad(Source.find(source.drafter), source.drafter_weights))
    shapes = source.shapes
    check_card(models, dtype, device, shapes.max_length, shapes.cache_capacity, shapes.widest_pass)
    target = load_model(source.target, dtype, device, source.target_threads, weights=source.weights)
    check_tree_attention(target, _text_of(source.target))
    drafter: LoadedModel | LoadedHead | None = None
    if source.drafter is not None and is_head(source.drafter):
        drafter = _head(source.drafter, source, target)
    elif source.drafter is not None:
        drafter = load_model(source.drafter, dtype, device, source.drafter_threads, weights=source.drafter_weights)
        check_tree_attention(drafter, _text_of(source.drafter))
    return assemble(
        target, drafter, source.shapes, backend, knots=knots, other_stages=source.schedules,
        model_free=group_of([make_drafter(each) for each in source.model_free]),
    )  # fmt: skip


def _text_of(model: str) -> list[int]:
    """Return the tokens of a short English text for the self-check."""
    text = "The quick brown fox jumps over the lazy dog, 12 times a day; def f(x): return x + 1"
    return list(load_tokenizer(Source.find(model)).encode(text))


def _head(folder: str, source: "PairSource", target: LoadedModel) -> LoadedHead:
    head = load_head(expanded(folder), target, source.drafter_threads, source.vocabulary)
    return with_detected_layers(head, target, Source.find(source.target).fingerprint())


def with_head(assembly: Assembly, source: "PairSource") -> Assembly:
    """Return an assembly of the same target and head, in which the head drafts only tokens of ``source.vocabulary``.

    The head is loaded again from ``source.drafter``.
    """
    assert source.drafter is not None, "the assembly has one"
    target = assembly.target.loaded
    return assemble(
        target, _head(source.drafter, source, target), source.shapes, assembly.target.backend,
        other_stages=source.schedules, model_free=assembly.engine.model_free,
    )  # fmt: skip


def with_threads(assembly: Assembly, source: "PairSource") -> Assembly:
    """Return an assembly of the same weights whose models run on the numbers of threads in ``source``.

    The new assembly has new caches, a new tree and new steps, which are not built yet. ``assembly`` shares the layers
    and must not be used afterwards.
    """
    target, drafter = on_threads(assembly.target.loaded, source.target_threads), assembly.second
    if isinstance(drafter, LoadedHead):
        drafter = drafter._replace(loaded=on_threads(drafter.loaded, source.drafter_threads))
    elif isinstance(drafter, LoadedModel):
        drafter = on_threads(drafter, source.drafter_threads)
    return assemble(
        target, drafter, source.shapes, assembly.target.backend, other_stages=source.schedules,
        model_free=assembly.engine.model_free,
    )  # fmt: skip
