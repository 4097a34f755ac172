#!/usr/bin/env python3
"""Time the first token of a second turn behind a long text over recurrent layers, beside that of a short prompt.

    scripts/hybrid_turns.py --models dense,granite,qwen3_5,lfm2,falcon_h1 --history 1950

The models are those of hybrid_widths.py: about 300M random weights. A turn asks about a text of ``--history`` tokens;
the next one has that text, its answer of 16 tokens and 30 new tokens. A row of the table gives the tokens that the
second turn reads, the medians of both times to the first token, and their ratio.
"""

from collections.abc import Sequence
from statistics import median
from typing import Annotated

import torch
import typer
from check_families import tokenizer
from hybrid_widths import loaded_model

from yggdrasil.cli import run_script
from yggdrasil.engine.assembly import assemble
from yggdrasil.engine.decoder import Decoder
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.scheduling.plan import Shapes

SHORT, ANSWER, NEW = 50, 16, 30  # tokens of a short prompt, of an answer, and of a second question
WIDTHS = (8, 32, 128, 512)  # of prefill passes


def decoder_of(loaded: LoadedModel) -> Decoder:
    """Return a decoder without drafts over ``loaded``, a model that native steps cover."""
    shapes = Shapes(
        max_length=2048, draft_widths=(), max_depth=1, candidates=1, verify_widths=(1, 8), prefill_widths=WIDTHS,
    )  # fmt: skip
    return Decoder(assemble(loaded, None, shapes, "native"), tokenizer(), PLAIN_POLICY, frozenset())


def turn(decoder: Decoder, prompt: Sequence[int]) -> tuple[list[int], int, float]:
    """Return the answer to ``prompt``, the tokens of the prompt that were read, and ms to the first token."""
    found = decoder.generate(list(prompt), max_new_tokens=ANSWER)
    return list(found.tokens), len(prompt) - found.metrics.reused_tokens, found.metrics.ttft_ms


def measure(decoder: Decoder, vocabulary: int, history: int, rounds: int) -> tuple[int, float, float]:
    """Return the tokens that a second turn reads, and the medians of its and of a short prompt's ms."""
    generator, read = torch.Generator().manual_seed(0), 0
    short, second = list[float](), list[float]()

    def text(length: int) -> list[int]:
        drawn: list[int] = torch.randint(1, vocabulary, (length,), generator=generator).tolist()
        return drawn

    for _ in range(rounds + 1):  # the first round loads code and buffers
        short.append(turn(decoder, text(SHORT))[2])
        user_turn = text(history)
        answer, *_ = turn(decoder, user_turn)
        _, read, took = turn(decoder, [*user_turn, *answer, *text(NEW)])
        second.append(took)
    return read, median(second[1:]), median(short[1:])


def main(
    models: Annotated[str, typer.Option(help="Names, separated by commas.")] = "dense,granite,falcon_h1,qwen3_5,lfm2",
    history: Annotated[int, typer.Option(min=1, max=1950, help="Tokens of the first question.")] = 1950,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Print the table."""
    typer.echo("| model | tokens read | second turn, ms | short prompt, ms | ratio |\n|---|---|---|---|---|")
    for name in models.split(","):
        loaded = loaded_model(name, "full", threads)
        read, second, short = measure(decoder_of(loaded), loaded.vocab_size, history, rounds)
        typer.echo(f"| {name} | {read} | {second:.0f} | {short:.0f} | {second / short:.2f} |")


if __name__ == "__main__":
    run_script(main, "hybrid_turns")
