"""Plotly figures of a report, each drawn from its tables. A function returns None if its table is empty."""

from typing import TypeAlias

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from yggdrasil.reports.facts import first_shape

Figure: TypeAlias = go.Figure
FONT = "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"
INK, PAPER, GRID = "#1f2933", "#ffffff", "#e4e7eb"
COLOURS = ("#0b6e4f", "#c8553d", "#3d5a80", "#b8860b", "#6a4c93", "#4f772d", "#9c6644", "#5c6b73")
ROLE_COLOURS = {"root": INK, "accepted": "#0b6e4f", "verified": "#e0a458", "drafted": "#cbd2d9"}
STAGE_COLOURS = {
    "depth_prediction": "#6a4c93", "head_draft": "#8fb8de", "draft_steps": "#3d5a80", "tail_draft": "#98c1d9",
    "prune": "#b8860b", "mask": "#e9c46a", "verify": "#0b6e4f", "accept": "#4f772d", "commit": "#c8553d",
    "bookkeeping": "#9c6644", "between stages": "#cbd2d9",
}  # fmt: skip


def latency(tables: dict[str, pd.DataFrame]) -> Figure | None:
    """Draw the milliseconds of a step against its width: median and 10-90 % band per context length.

    Return None if the table "latency" is empty.
    """
    table = tables["latency"]
    models = [model for model in ("target", "drafter") if model in set(table["model"])]
    if not models:
        return None
    titles = {"target": "T_verifier(W): one target step", "drafter": "T_drafter(W): one draft step"}
    figure = make_subplots(rows=1, cols=len(models), subplot_titles=[titles[model] for model in models])
    for column, model in enumerate(models, start=1):
        for colour, (context, part) in zip(COLOURS, table[table["model"] == model].groupby("context"), strict=False):
            _band(figure, part, f"{context:.0f}", colour, column)
        figure.update_xaxes(title_text="width W (tokens in one pass)", type="log", row=1, col=column)
        widths = sorted(table[table["model"] == model]["width"].unique())
        figure.update_xaxes(tickvals=widths, ticktext=[str(width) for width in widths], row=1, col=column)
        figure.update_yaxes(title_text="milliseconds", rangemode="tozero", row=1, col=column)
    return styled(figure, 420, least_width=340 * len(models))


def _band(figure: Figure, part: pd.DataFrame, context: str, colour: str, column: int) -> None:
    x = [*part["width"], *part["width"][::-1]]
    y = [*part["p90_ms"], *part["p10_ms"][::-1]]
    figure.add_scatter(
        x=x, y=y, fill="toself", mode="lines", line={"width": 0}, fillcolor=_faded(colour), hoverinfo="skip",
        legendgroup=context, showlegend=False, row=1, col=column,
    )  # fmt: skip
    figure.add_scatter(
        x=part["width"], y=part["ms"], mode="lines+markers", line={"color": colour, "width": 2}, marker={"size": 6},
        name=f"context {context}", legendgroup=context, showlegend=column == 1, row=1, col=column,
        hovertemplate="W=%{x}: %{y:.3g} ms<extra></extra>",
    )  # fmt: skip


