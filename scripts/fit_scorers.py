"""Fit the scorers that serve before a target has written text of its own: yggdrasil/assets/scorers.

    python scripts/fit_scorers.py ~/.cache/yggdrasil/texts/FINGERPRINT-file.jsonl

The text is a target's, as calibrations keep it.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from yggdrasil.calibration.own_text import read_documents
from yggdrasil.calibration.statistics.scorer_fit import fit, gather_candidates
from yggdrasil.cli import run_script
from yggdrasil.drafters.statistics.scorer import SHAPES, NGramScorer
from yggdrasil.errors import YggdrasilError

ASSETS = Path(__file__).resolve().parent.parent / "yggdrasil" / "assets" / "scorers"
ROUNDS = 4  # fits, each begun as the one before: weights that are drawn lie further off than those of another text


def drawn() -> NGramScorer:
    """Weights to begin with."""
    numbers = np.random.default_rng(0)
    return NGramScorer(**{name: numbers.normal(scale=0.2, size=shape) for name, shape in SHAPES.items()})


def main(
    text: Annotated[Path, typer.Argument(help="A target's own text, JSON lines of prompt and answer as tokens.")],
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = ASSETS,
) -> None:
    """Fit the usual scorers."""
    documents = read_documents(text)
    for name, with_table in (("text", False), ("table", True)):
        candidates = gather_candidates(documents, with_table=with_table)
        if not candidates.is_right.any():
            raise YggdrasilError(f"{text} holds no text to learn from; give a file of ~/.cache/yggdrasil/texts")
        scorer = drawn()
        for _ in range(ROUNDS):
            scorer = fit(candidates, scorer)
        scorer.save(out / f"{name}.safetensors")


if __name__ == "__main__":
    run_script(main, "fit_scorers")
