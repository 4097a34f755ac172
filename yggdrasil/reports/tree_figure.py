"""Draws an example tree."""

import pandas as pd
import plotly.graph_objects as go

from yggdrasil.reports.figures import ROLE_COLOURS, Figure, styled


def tree(table: pd.DataFrame) -> Figure:
    """Draw one example tree, with depth to the right and one line per leaf; colour and symbol show each node's role.

    Args:
        table: one row per node, the root first, columns ``TREE_COLUMNS``.
    """
    places = _places(table)
    figure = go.Figure()
    for is_accepted in (False, True):
        x: list[float | None] = []
        y: list[float | None] = []
        for node, parent, depth, role in zip(
            *(table[name] for name in ("node", "parent", "depth", "role")), strict=True
        ):
            if node and (role == "accepted") == is_accepted:
                x += [depth - 1, depth, None]
                y += [places[parent], places[node], None]
        line = {"color": ROLE_COLOURS["accepted"] if is_accepted else "#cbd2d9", "width": 2.5 if is_accepted else 1}
        figure.add_scatter(x=x, y=y, mode="lines", line=line, hoverinfo="skip", showlegend=False)
    symbols = {"root": "square", "accepted": "circle", "verified": "x", "drafted": "circle-open"}
    names = {"accepted": "accepted", "verified": "verified, rejected", "drafted": "drafted, pruned", "root": "root"}
    for role in ("root", "accepted", "verified", "drafted"):
        part = table[table["role"] == role]
        colour = ROLE_COLOURS[role] if role != "drafted" else "#9aa5b1"
        figure.add_scatter(
            x=[*part["depth"], None], y=[*(places[int(node)] for node in part["node"]), None],  # a mark without nodes
            mode="markers+text", name=names[role],  # is still explained
            text=part["text"], textposition="top right", textfont={"family": "monospace", "size": 12},
            customdata=part["probability"],
            hovertemplate="%{text}<br>estimated acceptance %{customdata:.3f}<extra></extra>",
            marker={"symbol": symbols[role], "size": 10, "color": colour},
        )  # fmt: skip
    figure.update_xaxes(title_text="depth", dtick=1, range=[-0.4, float(table["depth"].max()) + 0.6])
    figure.update_yaxes(visible=False, range=[max(places.values()) + 0.6, -0.9])
    leaves = max(places.values()) + 1
    return styled(figure, int(150 + 30 * leaves), legend_y=1.0 + 45 / (30 * leaves), least_width=400)


def _places(table: pd.DataFrame) -> dict[int, float]:
    """Return each node's row: leaves are one apart, a parent is at its first child, the accepted path is on top."""
    children: dict[int, list[int]] = {int(node): [] for node in table["node"]}
    accepted = set(table[table["role"] == "accepted"]["node"].astype(int))
    for node, parent in zip(table["node"].astype(int), table["parent"].astype(int), strict=True):
        if node:
            children[parent].append(node)
    places: dict[int, float] = {}
    row = 0

    def settle(node: int) -> None:
        nonlocal row
        ordered = sorted(children[node], key=lambda child: child not in accepted)
        for child in ordered:
            settle(child)
        if not ordered:
            places[node] = float(row)
            row += 1
        else:
            places[node] = places[ordered[0]]

    settle(0)
    return places
