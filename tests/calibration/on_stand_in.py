"""A first use on the device that stands in for a GPU; for a process of its own."""

import os
from collections import Counter
from pathlib import Path

import torch
from other_device import DEVICE, WAITS  # before anything that asks PyTorch for what it changes
from tiny_pair import byte_tokenizer

from yggdrasil.calibration import first_use as calibration
from yggdrasil.checkpoints.formats.layers import QuantisedEmbedding, QuantisedExperts, QuantisedLinear
from yggdrasil.drafters import NGramDrafter
from yggdrasil.engine import loading
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder as OpenDecoder
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.pretrained import Decoder
from yggdrasil.runtime.loading import load_model
from yggdrasil.scheduling.plan import Plan, Shapes
from yggdrasil.tree.shape import TreeShape


def first_use(target: str, drafter: str, cache: str, prompt: str) -> dict[str, object]:
    """What is decoded there, and what the plan says."""
    os.environ |= {"XDG_CACHE_HOME": cache, "YGGDRASIL_CACHE": cache}
    os.chdir(cache)
    loading.open_device = {"cuda": DEVICE}.__getitem__  # type: ignore[assignment]
    calibration.FIRST_DRAFT_WIDTHS = (2,)  # each is captured twice at every depth, and this device is slow
    calibration.FIRST_VERIFY_WIDTHS = {"cuda": (1, 4)}
    options = {"dtype": "float32", "device": "cuda", "backend": "cudagraph", "drafter": [drafter, "text"]}
    decoder = Decoder.from_pretrained(target, **options)
    answer = decoder.generate(prompt, max_new_tokens=30)
    (path,) = Path(cache).glob("**/plans/*/*.yaml")
    plan, again = Plan.load(path), Decoder.from_pretrained(target, **options)
    return {
        "tokens": answer.tokens, "where": decoder.assembly.target.loaded.device.type, "device": plan.device,
        "weights": plan.target.weights, "found again": again.plan.name == plan.name,
    }  # fmt: skip


def decoded(models: list[tuple[str, str]], prompt: list[int]) -> list[dict[str, object]]:
    """Of each GGUF file, with its weights as they are said to be: tokens, layers of each class, and waits."""
    return [_decoded(file, weights, prompt) for file, weights in models]


def _decoded(file: str, weights: str, prompt: list[int]) -> dict[str, object]:
    loaded = load_model(file, torch.float32, DEVICE, 1, weights=weights)
    shapes = Shapes(64, (), 4, 1, (1, 4, 8), (8,))
    assembly = assemble(loaded, NGramDrafter(), shapes, "cudagraph")
    decoder = OpenDecoder(assembly, byte_tokenizer(), FixedPolicy(TreeShape(1, 3, 4)), frozenset())
    classes = QuantisedLinear | QuantisedEmbedding | QuantisedExperts
    layers = [each for each in loaded.model.modules() if isinstance(each, classes)]
    where = {each.device.type for each in loaded.tensors.values()}
    tokens = decoder.generate(prompt, max_new_tokens=8).tokens
    WAITS.clear()
    decoder.generate(prompt, max_new_tokens=2)
    layer_counts = Counter(type(layer).__name__ for layer in layers)
    return {"tokens": tokens, "layers": layer_counts, "where": where, "waits": list(WAITS)}
