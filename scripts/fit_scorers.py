#!/usr/bin/env python3
"""Fit the scorers that serve before a target has written text of its own: yggdrasil/assets/scorers.

    scripts/fit_scorers.py usual ~/.cache/yggdrasil/texts/FINGERPRINT-file.jsonl
    scripts/fit_scorers.py shipped-text one.gguf=one.jsonl other.gguf=other.jsonl

The text is a target's, as calibrations keep it and `scripts/replay_table.py --prompts` writes it: JSON lines of prompt
and answer as tokens. Report nothing on the prompts that a scorer was fitted to.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from yggdrasil.calibration.own_text import read_documents
from yggdrasil.calibration.statistics.scorer_fit import Candidates, candidates_of, fit, gather_candidates, mean_loss
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli.exit_codes import run_guarded
from yggdrasil.drafters.statistics.scorer import SHAPES, NGramScorer
from yggdrasil.drafters.statistics.shipped_table import make_table
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.errors import YggdrasilError

ASSETS = Path(__file__).resolve().parent.parent / "yggdrasil" / "assets" / "scorers"
ROUNDS = 4  # fits, each begun as the one before: weights that are drawn lie further off than those of another text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Out = Annotated[Path, typer.Option(help="The folder to write to.")]


def drawn() -> NGramScorer:
    """Weights to begin with."""
    numbers = np.random.default_rng(0)
    return NGramScorer(**{name: numbers.normal(scale=0.2, size=shape) for name, shape in SHAPES.items()})


@app.command()
def usual(
    text: Annotated[Path, typer.Argument(help="A target's own text, JSON lines of prompt and answer as tokens.")],
    out: Out = ASSETS,
) -> None:
    """Fit the scorers of targets without a calibration: of the text alone, and with a table of the target's text."""
    documents = read_documents(text)
    for name, with_table in (("text", False), ("table", True)):
        candidates = gather_candidates(documents, with_table=with_table)
        if not candidates.is_right.any():
            raise _nothing_in(str(text))
        _fitted(candidates).save(out / f"{name}.safetensors")


@app.command()
def shipped_text(
    texts: Annotated[list[str], typer.Argument(help="MODEL=FILE: a model and its text; the table is of its tokens.")],
    out: Out = ASSETS,
) -> None:
    """Fit the scorer for the table of the shipped text to the text of one or several models."""
    parts = []
    for text in texts:
        model, _, file = text.partition("=")
        documents = read_documents(Path(file))
        with tempfile.TemporaryDirectory() as folder:
            make_table(Source.find(model).folder / "tokenizer.json", Path(folder) / "table.safetensors")
            candidates = candidates_of(documents, Table.load(Path(folder) / "table.safetensors"))
        if not candidates.is_right.any():
            raise _nothing_in(file or text)
        parts.append(candidates)
    candidates = Candidates.joined(parts)
    before, fitted = NGramScorer.of_shipped_text(), _fitted(candidates)
    fitted.save(out / "shipped-text.safetensors")
    losses = " and now ".join(f"{mean_loss(scorer, candidates):.4f}" for scorer in (before, fitted))
    print(f"{len(np.unique(candidates.position)):,} positions; nats per position before {losses}")


def _fitted(candidates: Candidates) -> NGramScorer:
    scorer = drawn()
    for _ in range(ROUNDS):
        scorer = fit(candidates, scorer)
    return scorer


def _nothing_in(file: str) -> YggdrasilError:
    return YggdrasilError(f"{file} holds no text to learn from; give a file of ~/.cache/yggdrasil/texts")


if __name__ == "__main__":
    run_guarded(lambda: app, "fit_scorers")
