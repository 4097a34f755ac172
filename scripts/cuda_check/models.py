"""Models of the check: the bundled pair as it is or widened, and random ones of a real model's shape."""

import copy
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from widening import read_shape, resolve_shape, widen_in_memory

from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.compiler.in_process import compiling_by
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.loading import load_model, prepare_model

BUNDLED = Path(__file__).resolve().parents[2] / "yggdrasil" / "assets" / "tiny"
TOKENS = Path(__file__).with_name("tokens.json")
# hidden, layers, heads, key heads, head size, intermediate, vocabulary
SHAPES = {
    "135M": (576, 30, 9, 3, 64, 1536, 49152),
    "1.5B": (1536, 28, 12, 2, 128, 8960, 151936),
    "7B": (4096, 32, 32, 32, 128, 11008, 32000),
    "8B": (4096, 32, 32, 8, 128, 14336, 128256),
}
_TINY_SHAPE = (64, 3, 4, 2, 16, 96, 128)


def open_device(name: str) -> torch.device:
    """The card, or the stand-in: a device that computes on the processor and refuses what a GPU refuses."""
    if name == "cuda":
        return torch.device("cuda")
    for role in ("target", "drafter"):
        on_host(role)  # transformers' loading goes through functions of PyTorch that the stand-in replaces
    import other_device

    return other_device.DEVICE


@contextmanager
def steps_of(mode: str, device: torch.device) -> Iterator[str]:
    """Make steps inside in a mode, "compiled", "captured" or "eager"; yields the backend to assemble with."""
    compiler: Any = (lambda graph, inputs: graph) if device.type != "cuda" and mode == "compiled" else None
    if mode == "compiled" and device.type == "cuda":
        yield "cudagraph"
        return
    with compiling_by(compiler):
        yield "eager" if mode == "eager" else "cudagraph"


def simplest_allowed() -> str:
    """The furthest mode that this attempt at a section may use."""
    return os.environ.get("CUDA_CHECK_MODE", "compiled")


def modes() -> list[str]:
    known = ["eager", "captured", "compiled"]
    return known[: known.index(simplest_allowed()) + 1]


# ==== the bundled pair ====


def bundled(role: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    if device.type == "cuda":
        return load_model(BUNDLED / role, dtype, device, 1)
    is_elsewhere = device.type != "cpu"
    return prepare_model(copy.deepcopy(on_host(role)).to(dtype).to(device), role, 1, pack=is_elsewhere)


@cache
def tokenizer() -> Any:
    return load_tokenizer(BUNDLED / "target")


@cache
def prompts() -> list[list[int]]:
    lines = (BUNDLED / "prompts.jsonl").read_text().splitlines()
    return [tokenizer()(json.loads(line)["prompt"])["input_ids"][-96:] for line in lines]


@cache
def expected_tokens(num_prompts: int, count: int) -> list[list[int]]:
    """What transformers' generate writes in float32 on a CPU: as shipped, computed where the pair is another by now."""
    shipped = json.loads(TOKENS.read_text()) if TOKENS.exists() else {}
    if shipped.get("weights") != weights_digest() or len(shipped["tokens"]) < num_prompts:
        print("the shipped tokens are of another pair: transformers computes them now", file=sys.stderr)
        return computed_tokens(prompts()[:num_prompts], count)
    return [tokens[:count] for tokens in shipped["tokens"][:num_prompts]]


def computed_tokens(texts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    model = on_host("target")
    settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for text in texts:
        ids = torch.tensor([list(text)])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        found.append(output[0, len(text) :].tolist())
    return found


@cache
def on_host(role: str) -> Any:
    """transformers' own model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BUNDLED / role, dtype=torch.float32).eval()


@torch.no_grad()
def lead(text: Sequence[int]) -> float:
    """How far the best logit after ``text`` leads the second, by transformers in float32 on a CPU."""
    best = on_host("target")(torch.tensor([list(text)])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def weights_digest() -> str:
    return hashlib.sha256((BUNDLED / "target" / "model.safetensors").read_bytes()).hexdigest()


def write_tokens(num_prompts: int = 6, count: int = 48) -> None:
    """Ship what transformers writes now."""
    tokens = computed_tokens(prompts()[:num_prompts], count)
    lines = ",\n".join(f"  {json.dumps(each)}" for each in tokens)
    TOKENS.write_text(f'{{\n "weights": "{weights_digest()}",\n "tokens": [\n{lines}\n ]\n}}\n')


# ==== models of a size ====


def random_model(name: str, device: torch.device, *, tiny: bool) -> LoadedModel:
    """Random weights of a real model's shape, made on the device: they cost what a real one's do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, key_heads, head_size, intermediate, vocabulary = _TINY_SHAPE if tiny else SHAPES[name]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        head_dim=head_size, intermediate_size=intermediate, vocab_size=vocabulary, max_position_embeddings=4096,
        tie_word_embeddings=name in ("135M", "1.5B"),
    )  # fmt: skip
    if device.type == "cuda":
        with device, torch.random.fork_rng():
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    else:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval().to(device)
    return prepare_model(model, name, 1)


def widened(role: str, size: str, device: torch.device, *, tiny: bool) -> LoadedModel:
    """A model of the bundled pair at another one's size: real acceptance at a real model's cost."""
    narrow = read_shape(BUNDLED / role)
    if tiny:
        shape = replace(narrow, intermediate_size=narrow.intermediate_size + 32)
        model = widen_in_memory(BUNDLED / role, shape, torch.device("cpu")).to(device)
    else:
        model = widen_in_memory(BUNDLED / role, resolve_shape(narrow, size, {}), device)
    return prepare_model(model, size, 1)


def step_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that one token must read: all but the rows of an embedding that is only looked up."""
    model = loaded.model
    total = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total - (0 if embedding is head else embedding.nbytes)
