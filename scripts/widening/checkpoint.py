"""Write the wide model as a checkpoint, one shard in memory at a time, or build it on a device without a disk."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from widening.layout import Layout, check_shape, wide_tensors
from widening.shapes import ModelShape
from widening.source import Source, find_filler
from yggdrasil.artifacts import atomic_directory
from yggdrasil.checkpoints.shards import ShardWriter
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = ("*token*.json", "*.model", "vocab.*", "merges.txt", "chat_template*")
COPIED_FILES = (*TOKENIZER_FILES, "generation_config.json", "LICENSE*")


@dataclass(frozen=True, slots=True)
class WideningReport:
    """What was written; the filler is None when the vocabulary was not enlarged."""

    shape: ModelShape
    num_parameters: int
    filler_token: int | None
    filler_probability: float | None  # the highest seen by the probe; None when the caller named the filler


def widen_checkpoint(
    checkpoint: Path,
    out: Path,
    shape: ModelShape,
    *,
    untie: bool = False,
    filler_token: int | None = None,
    seed: int = 0,
    max_shard_bytes: int = 2 * 10**9,
) -> WideningReport:
    """Write ``checkpoint`` padded to ``shape`` as ``out``, a new folder in the Hugging Face layout.

    Holds one shard and one weight in memory, not the model. ``out`` appears complete or not at all. Equal arguments
    give equal files. Raises YggdrasilError when the source cannot be widened to ``shape``.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise YggdrasilError(f"{out} already exists and is not an empty folder; give another --out or remove it.")
    source = Source.open(checkpoint)
    check_shape(source, shape)
    tie = source.is_tied() and not untie
    probability = None
    if shape.vocab_size <= source.shape.vocab_size:
        filler_token = None
    elif filler_token is None:
        filler_token, probability = find_filler(source, seed)
    elif not 0 <= filler_token < source.shape.vocab_size:
        raise YggdrasilError(f"--filler-token {filler_token} is not in the source's 0..{source.shape.vocab_size - 1}.")
    layout = Layout.between(source.shape, shape, filler_token or 0)

    with atomic_directory(out) as partial:
        writer = ShardWriter(partial, max_shard_bytes)
        for name, tensor in wide_tensors(source, layout, tie, torch.Generator().manual_seed(seed)):
            writer.add(name, tensor)
        writer.close()
        report = WideningReport(shape, writer.num_parameters, filler_token, probability)
        _write_config(partial, source, layout, tie)
        facts = {"widened_from": asdict(source.shape), "seed": seed, **asdict(report)}
        (partial / "widening.json").write_text(json.dumps(facts, indent=1) + "\n")
    return report


def widen_in_memory(checkpoint: Path, shape: ModelShape, device: torch.device, *, seed: int = 0) -> "PreTrainedModel":
    """The model that ``widen_checkpoint`` would write, as bfloat16 on ``device``, without going through a disk.

    New weights are drawn on the device, so they differ from the written ones there; the function is the same. Raises
    YggdrasilError when the source cannot be widened to ``shape``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source = Source.open(checkpoint)
    check_shape(source, shape)
    tie = source.is_tied()
    filler = find_filler(source, seed)[0] if shape.vocab_size > source.shape.vocab_size else 0
    layout = Layout.between(source.shape, shape, filler)
    raw = _wide_config(source, layout, tie)
    config = AutoConfig.for_model(**{key: value for key, value in raw.items() if key != "dtype"})
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.eval().to(device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in wide_tensors(source, layout, tie, torch.Generator(device).manual_seed(seed)):
            parameters.pop(name).copy_(tensor)
    assert not parameters, f"no weight for {sorted(parameters)}"
    return model


def _wide_config(source: Source, layout: Layout, tie: bool) -> dict[str, Any]:
    """The source's config.json with the new dimensions."""
    wide = layout.shape
    config = dict(source.raw_config)
    config |= {
        "hidden_size": wide.hidden_size,
        "num_hidden_layers": wide.num_layers,
        "num_attention_heads": wide.num_heads,
        "num_key_value_heads": wide.num_kv_heads,
        "head_dim": wide.head_dim,
        "intermediate_size": wide.intermediate_size,
        "vocab_size": wide.vocab_size,
        "rms_norm_eps": source.config["rms_norm_eps"] * source.shape.hidden_size / wide.hidden_size,
        "tie_word_embeddings": tie,
    }
    layer_types = source.config.get("layer_types")
    if layer_types:
        config["layer_types"] = [layer_types[origin] for origin, _ in layout.layers]
    return config


def _write_config(folder: Path, source: Source, layout: Layout, tie: bool) -> None:
    """Write config.json with the new dimensions and copy the tokenizer's files."""
    config = _wide_config(source, layout, tie)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in COPIED_FILES:
        for file in source.path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
