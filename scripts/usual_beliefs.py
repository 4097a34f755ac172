"""Fit the beliefs that serve before a target has written text of its own: yggdrasil/assets/beliefs.

    python scripts/usual_beliefs.py ~/.cache/yggdrasil/texts/FINGERPRINT-file.jsonl

The text is a target's, as calibrations keep it. With runners-up it cannot be fitted, since they are not kept: what they
are worth is learned by calibrations alone.
"""

import sys
from pathlib import Path

import numpy as np

from yggdrasil.calibration.believing import fit, gather_places
from yggdrasil.calibration.own_text import read_documents
from yggdrasil.drafters.belief import SHAPES, Belief


def drawn() -> Belief:
    """Weights to begin with."""
    numbers = np.random.default_rng(0)
    weights = {name: numbers.normal(scale=0.2, size=shape) for name, shape in SHAPES.items()}
    weights["recycled"][:] = 0.0
    return Belief(**weights)


def main(file: Path) -> None:
    documents = read_documents(file)
    for name, with_table in (("text", False), ("table", True)):
        belief = fit(gather_places(documents, with_table=with_table), drawn())
        belief.save(Path(__file__).parent.parent / "yggdrasil" / "assets" / "beliefs" / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
