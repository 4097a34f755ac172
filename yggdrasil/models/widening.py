"""Pad a Llama-family checkpoint to a larger shape that computes the same function.

A small trained pair widened to the shape of a real one has that shape's costs and keeps its own acceptance. Nothing new
ever reaches the residual stream: new channels of it stay zero, and so does what new heads, new intermediate units and
new blocks would add to it. All other new weights are random at the magnitude of the source's (new blocks are copies of
real ones), so no kernel finds anything to skip.

In float32 the copy gives the source's logits up to the rounding of sums. A factor that is not a power of two would be
rounded in bfloat16, so the norms (and ``q_proj`` where the head dimension is not enlarged by a power of four) are then
stored in float32. Loaded in bfloat16 the copy is as close to the source as bfloat16 is.

New vocabulary rows repeat the row of one token, the filler. An argmax gives the lower id of a tie, hence never a new
one; at worst, rounding prefers a copy where the filler itself would have been chosen. Sampling does see the copies: if
the filler has probability p, n copies together get n*p/(1 + n*p), most of which top-k or top-p sampling cuts off.

Dims: R rows (outputs), C columns (inputs) of a weight.
"""

import json
import math
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
ROPE_TYPES_WITHOUT_DIMENSION = ("default", "linear", "llama3")  # scale each frequency by itself
TOKENIZER_FILES = ("*token*.json", "*.model", "vocab.*", "merges.txt", "chat_template*")
COPIED_FILES = (*TOKENIZER_FILES, "generation_config.json", "LICENSE*")
EMBEDDING, FINAL_NORM, OUTPUT_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANDOM, ZERO = -1, -2  # what fills a row or column that has no source; ZERO wins where both meet


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions that decide what a Llama-family model costs."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class WideningReport:
    """What was written; the filler is None when the vocabulary was not enlarged."""

    shape: ModelShape
    num_parameters: int
    filler_token: int | None
    filler_probability: float | None  # the highest seen by the probe; None when the caller named the filler


_LLAMA_1B = ModelShape(2048, 16, 32, 8, 64, 8192, vocab_size=0)
_LLAMA_7B = ModelShape(4096, 32, 32, 32, 128, 11008, vocab_size=0)
SIZES: Mapping[str, ModelShape] = {  # vocab_size 0: the source's own
    "100M": ModelShape(768, 14, 12, 12, 64, 2048, vocab_size=0),
    "350M": ModelShape(1024, 24, 16, 16, 64, 3328, vocab_size=0),
    "1B": _LLAMA_1B,
    "7B": _LLAMA_7B,
    "llama-68m": ModelShape(768, 2, 12, 12, 64, 3072, vocab_size=32000),
    "llama2-7b": replace(_LLAMA_7B, vocab_size=32000),
    "llama3-1b": replace(_LLAMA_1B, vocab_size=128256),
    "llama3-8b": ModelShape(4096, 32, 32, 8, 128, 14336, vocab_size=128256),
}


