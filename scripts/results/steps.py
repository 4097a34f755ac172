"""Single passes beside llama.cpp's, on the same files."""

from collections.abc import Mapping, Sequence
from typing import Any

from results.records import Result, number, percent, table

FILES = {"bf16": "bf16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K_M"}
Pass = Mapping[str, Any]


def steps(results: Sequence[Result]) -> str:
    """A row for each file and context: both sides' medians by width, T(8) over T(1), and the bandwidth W=1 reaches."""
    rows: dict[tuple[str, ...], dict[int, Pass]] = {}
    for result in results:
        for file in result.record["files"]:
            for one in file["passes"]:
                if one["context"]:
                    key = (result.target, FILES[file["format"]], str(one["context"]))
                    rows.setdefault(key, {})[one["width"]] = one
    widths = sorted({width for passes in rows.values() for width in passes})
    titles = ["target", "file", "context", *(f"W={width}" for width in widths), "W=8 over W=1", "share of bandwidth"]
    return table(
        titles,
        [[*key, *(_pair(passes.get(width)) for width in widths), *_shape(passes)] for key, passes in rows.items()],
    )


def reading(results: Sequence[Result]) -> str:
    """A row for each file: both sides' time for a prompt, and how many greedy texts are the same."""
    rows = [
        [
            result.target, FILES[file["format"]], number(file["file_megabytes"], 0), str(one["width"]), _pair(one),
            _same(file["text"]),
        ]
        for result in results
        for file in result.record["files"]
        for one in file["passes"]
        if not one["context"]
    ]  # fmt: skip
    titles = ["target", "file", "MB", "prompt tokens", "ms to the first token", "same greedy text"]
    return table(titles, rows)


def _pair(one: Pass | None) -> str:
    """Ours, llama.cpp's, and ours over it."""
    if one is None:
        return "-"
    ours, theirs = one["ours_ms"]["median"], one["theirs_ms"]["median"]
    digits = 0 if theirs >= 200 else 1 if theirs >= 20 else 2
    return f"{ours:.{digits}f}, {theirs:.{digits}f}: **{ours / theirs:.2f}**"


def _shape(passes: Mapping[int, Pass]) -> list[str]:
    plain, wide = passes.get(1), passes.get(8)
    if plain is None:
        return ["-", "-"]
    flat = None if wide is None else wide["ours_ms"]["median"] / plain["ours_ms"]["median"]
    return [number(flat), percent(plain["least_ms"] / plain["ours_ms"]["median"])]


def _same(text: Mapping[str, Any] | None) -> str:
    if text is None:
        return "-"
    partings = text["partings"]
    ties = sum(parting["verdict"] == "tie" for parting in partings)
    shown = f"{text['prompts'] - len(partings)} of {text['prompts']}"
    return f"{shown}, a tie in {ties} of the rest" if partings else shown
