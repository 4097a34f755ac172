"""Loads a causal language model with transformers for static-shape steps; refuses unsupported models."""

import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from yggdrasil.artifacts import check_weights
from yggdrasil.artifacts.gguf import read_gguf_header
from yggdrasil.checkpoints.facts import load_config, refuse_unverifiable
from yggdrasil.checkpoints.families import split_projections
from yggdrasil.checkpoints.formats.layers import formats_of
from yggdrasil.checkpoints.formats.names import Weights
from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.checkpoints.formats.rows import Quantise
from yggdrasil.checkpoints.fused import fuse_linears
from yggdrasil.checkpoints.gaps import is_ignored, refuse_gaps
from yggdrasil.checkpoints.gguf.rows import rows_of_file
from yggdrasil.checkpoints.model_sizes import ModelSizes
from yggdrasil.checkpoints.mxfp4 import Mxfp4Experts, holds_mxfp4
from yggdrasil.checkpoints.packing import pack_linears
from yggdrasil.checkpoints.placeholders import check_no_placeholders, load_with_placeholders
from yggdrasil.checkpoints.recurrent import Recurrence
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError, first_line
from yggdrasil.native import has_triton, is_native
from yggdrasil.runtime.attention import ATTENTION_NAME
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.states.operators import serve_recurrent_layers


def load_model(
    source: str | Path | Source,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    *,
    pack: bool = True,
    weights: Weights = "full",
) -> LoadedModel:
    """Load a checkpoint with transformers, and prepare it for steps with tree attention.

    Args:
        source: folder, GGUF file or hub id.
        num_threads: threads of the packed layers' kernels.
        pack: on a CPU, pack all linear layers; on a GPU, pack the quantised ones and fuse layers of one input.
        weights: "full" (unquantised); "file" to keep the quantised blocks of a GGUF file or of MXFP4 experts, which
            means "full" on a GPU without Triton; or a format to which linear layers and embedding are quantised.

    Raises:
        YggdrasilError: the checkpoint is missing, has missing or unexpected weights, or the architecture or
            ``weights`` is unsupported.
    """
    found = Source.find(source)
    config = load_config(found)
    refuse_unverifiable(config, found.given)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    _refuse_weights(weights, found, device)
    if weights == "file" and device.type == "cuda" and not has_triton():
        weights = "full"  # the portable operators would dequantise every weight in every pass
    keeps_blocks = weights == "file" and pack
    folder = found.checkpoint(dtype, keeps_blocks=keeps_blocks)
    check_weights(folder)
    experts = Mxfp4Experts(folder) if holds_mxfp4(folder) else None
    load: Any = load_with_placeholders if keeps_blocks or experts else AutoModelForCausalLM.from_pretrained
    if experts is not None and not keeps_blocks:
        load = partial(load, values=experts.values)
    try:
        model, report = load(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, ignore_mismatched_sizes=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # an odd configuration may raise anything here
        raise YggdrasilError(f"{found.given} could not be loaded: {first_line(error)}") from error
    _refuse_gaps(report, found.given, config)
    model.eval()
    split_projections(model)
    quantise = _quantise(model, found, weights, experts)
    if pack and quantise is not None and device.type != "cpu":
        pack_linears(model, num_threads, quantise, device)
    loaded = prepare_model(model.to(device), found.given, num_threads, pack=pack, quantise=quantise)
    check_no_placeholders(model)
    return loaded


def _refuse_gaps(report: dict[str, Any], name: str, config: PretrainedConfig) -> None:
    """Raise YggdrasilError if transformers' loading report has missing, unexpected or misshapen weights."""
    sizes = config.get_text_config().num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    unexpected = sorted(key for key in report["unexpected_keys"] if not is_ignored(key, *sizes))
    misshapen = [f"{key} ({list(there)}, not {list(here)})" for key, there, here in sorted(report["mismatched_keys"])]
    refuse_gaps(name, sorted(report["missing_keys"]), unexpected, misshapen)


def _refuse_weights(weights: Weights, source: Source, device: torch.device) -> None:
    """Raise YggdrasilError if ``weights`` is unsupported on this device or for this model."""
    if weights == "full":
        return
    if device.type == "cpu" and not is_native():
        raise YggdrasilError(f"--weights {weights} needs the native kernels, which need a C++ compiler: install g++")
    if weights == "file" and source.gguf is None and not holds_mxfp4(source.folder):
        raise YggdrasilError(
            f"--weights file reads the blocks of a GGUF file or of MXFP4 experts, and {source.given} has none; use q8_0"
        )


def _quantise(
    model: PreTrainedModel, source: Source, weights: Weights, experts: Mxfp4Experts | None
) -> Quantise | None:
    """Return the function that supplies quantised rows to ``pack_linears``; None for full weights."""
    if weights == "full":
        return None
    if weights != "file":
        return rounding_to(weights, model)
    if experts is not None:
        return experts.part
    assert source.gguf is not None
    return rows_of_file(read_gguf_header(source.gguf), model.config)


def _has_attention_interface(model: PreTrainedModel) -> bool:
    """Return whether the model's attention function can be replaced; some families support it without declaring it."""
    says_so = getattr(model, "_supports_attention_backend", False)
    return says_so or hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")


def prepare_model(
    model: PreTrainedModel, name: str, num_threads: int, *, pack: bool = True, quantise: Quantise | None = None
) -> LoadedModel:
    """Install tree attention in the transformers model ``model``, in place, and return it as a ``LoadedModel``.

    Args:
        name: the model's name in messages.
        num_threads: threads of the packed layers' kernels.
        pack: on a CPU, pack the linear layers; on a GPU, fuse those of one input (``fuse_linears``).
        quantise: returns a weight's quantised rows; None means full weights. Used only to pack on a CPU.

    Raises:
        YggdrasilError: the attention or recurrent layers cannot be replaced, or forward takes no ``position_ids``.
    """
    if not _has_attention_interface(model):
        raise YggdrasilError(
            f"{name}: {type(model).__name__} has its own attention code, which supports no tree mask; "
            "use a model whose transformers implementation supports attention backends"
        )
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise YggdrasilError(
            f"{name}: {type(model).__name__} counts positions itself and takes none, and siblings in a tree share one; "
            "use a model whose transformers implementation takes position_ids"
        )
    model.requires_grad_(False)
    split_projections(model)
    model.set_attn_implementation(ATTENTION_NAME)
    if Recurrence.of(model.config.get_text_config()) is not None:
        serve_recurrent_layers(model)
    model.config.use_cache = True
    # Override a checkpoint's settings of what a pass returns.
    model.config.output_hidden_states = model.config.output_attentions = False
    model.config.return_dict = True
    if pack and model.device.type == "cpu":
        pack_linears(model, num_threads, quantise)
    elif pack:
        fuse_linears(model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    described = model.config.to_json_string()
    return LoadedModel(
        name, ModelSizes.of(model.config), num_threads, model.dtype, model.device, tensors, formats_of(model),
        model.config.get_text_config().to_dict(), described, lambda: model,
    )  # fmt: skip
