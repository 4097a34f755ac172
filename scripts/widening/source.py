"""The checkpoint to widen, as it lies on disk: its shape, its weights and a token it all but never chooses."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from widening.shapes import ModelShape
from yggdrasil.artifacts import parse_json
from yggdrasil.checkpoints.families import cache_name
from yggdrasil.errors import YggdrasilError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
EMBEDDING, FINAL_NORM, OUTPUT_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on disk: its configuration, and where each weight lies."""

    path: Path
    raw_config: dict[str, Any]  # config.json as it is
    config: dict[str, Any]  # with the defaults of its family
    shape: ModelShape
    files: dict[str, Path]  # weight name -> safetensors file

    @classmethod
    def open(cls, path: Path) -> "Source":
        """The checkpoint in the folder ``path``, none of its weights read yet.

        Raises:
            YggdrasilError: there is none, or one that cannot be widened.
        """
        from transformers import AutoConfig

        if not (path / "config.json").is_file():
            raise YggdrasilError(f"{path} is not a checkpoint: it holds no config.json.")
        try:
            raw = parse_json((path / "config.json").read_bytes())
        except ValueError as error:
            raise YggdrasilError(f"{path / 'config.json'} is not valid JSON: {error}.") from error
        if not isinstance(raw, dict):
            raise YggdrasilError(f"{path / 'config.json'} is not a JSON mapping.")
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
        """The weight ``name``, of the shape and dtype that it has in its file; refused where it is quantised."""
        if name not in self.files:
            raise YggdrasilError(f"{self.path} lacks the weight {name}.")
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if (
            tensor.dtype == torch.float8_e4m3fn and "quantization_config" not in self.config
        ):  # stored so, without scales
            tensor = tensor.bfloat16()
        if tensor.dtype not in DTYPES:
            raise YggdrasilError(f"{name} in {self.path} is {tensor.dtype}; widen the unquantized checkpoint.")
        return tensor


def read_shape(checkpoint: Path) -> ModelShape:
    """Return the shape of a checkpoint that can be widened; raises YggdrasilError for any other."""
    return Source.open(checkpoint).shape


def _locate_weights(path: Path) -> dict[str, Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise YggdrasilError(f"{path} holds no *.safetensors file; save the model as safetensors first.")
    located: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            located.update(dict.fromkeys(weights.keys(), file))
    return located


def find_filler(source: Source, seed: int) -> tuple[int, float]:
    """Return the token whose highest probability over the model's own greedy text is lowest, and that probability."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source.path, dtype="auto")
    model.eval()
    vocab_size = source.shape.vocab_size
    token_ids = torch.randint(vocab_size, (8, 1), generator=torch.Generator().manual_seed(seed))
    highest = torch.full((vocab_size,), -torch.inf)
    cache, name = None, cache_name(model)
    with torch.inference_mode():
        for _ in range(min(64, source.config["max_position_embeddings"])):
            output = model(input_ids=token_ids, use_cache=True, **{name: cache})
            cache = getattr(output, name)
            log_probabilities = output.logits[:, -1].float().log_softmax(-1)
            highest = torch.maximum(highest, log_probabilities.amax(0))
            token_ids = log_probabilities.argmax(-1, keepdim=True)
    filler = int(highest.argmin())
    return filler, math.exp(highest[filler].item())