def resolve_shape(source: ModelShape, size: str | None, dimensions: Mapping[str, int | None]) -> ModelShape:
    """Return the shape asked for: named dimensions over those of ``size`` over the source's own.

    Key and value heads not named follow ``num_heads`` at the source's group size, or are those of ``size``.
    """
    given = {name: value for name, value in dimensions.items() if value is not None}
    if size is None:
        if not given:
            raise YggdrasilError("Nothing to widen: give --size or at least one dimension such as --hidden-size.")
        base = source
        if "num_heads" in given:
            group = source.num_heads // source.num_kv_heads
            given.setdefault("num_kv_heads", max(1, given["num_heads"] // group))
    elif size in SIZES:
        base = replace(SIZES[size], vocab_size=SIZES[size].vocab_size or source.vocab_size)
    else:
        raise YggdrasilError(f"There is no size {size!r}; the sizes are {', '.join(SIZES)}.")
    return replace(base, **given)


def read_shape(checkpoint: Path) -> ModelShape:
    """Return the shape of a checkpoint that can be widened; raises YggdrasilError for any other."""
    return _Source.open(checkpoint).shape


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
    source = _Source.open(checkpoint)
    _check_shape(source, shape)
    tie = source.is_tied() and not untie
    probability = None
    if shape.vocab_size <= source.shape.vocab_size:
        filler_token = None
    elif filler_token is None:
        filler_token, probability = _find_filler(source, seed)
    elif not 0 <= filler_token < source.shape.vocab_size:
        raise YggdrasilError(f"--filler-token {filler_token} is not in the source's 0..{source.shape.vocab_size - 1}.")
    layout = _Layout.between(source, shape, filler_token or 0)

    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        writer = _ShardWriter(partial, max_shard_bytes)
        for name, tensor in _wide_tensors(source, layout, tie, torch.Generator().manual_seed(seed)):
            writer.add(name, tensor)
        writer.close()
        report = WideningReport(shape, writer.num_parameters, filler_token, probability)
        _write_config(partial, source, layout, tie)
        facts = {"widened_from": asdict(source.shape), "seed": seed, **asdict(report)}
        (partial / "widening.json").write_text(json.dumps(facts, indent=1) + "\n")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def widen_in_memory(checkpoint: Path, shape: ModelShape, device: torch.device, *, seed: int = 0) -> "PreTrainedModel":
    """The model that ``widen_checkpoint`` would write, as bfloat16 on ``device``, without going through a disk.

    New weights are drawn on the device, so they differ from the written ones there; the function is the same. Raises
    YggdrasilError when the source cannot be widened to ``shape``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source = _Source.open(checkpoint)
    _check_shape(source, shape)
    tie = source.is_tied()
    filler = _find_filler(source, seed)[0] if shape.vocab_size > source.shape.vocab_size else 0
    layout = _Layout.between(source, shape, filler)
    raw = _wide_config(source, layout, tie)
    config = AutoConfig.for_model(**{key: value for key, value in raw.items() if key != "dtype"})
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.eval().to(device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in _wide_tensors(source, layout, tie, torch.Generator(device).manual_seed(seed)):
            parameters.pop(name).copy_(tensor)
    assert not parameters, f"no weight for {sorted(parameters)}"
    return model


# ==== the source ====


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint on disk: its configuration, and where each weight lies."""

    path: Path
    raw_config: dict[str, Any]  # config.json as it is
    config: dict[str, Any]  # with the defaults of its family
    shape: ModelShape
    files: dict[str, Path]  # weight name -> safetensors file

    @classmethod
    def open(cls, path: Path) -> "_Source":
        from transformers import AutoConfig

        if not (path / "config.json").is_file():
            raise YggdrasilError(f"{path} is not a checkpoint: it holds no config.json.")
        try:
            raw = json.loads((path / "config.json").read_text())
        except ValueError as error:
            raise YggdrasilError(f"{path / 'config.json'} is not valid JSON: {error}.") from error
        architecture = (raw.get("architectures") or ["an unnamed architecture"])[0]
        if architecture not in ARCHITECTURES:
            raise YggdrasilError(f"{path} is {architecture}; only {', '.join(ARCHITECTURES)} can be widened.")
        if "quantization_config" in raw:
            raise YggdrasilError(f"{path} is quantized; widen the unquantized checkpoint.")
        config = AutoConfig.from_pretrained(path).to_dict()
        shape = ModelShape(
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
        )
        return cls(path, raw, config, shape, _locate_weights(path))

    def is_tied(self) -> bool:
        """Return whether the output head is the embedding, by the rule of transformers for files that hold both."""
        if not self.config["tie_word_embeddings"] or OUTPUT_HEAD not in self.files:
            return bool(self.config["tie_word_embeddings"])
        return torch.equal(self.read(OUTPUT_HEAD), self.read(EMBEDDING))

    def read(self, name: str) -> Tensor:
        if name not in self.files:
            raise YggdrasilError(f"{self.path} lacks the weight {name}.")
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.dtype not in DTYPES:
            raise YggdrasilError(f"{name} in {self.path} is {tensor.dtype}; widen the unquantized checkpoint.")
        return tensor


def _locate_weights(path: Path) -> dict[str, Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise YggdrasilError(f"{path} holds no *.safetensors file; save the model as safetensors first.")
    located: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            located.update(dict.fromkeys(weights.keys(), file))
    return located


def _find_filler(source: _Source, seed: int) -> tuple[int, float]:
    """Return the token whose highest probability over the model's own greedy text is lowest, and that probability."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source.path, dtype="auto")
    model.eval()
    vocab_size = source.shape.vocab_size
    token_ids = torch.randint(vocab_size, (8, 1), generator=torch.Generator().manual_seed(seed))
    highest = torch.full((vocab_size,), -torch.inf)
    cache = None
    with torch.inference_mode():
        for _ in range(min(64, source.config["max_position_embeddings"])):
            output = model(input_ids=token_ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            log_probabilities = output.logits[:, -1].float().log_softmax(-1)
            highest = torch.maximum(highest, log_probabilities.amax(0))
            token_ids = log_probabilities.argmax(-1, keepdim=True)
    filler = int(highest.argmin())
    return filler, math.exp(highest[filler].item())


# ==== where each source row and column goes ====


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
        divisors = [count for count in range(1, wide.num_heads + 1) if wide.num_heads % count == 0]
        least = min(count for count in divisors if source.num_kv_heads * -(-group * count // wide.num_heads) <= count)
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
class _Layout:
    """For each weight of a block, the source index of every wide row [R] and column [C], or RANDOM or ZERO."""

    shape: ModelShape
    axes: dict[str, tuple[Tensor, Tensor]]  # by module name; norms have no columns of their own
    embedding: tuple[Tensor, Tensor]
    output_head: tuple[Tensor, Tensor]
    layers: list[tuple[int, bool]]  # the source block of each wide block, and whether it is a mute copy of it
    norm_scale: float
    query_scale: float

    @classmethod
    def between(cls, source: _Source, wide: ModelShape, filler_token: int) -> "_Layout":
        """Place the source's parts in ``wide``, a shape that ``_check_shape`` passed."""
        narrow = source.shape
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


def _check_shape(source: _Source, wide: ModelShape) -> None:
    narrow = source.shape
    for field in fields(ModelShape):
        least, asked = getattr(narrow, field.name), getattr(wide, field.name)
        if asked < least:
            raise YggdrasilError(
                f"--{field.name.replace('_', '-')} must be at least the source's {least}, not {asked}."
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


# ==== the wide weights ====


def _wide_tensors(
    source: _Source, layout: _Layout, tie: bool, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of every wide weight, one at a time, in the order of the model."""
    _refuse_unknown_weights(source, layout)
    yield EMBEDDING, _widen(source.read(EMBEDDING), layout.embedding, generator)
    for layer, (origin, is_mute) in enumerate(layout.layers):
        for module, (rows, columns) in layout.axes.items():
            for kind in ("weight", "bias"):
                name = f"model.layers.{origin}.{module}.{kind}"
                if kind == "bias" and name not in source.files:
                    continue
                narrow = source.read(name)
                if module.endswith("layernorm"):
                    narrow = _scaled(narrow, layout.norm_scale)
                elif module.endswith("q_proj"):
                    narrow = _scaled(narrow, layout.query_scale)
                wide = _widen(narrow, (rows, columns), generator)
                if is_mute and module in ("self_attn.o_proj", "mlp.down_proj"):
                    wide.zero_()
                yield f"model.layers.{layer}.{module}.{kind}", wide
    narrow = _scaled(source.read(FINAL_NORM), layout.norm_scale)
    yield FINAL_NORM, _widen(narrow, layout.axes["input_layernorm"], generator)
    if not tie:
        is_absent = source.is_tied() and OUTPUT_HEAD not in source.files
        narrow = source.read(EMBEDDING if is_absent else OUTPUT_HEAD)
        yield OUTPUT_HEAD, _widen(narrow, layout.output_head, generator)


def _refuse_unknown_weights(source: _Source, layout: _Layout) -> None:
    known = {EMBEDDING, FINAL_NORM, OUTPUT_HEAD}
    for layer in range(source.shape.num_layers):
        prefix = f"model.layers.{layer}."
        known |= {f"{prefix}{module}.{kind}" for module in layout.axes for kind in ("weight", "bias")}
        known.add(f"{prefix}self_attn.rotary_emb.inv_freq")  # in old checkpoints; never read by transformers
    unknown = sorted(source.files.keys() - known)
    if unknown:
        raise YggdrasilError(f"{source.path} holds {unknown[0]}, which is no weight of {', '.join(ARCHITECTURES)}.")


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """Multiply without rounding to less than float32; a power of two is exact in any dtype and keeps it."""
    return tensor * factor if math.frexp(factor)[0] == 0.5 else tensor.float() * factor


def _widen(narrow: Tensor, axes: tuple[Tensor, Tensor], generator: torch.Generator) -> Tensor:
    """Return the wide tensor of a source weight [R, C], or of a vector [R] whose column axis is not looked at."""
    device = generator.device
    rows, columns, narrow = axes[0].to(device), axes[1].to(device), narrow.to(device)
    if narrow.dim() == 1:
        return _widen(narrow[:, None], (rows, torch.zeros(1, dtype=torch.long)), generator)[:, 0].contiguous()
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


# ==== what is written ====


class _ShardWriter:
    """Writes weights as safetensors shards of at most ``max_bytes`` each; only a weight larger than that exceeds it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.num_parameters = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []  # the weight names of each shard written

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self.num_parameters += tensor.numel()

    def close(self) -> None:
        """Write what is pending, give the shards their final names and write the index."""
        self._flush()
        if len(self._shards) == 1:
            self._shard_path(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"
            self._shard_path(number).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")

    def _shard_path(self, number: int) -> Path:
        return self._folder / f"shard-{number}"  # until their count is known

    def _flush(self) -> None:
        save_file(self._pending, self._shard_path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0


def _wide_config(source: _Source, layout: _Layout, tie: bool) -> dict[str, Any]:
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


def _write_config(folder: Path, source: _Source, layout: _Layout, tie: bool) -> None:
    """Write config.json with the new dimensions and copy the tokenizer's files."""
    config = _wide_config(source, layout, tie)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in COPIED_FILES:
        for file in source.path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
