"""Maps the numbers of the paper's figures to the functions that measure them."""

from collections.abc import Callable, Sequence

from figures.ablations import breakdown, objective, sensitivity
from figures.comparisons import end_to_end, systems, trees
from figures.context import Figure, FigureContext
from figures.runtimes import runtimes, widths
from figures.temperatures import temperatures
from yggdrasil.errors import YggdrasilError

FIGURES: dict[str, Callable[[FigureContext], list[Figure]]] = {
    "4": runtimes,
    "5": widths,
    "6": systems,
    "10": end_to_end,
    "11": trees,
    "12": breakdown,
    "13": sensitivity,
    "14": objective,
    "15": temperatures,
}


def chosen_figures(numbers: Sequence[str]) -> list[str]:
    """Return the given figure numbers in the paper's order, or all; "11a" means 11.

    Raises:
        YggdrasilError: a number is not in ``FIGURES``.
    """
    selected = {number.rstrip("ab") for number in numbers} or set(FIGURES)
    unknown = sorted(selected - set(FIGURES))
    if unknown:
        raise YggdrasilError(f"there is no figure {unknown[0]} here; choose from {', '.join(FIGURES)}")
    return [number for number in FIGURES if number in selected]
