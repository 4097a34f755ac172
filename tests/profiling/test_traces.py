"""Traces against per-node loops that check whole paths against the text."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from integrity import check_traces

from yggdrasil.errors import ArtifactError
from yggdrasil.profiling.traces import TraceSet

if TYPE_CHECKING:
    from tests.profiling.conftest import MakeTraces


def path_to(traces: TraceSet, width: int, row: int, node: int) -> list[int]:
    """Return the nodes from the root's child to ``node``."""
    path = [node]
    while (parent := int(traces.parent[width][row, path[0]])) >= 0:
        path.insert(0, parent)
    return path


@pytest.mark.parametrize("seed", range(3))
def test_accepted_length_matches_explicit_paths(make_traces: "MakeTraces", seed: int) -> None:
    grown = make_traces(seed=seed)
    lengths = set()
    for width in (1, 2, 3):
        accepted = grown.traces.accepted_length(width).tolist()
        for row, future in enumerate(grown.future):
            tokens = grown.tokens[width][row]
            paths = [path_to(grown.traces, width, row, node) for node in range(len(tokens))]
            kept = [len(path) for path in paths if [tokens[step] for step in path] == future[: len(path)]]
            assert accepted[row] == max(kept, default=0), (width, row)
        lengths |= set(accepted)
    assert {2, 3, 4} <= lengths


def test_recorded_trees_are_sound(make_traces: "MakeTraces") -> None:
    check_traces(make_traces().traces)


def test_edges_are_those_below_an_accepted_parent(make_traces: "MakeTraces") -> None:
    grown = make_traces()
    traces = grown.traces
    expected = []
    for row, node in product(range(traces.num_positions), range(8)):
        path = [grown.tokens[2][row][step] for step in path_to(traces, 2, row, node)]
        if path[:-1] == grown.future[row][: len(path) - 1]:
            accepted = path[-1] == grown.future[row][len(path) - 1]
            expected.append((traces.edge_log_probability[2][row, node], accepted))

    assert list(zip(*traces.edges(2), strict=True)) == expected


def test_select_keeps_whole_documents(make_traces: "MakeTraces") -> None:
    traces = make_traces().traces

    chosen = traces.select([25, 5])

    assert chosen.document.tolist() == [5] * 9 + [25] * 12
    rows = [*range(9), *range(13, 25)]
    assert (chosen.hidden == traces.hidden[rows]).all()
    assert chosen.accepted_length(3).tolist() == traces.accepted_length(3)[rows].tolist()
    assert list(chosen.document_ranges()) == [(0, 9), (9, 21)]


def test_document_ranges_refuse_gaps_and_shuffled_rows(make_traces: "MakeTraces") -> None:
    traces = make_traces().traces
    with pytest.raises(ValueError, match="skips positions"):
        list(replace(traces, position=traces.position * 2).document_ranges())
    with pytest.raises(ValueError, match="contiguous"):
        list(replace(traces, document=traces.document % 20).document_ranges())


def test_file_round_trip_and_refusal_of_damage(make_traces: "MakeTraces", tmp_path: Path) -> None:
    traces = make_traces().traces
    path = tmp_path / "traces.safetensors"
    traces.save(path)

    loaded = TraceSet.load(path)

    before: dict[str, Any] = traces.to_arrays()
    for name, array in loaded.to_arrays().items():
        assert array.dtype == before[name].dtype
        assert (array == before[name]).all(), name
    assert loaded.widths == (1, 2, 3)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ArtifactError):
        TraceSet.load(path)
