#!/usr/bin/env python3
"""Tokens a pass, and milliseconds a token, of a draft model or head that follows the target's random draws or does not.

    cd yggdrasil/assets/tiny && ../../../scripts/compare_draws.py ./target ./drafter prompts.jsonl
    scripts/compare_draws.py model.gguf my/head chats.jsonl --chat

Every tree has the same shape, so the load of the machine does not change the tokens a pass. Times are medians over the
prompts, on compiled or native steps; plain decoding samples the same tokens.
"""

from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from yggdrasil import SamplingParams
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.cli import run_script
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.drafters.heads.loading import load_head
from yggdrasil.drafters.shipped_assets import resolve_shipped_head
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.end_tokens import end_tokens
from yggdrasil.engine.trace import Metrics
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.prompts import encode_prompt, read_prompts
from yggdrasil.runtime.kept_tensors import open_model
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape


def main(
    model: Annotated[str, typer.Argument(help="The target.")],
    drafter: Annotated[str, typer.Argument(help="A draft model or a head.")],
    prompts: Annotated[Path, typer.Argument(help="JSON lines with a prompt field.")],
    limit: Annotated[int, typer.Option(min=1, help="Prompts of at most 160 tokens.")] = 24,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 48,
    chat: Annotated[bool, typer.Option(help="Ask the prompts as chats.")] = False,
) -> None:
    """Print the tokens a pass at temperatures 0, 0.7 and 1."""
    tokenizer, loaded, name = load_tokenizer(model), _open(model), resolve_shipped_head(drafter)
    encoded = [encode_prompt(tokenizer, prompt) for prompt in read_prompts(prompts, chat=chat)]
    encoded = [prompt for prompt in encoded if len(prompt) <= 160][:limit]
    second = load_head(expanded(name), loaded, 1) if is_head(name) else _open(name)
    shapes = Shapes(
        max_length=512, draft_widths=(2,), max_depth=4, candidates=8, verify_widths=(1, 8), prefill_widths=(16, 64)
    )
    eos = end_tokens(str(Source.find(model).folder), loaded.sizes.eos, tokenizer)
    assembly = assemble(loaded, second, shapes, "native")
    decoder, engine = Decoder(assembly, tokenizer, FixedPolicy(TreeShape(2, 4, 8)), eos), assembly.engine
    assembly.complete()
    follow = engine.follow_draws
    for temperature in (0.0, 0.7, 1.0):
        found: dict[str, list[Metrics]] = {}
        for seed, prompt in enumerate(encoded):
            sampling = SamplingParams(temperature=temperature, seed=seed)
            for way in ("plain", "follows the draws", "does not") if temperature else ("plain", "does not"):
                follow(None, 0.0)
                engine.follow_draws = follow if way[0] == "f" else lambda seed, temperature: None  # type: ignore[method-assign]
                result = decoder.generate(prompt, max_new_tokens=tokens, sampling=sampling, speculation=way != "plain")
                found.setdefault(way, []).append(result.metrics)
        for way, all_metrics in found.items():
            passes = sum(metrics.iterations for metrics in all_metrics)
            made = sum(metrics.aal * metrics.iterations for metrics in all_metrics)
            ms = median(metrics.tpot_ms for metrics in all_metrics)
            print(f"T = {temperature}, {way}: {made / passes:.2f} tokens a pass, {ms:.2f} ms a token", flush=True)


def _open(name: str) -> LoadedModel:
    source = Source.find(name)
    weights = usual_weights(source, "bfloat16", "cpu")
    return open_model(source, torch.bfloat16, torch.device("cpu"), 2, weights=weights)


if __name__ == "__main__":
    run_script(main, "compare_draws")
