"""Every choice of a pair's training, and the card that tells them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pair_text import HELD_OUT_ONE_IN, PROSE_BLOCK_CHARS

from yggdrasil.artifacts import shown
from yggdrasil.errors import YggdrasilError

_FILES = {"target", "drafter", "README.md", "recipe.json"}  # of a pair's folder


@dataclass(frozen=True)
class Recipe:
    """Every choice of a run; written beside the checkpoints so that a run can be repeated."""

    vocab_size: int = 4096
    target_hidden: int = 320
    target_layers: int = 4
    target_intermediate: int = 224
    drafter_hidden: int = 128
    drafter_layers: int = 2
    drafter_intermediate: int = 384
    head_dim: int = 64
    max_positions: int = 2048
    sequence_length: int = 512
    long_sequence_length: int = 1024  # used for the last third, so that rotary positions up to here are seen
    tokens_per_step: int = 4096
    prose_share: float = 0.6
    matrix_lr: float = 4e-3  # Muon, update scaled to AdamW's RMS
    other_lr: float = 3e-3  # AdamW: embeddings and norms
    weight_decay: float = 0.05
    joint_minutes: float = 60.0
    seed: int = 0


def check_place(out: Path) -> None:
    """Refuse a folder with anything else than a pair in it, which the pair, written as a whole, would take along."""
    others = sorted(entry.name for entry in out.iterdir() if entry.name not in _FILES) if out.exists() else []
    if others:
        raise YggdrasilError(
            f"--out {shown(out)} holds {others[0]}, which is none of a pair's files; name another folder, or move it"
        )


def write_card(
    out: Path, recipe: Recipe, work: Path, report: dict[str, dict[str, float]], sizes: dict[str, int], data: str
) -> None:
    counts = json.loads((work / "prepared.json").read_text())
    names = {"prose": "English prose", "code": "Python"}
    rows = [
        f"| {names[kind]} | {row['target_loss']:.3f} | {row['drafter_loss']:.3f} | {row['top1_agreement']:.3f} |"
        for kind, row in report.items()
    ]
    text = f"""# A small target and its distilled drafter

Byte-level BPE, {recipe.vocab_size} tokens. bfloat16, {recipe.max_positions} positions (trained on at most
{recipe.long_sequence_length}).

- Target: Llama, {sizes["target"]:,} parameters, {recipe.target_layers} layers, hidden {recipe.target_hidden}.
- Drafter: Llama, {sizes["drafter"]:,} parameters, {recipe.drafter_layers} layers, hidden {recipe.drafter_hidden}.

A pair for demonstrations, tests and measurements of decoding. It is far too small to be asked for facts.

## Data and licences

{data.strip()}

Tokens: {", ".join(f"{name} {count:,}" for name, count in counts.items())}. Documents (files of code, blocks of prose of
about {PROSE_BLOCK_CHARS:,} characters) were split by hash; one in {HELD_OUT_ONE_IN} was held out of the tokenizer
and of training.

## Training

`scripts/train_pair.py`: {recipe.joint_minutes:g} minutes of joint training (the target on the text, the drafter on the
target's distribution), on two CPU cores. Recipe: `recipe.json`.

## Held-out text

| | target loss (nats/token) | drafter loss | top-1 agreement |
|---|---|---|---|
{chr(10).join(rows)}
"""
    (out / "README.md").write_text(text)
    (out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")
