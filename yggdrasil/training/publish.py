"""Writes a trained drafter's folder, with a model card."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from yggdrasil.artifacts import atomic_directory
from yggdrasil.checkpoints.shards import raising_os_errors
from yggdrasil.training.dflash import DFlashRecipe
from yggdrasil.training.eagle import EagleRecipe
from yggdrasil.training.state import Look

CARD = "README.md"
Recipe = EagleRecipe | DFlashRecipe

_MARK = "A drafter for"  # text that marks a model card as ours


def publish(recipe: Recipe, model: nn.Module, facts: Mapping[str, str], look: Look | None, out: Path) -> None:
    """Write a trained drafter in its published format, with its model card, to the folder ``out``, atomically.

    An existing folder is replaced as a whole.

    Args:
        facts: rows of the model card, by name; the row "target" is required.
        look: the last evaluation; None: the card shows no evaluation.

    Raises:
        ArtifactError: ``out`` is a file or cannot be written.
    """
    with atomic_directory(out) as folder, raising_os_errors():
        recipe.write(model, folder)
        (folder / CARD).write_text(_card(recipe.title, facts, look), encoding="utf-8")


def is_free(folder: Path) -> bool:
    """Return whether ``folder`` does not exist or is empty."""
    return not folder.exists() or not any(folder.iterdir())


def is_ours(folder: Path) -> bool:
    """Return whether ``folder`` holds a drafter that ``yggdrasil train`` wrote, judged by its model card."""
    card = folder / CARD
    return card.is_file() and _MARK in card.read_text(encoding="utf-8", errors="replace")


def _card(title: str, facts: Mapping[str, str], look: Look | None) -> str:
    lines = [
        f"# {title}\n",
        f"{_MARK} {facts['target']}, trained with `yggdrasil train`, in the format of published ones.\n",
        "| | |\n|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
    ]
    if look is not None:
        lines += [
            f"| tokens learned, counted as often as they were | {look.tokens} |",
            f"| minutes of training | {look.seconds / 60:.1f} |",
            f"| agreement with the target at draft steps 1 to 5, held-out answers | {_shares(look.agreement)} |",
            f"| the target's token in the top 4 | {_shares(look.best_four)} |",
            f"| expected tokens per pass with a chain of four | {look.expected:.2f} |",
        ]
    lines.append(
        "\nLicence: the weights are initialised from the target's and trained on text that it generated, so the "
        "target's licence applies.\n"
    )
    return "\n".join(lines)


def _shares(shares: list[float]) -> str:
    return " ".join(f"{share:.3f}" for share in shares)
