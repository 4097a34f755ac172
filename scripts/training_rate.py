#!/usr/bin/env python3
"""What training an EAGLE-3 head costs for a model: processor time a token to read text and to learn, and what it gives.

    scripts/training_rate.py model.gguf texts.jsonl --windows 12 --held-out 4 --passes 2

Processor time is that of all threads, so other work on the machine changes it little. Agreement is the share of
held-out tokens that the head says first, at draft steps 1 to 5.
"""

import random
import tempfile
from pathlib import Path
from time import process_time
from typing import Annotated

import torch
import typer
from torch import nn

from yggdrasil.artifacts import current_machine
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli import run_script
from yggdrasil.runtime.loading import load_model
from yggdrasil.training.eagle import EagleRecipe
from yggdrasil.training.features import Features, stack_windows
from yggdrasil.training.objective import Teacher, count_hits, loss_of
from yggdrasil.training.settings import SHOWN
from yggdrasil.training.texts import read_texts
from yggdrasil.training.vocabulary import coverage, draft_vocabulary
from yggdrasil.training.windows import split


def main(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a GGUF file.")],
    texts: Annotated[Path, typer.Argument(help="Text as `yggdrasil train --texts` reads it.")],
    windows: Annotated[int, typer.Option(min=2, help="Answers to read and to learn.")] = 24,
    held_out: Annotated[int, typer.Option(min=1, help="Held-out answers to judge by.")] = 12,
    passes: Annotated[int, typer.Option(min=0, help="Times to learn each answer.")] = 4,
) -> None:
    """Print parameters, processor milliseconds a token, and agreement before and after."""
    torch.set_num_threads(current_machine().cores)
    source = Source.find(model)
    parts = split(read_texts([texts], load_tokenizer(source)))
    random.Random(0).shuffle(parts.trained)
    loaded = load_model(source, torch.bfloat16, torch.device("cpu"), torch.get_num_threads(), pack=False)
    vocabulary = draft_vocabulary(parts.trained, loaded.vocab_size)
    recipe, teacher = EagleRecipe(loaded, vocabulary), Teacher.of(loaded, vocabulary)
    head = recipe.initial()
    learned = sum(window.num_learned for window in parts.trained)
    covered = coverage(parts.held_out, vocabulary)
    say(f"{learned:,} tokens of answers; {covered:.1%} of held-out ones can be drafted")
    say(f"the head has {sum(each.numel() for each in head.parameters()) / 1e6:.1f} million parameters")
    with tempfile.TemporaryDirectory() as folder:
        features, began = Features(loaded, recipe.layers, Path(folder)), process_time()
        kept = features.load_or_compute("trained", parts.trained[:windows])
        say(f"reading: {per_token(began, sum(len(each.tokens) for each in kept)):.1f} ms a token")
        judges = [stack_windows([each]) for each in features.load_or_compute("held-out", parts.held_out[:held_out])]

    def judge() -> str:
        hits = torch.stack([count_hits(recipe.steps(head, batch, SHOWN), teacher, batch) for batch in judges]).sum(0)
        return " ".join(f"{share:.3f}" for share in (hits[:, 0] / hits[:, 2]).tolist())

    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        say(f"agreement before: {judge()}")
        for _ in range(passes):
            began, tokens = process_time(), 0
            for start in range(0, len(kept), 2):
                batch = stack_windows(kept[start : start + 2], learns_prompts=True)
                loss = loss_of(recipe.steps(head, batch, recipe.num_taught), teacher, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(head.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                tokens += int(batch.learned.sum())
            say(f"learning {tokens:,} tokens: {per_token(began, tokens):.1f} ms a token, loss {loss.item():.2f}")
            say(f"agreement: {judge()}")


def per_token(began: float, tokens: int) -> float:
    """Return the processor milliseconds a token since ``began``, in seconds of ``process_time``."""
    return (process_time() - began) / tokens * 1e3


def say(line: str) -> None:
    """Print a line now."""
    print(line, flush=True)


if __name__ == "__main__":
    run_script(main, "training_rate")
