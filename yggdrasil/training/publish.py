"""A trained drafter's folder, with a card that says where it comes from."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from yggdrasil.artifacts import atomic_directory
from yggdrasil.checkpoints.shards import faults_of_disks
from yggdrasil.training.recipe import Recipe
from yggdrasil.training.state import Look

CARD = "README.md"
_MARK = "A drafter for"  # how our cards begin


def publish(recipe: Recipe, model: nn.Module, facts: Mapping[str, str], look: Look | None, out: Path) -> None:
    """Write the folder ``out`` as a whole: the drafter in its published format, and its card."""
    with atomic_directory(out) as folder, faults_of_disks():
        recipe.write(model, folder)
        (folder / CARD).write_text(_card(recipe.title, facts, look), encoding="utf-8")


def is_free(folder: Path) -> bool:
    """Whether nothing is lost where ``folder`` is written: it is not there, or empty."""
    return not folder.exists() or not any(folder.iterdir())


def is_ours(folder: Path) -> bool:
    """Whether ``folder`` is one that ``publish`` wrote."""
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
            f"| the target's choice among the four likeliest | {_shares(look.best_four)} |",
            f"| tokens a pass of a chain of four, from these | {look.expected:.2f} |",
        ]
    lines.append(
        "\nLicence: the weights begin as the target's own and learn from text that it wrote; the "
        "target's licence holds for them.\n"
    )
    return "\n".join(lines)


def _shares(shares: list[float]) -> str:
    return " ".join(f"{share:.3f}" for share in shares)
