"""Writes the CSV and the plot of a figure."""

from pathlib import Path
from typing import Any

import pandas as pd

from figures.context import Figure
from yggdrasil.artifacts import write_atomic, write_csv

CSV_VERSION = 1


def write_figure(figure: Figure, out: Path, caption: str) -> list[Path]:
    """Write ``NAME.csv`` and ``NAME.svg``, with the caption on the plot and in a column; returns the paths."""
    table, plot = out / f"{figure.name}.csv", out / f"{figure.name}.svg"
    write_csv(table, "figure", CSV_VERSION, figure.frame.assign(measured=caption))
    write_atomic(plot, draw(figure, caption))
    return [table, plot]


def draw(figure: Figure, caption: str) -> bytes:
    """Return the plot as SVG, with one panel per column of ``figure.y``."""
    import io

    from matplotlib import rcParams
    from matplotlib.figure import Figure as Canvas

    rcParams["svg.hashsalt"] = "yggdrasil"  # makes the file reproducible
    canvas = Canvas(figsize=(6.4 * len(figure.y), 4.8), layout="constrained")
    canvas.suptitle(figure.title)
    for panel, column in zip(canvas.subplots(1, len(figure.y), squeeze=False)[0], figure.y, strict=True):
        _draw_panel(panel, figure, column)
    canvas.supxlabel(caption, fontsize=6)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _draw_panel(panel: Any, figure: Figure, column: str) -> None:
    frame: pd.DataFrame = figure.frame
    wide = (
        frame.set_index(figure.x)[[column, *figure.beside.get(column, ())]]
        if figure.series is None
        else frame.pivot_table(index=figure.x, columns=figure.series, values=column, sort=False)
    )
    draw_series = _draw_lines if figure.is_line else _draw_bars
    draw_series(panel, wide, figure)
    panel.set_xlabel(figure.x.replace("_", " "))
    panel.set_ylabel(column.replace("_", " "))
    if len(wide.columns) > 1:
        panel.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))  # outside the axes


def _draw_lines(panel: Any, wide: pd.DataFrame, figure: Figure) -> None:
    """Draw one line per series; beyond ten, marks and dashes differ. Later lines are thinner, so none is hidden."""
    for i, name in enumerate(wide.columns):
        again = i // 10
        panel.plot(
            wide.index.astype(float), wide[name], f"C{i % 10}", label=str(name), marker="os^"[again % 3],
            linestyle=("-", "--", ":")[again % 3], linewidth=3.0 - 1.5 * i / len(wide.columns),
        )  # fmt: skip
    if figure.is_log:
        panel.set_xscale("log", base=2)
    ticks = [float(value) for value in wide.index]
    panel.set_xticks(ticks, [f"{value:g}" for value in ticks])


def _draw_bars(panel: Any, wide: pd.DataFrame, figure: Figure) -> None:
    step = 0.8 / len(wide.columns)
    for i, name in enumerate(wide.columns):
        panel.bar([place + i * step for place in range(len(wide))], wide[name], step, label=str(name).replace("_", " "))
    middles = [place + 0.4 - step / 2 for place in range(len(wide))]
    panel.set_xticks(middles, [str(value) for value in wide.index], rotation=30, ha="right", rotation_mode="anchor")