def iterations(tables: dict[str, pd.DataFrame]) -> Figure | None:
    """Draw the stages of an iteration as one stacked bar, in milliseconds; None if the table "iterations" is empty."""
    table = tables["iterations"]
    if table.empty:
        return None
    figure = go.Figure()
    for stage, ms in zip(table["stage"], table["ms_an_iteration"], strict=True):
        figure.add_bar(
            x=[ms], y=["iteration"], orientation="h", name=stage.replace("_", " "),
            marker_color=STAGE_COLOURS.get(stage, "#5c6b73"), hovertemplate=f"{stage}: %{{x:.3g}} ms<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="milliseconds per iteration")
    figure.update_yaxes(showticklabels=False)
    return styled(figure, 250, legend_y=-0.75, least_width=640)


def prediction(tables: dict[str, pd.DataFrame]) -> Figure | None:
    """Draw the table "prediction": predicted (y) against measured (x) milliseconds of an iteration, a point per plan.

    A dashed line marks equal times; a band marks predictions within 7 % of the measured time. Return None if the table
    is empty.
    """
    table = tables["prediction"]
    if table.empty:
        return None
    low = 0.9 * min(table["predicted_iteration_ms"].min(), table["measured_iteration_ms"].min())
    high = 1.1 * max(table["predicted_iteration_ms"].max(), table["measured_iteration_ms"].max())
    figure = go.Figure()
    figure.add_scatter(
        x=[low, high, high, low], y=[1.07 * low, 1.07 * high, 0.93 * high, 0.93 * low], fill="toself", mode="lines",
        line={"width": 0}, fillcolor="rgba(11,110,79,0.10)", name="within 7 %", hoverinfo="skip",
    )  # fmt: skip
    figure.add_scatter(
        x=[low, high], y=[low, high], mode="lines", line={"color": "#9aa5b1", "dash": "dash"}, name="equal"
    )
    group_of = table["plan"].str.startswith("top").map({True: "best predictions", False: "named plans"})
    for colour, (group, part) in zip(COLOURS, table.groupby(group_of), strict=False):
        figure.add_scatter(
            x=part["measured_iteration_ms"], y=part["predicted_iteration_ms"], mode="markers", name=group,
            text=part["plan"], marker={"size": 10, "color": colour, "line": {"width": 1, "color": PAPER}},
            hovertemplate="%{text}<br>measured %{x:.3g} ms<br>predicted %{y:.3g} ms<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="measured iteration, ms")
    figure.update_yaxes(title_text="predicted iteration, ms")
    return styled(figure, 440)


def objective(tables: dict[str, pd.DataFrame], chosen: tuple[int, int, int] | None) -> Figure | None:
    """Draw the predicted speed-up over plain decoding by depth and verify width, one heatmap per draft width.

    The tree shapes (draft width, depth, verify width) of the lowest latency and of the highest average accepted length
    (AAL) are marked. Return None if the table "objective" is empty.

    Args:
        tables: all tables of the report, by name; "objective" is drawn.
        chosen: the tree shape that a schedule search has chosen, which is marked too unless it is the plain step; None
            if there was no search.
    """
    table = tables["objective"]
    if table.empty:
        return None
    widths = sorted(table["width"].unique())
    figure = make_subplots(
        rows=1, cols=len(widths), subplot_titles=[f"draft width {width}" for width in widths], shared_yaxes=True,
        horizontal_spacing=0.03,
    )  # fmt: skip
    low, high = table["speedup"].min(), table["speedup"].max()
    for column, width in enumerate(widths, start=1):
        grid = table[table["width"] == width].pivot(index="depth", columns="verify_width", values="speedup")
        lengths = table[table["width"] == width].pivot(index="depth", columns="verify_width", values="aal")
        figure.add_heatmap(
            z=grid.to_numpy(), x=[str(each) for each in grid.columns], y=list(grid.index),
            customdata=lengths.to_numpy(), zmin=low, zmax=high, colorscale="Viridis",
            colorbar={"title": "speed-up", "thickness": 12},
            showscale=column == len(widths), row=1, col=column,
            hovertemplate="verify %{x}, depth %{y}<br>%{z:.2f} x, AAL %{customdata:.2f}<extra></extra>",
        )  # fmt: skip
        figure.update_xaxes(title_text="verify width", type="category", row=1, col=column)
    figure.update_yaxes(title_text="depth", dtick=1, row=1, col=1)
    best_latency = first_shape(table.sort_values("speedup", ascending=False))
    best_aal = first_shape(table[table["aal"] >= table["aal"].max() - 1e-9].sort_values("iteration_ms"))
    is_chosen = chosen == best_latency
    optimal = "latency-optimal, chosen by the search" if is_chosen else "latency-optimal"
    marks: list[tuple[tuple[int, int, int], str, str, str]]
    marks = [(best_aal, "AAL-optimal", "diamond", "#ffb4a2"), (best_latency, optimal, "star", "#ffffff")]
    if chosen is not None and chosen[1] and not is_chosen:
        marks.append((chosen, "chosen by the search", "circle-open", "#e63946"))
    for (width, depth, verify_width), name, symbol, colour in marks:
        outline = {"width": 3.0 if "open" in symbol else 1.5}
        figure.add_scatter(
            x=[str(verify_width)], y=[depth], mode="markers", name=f"{name} ({width} x {depth} x {verify_width})",
            marker={"symbol": symbol, "size": 15, "color": colour, "line": outline}, row=1,
            col=widths.index(width) + 1,
        )  # fmt: skip
    return styled(figure, 440, legend_y=-0.28, least_width=140 + 170 * len(widths))


def timelines(tables: dict[str, pd.DataFrame]) -> Figure | None:
    """Draw when each stage of an iteration runs, predicted and measured, for the naive and the chosen plan.

    Return None if the table "timelines" is empty.
    """
    table = tables["timelines"]
    if table.empty:
        return None
    figure = go.Figure()
    lane = table["plan"] + ", " + table["kind"]
    for stage, part in table.assign(lane=lane).groupby("stage", sort=False):
        figure.add_bar(
            y=part["lane"], x=part["end_ms"] - part["start_ms"], base=part["start_ms"], orientation="h",
            name=str(stage).replace("_", " "), marker_color=STAGE_COLOURS.get(str(stage), "#5c6b73"),
            marker_line={"width": 0.5, "color": PAPER},
            customdata=part["resource"], hovertemplate=f"{stage} on %{{customdata}}<br>%{{x:.3g}} ms<extra></extra>",
        )  # fmt: skip
    ends = table.assign(lane=lane).groupby("lane", sort=False)["end_ms"].max()
    figure.add_scatter(
        x=ends, y=list(ends.index), mode="text", text=[f" {ms:.3g} ms" for ms in ends], textposition="middle right",
        showlegend=False, hoverinfo="skip", cliponaxis=False,
    )  # fmt: skip
    figure.update_layout(barmode="overlay", bargap=0.35)
    figure.update_yaxes(categoryorder="array", categoryarray=list(dict.fromkeys(lane))[::-1])
    figure.update_xaxes(title_text="milliseconds since the iteration began")
    return styled(figure, 150 + 60 * lane.nunique(), legend_y=-0.35, least_width=640)


def styled(figure: Figure, height: int, legend_y: float = -0.24, least_width: int = 340) -> Figure:
    """Apply the report's fonts, background and grid colours, and margins to ``figure``, in place, and return it.

    Args:
        height: height of the figure in pixels.
        legend_y: vertical position of the legend, in units of the plot's height; below 0 is under the plot.
        least_width: width in pixels below which labels would overlap; a narrower page scrolls the figure.
    """
    figure.update_layout(
        height=height, paper_bgcolor=PAPER, plot_bgcolor=PAPER, margin={"l": 60, "r": 20, "t": 50, "b": 50},
        font={"family": FONT, "size": 13, "color": INK},
        legend={"orientation": "h", "y": legend_y, "x": 0}, hoverlabel={"font": {"size": 12}},
        meta={"least_width": least_width},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID, linecolor="#9aa5b1", automargin=True)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, linecolor="#9aa5b1", automargin=True)
    figure.update_annotations(font={"size": 13})
    return figure


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.13)"
