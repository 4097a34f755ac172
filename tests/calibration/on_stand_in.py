"""A first use on the device that stands in for a GPU; for a process of its own."""

import os
from pathlib import Path

from other_device import DEVICE  # before anything that asks PyTorch for what it changes

from yggdrasil.engine import loading
from yggdrasil.pretrained import Decoder
from yggdrasil.scheduling.plan import Plan


def first_use(target: str, drafter: str, cache: str, prompt: str) -> dict[str, object]:
    """What is decoded there, and what the plan says."""
    os.environ |= {"XDG_CACHE_HOME": cache, "YGGDRASIL_CACHE": cache}
    os.chdir(cache)
    loading.open_device = {"cuda": DEVICE}.__getitem__  # type: ignore[assignment]
    options = {"dtype": "float32", "device": "cuda", "backend": "cudagraph", "drafter": [drafter, "text"]}
    decoder = Decoder.from_pretrained(target, **options)
    answer = decoder.generate(prompt, max_new_tokens=30)
    (path,) = Path(cache).glob("**/plans/*/*.yaml")
    plan, again = Plan.load(path), Decoder.from_pretrained(target, **options)
    return {
        "tokens": answer.tokens, "where": decoder.assembly.target.loaded.device.type, "device": plan.device,
        "weights": plan.target.weights, "found again": again.plan.name == plan.name,
    }  # fmt: skip
