"""The simulator against an example worked out by hand and against a slow walk."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from yggdrasil.profiling.simulator import FixedPolicy, OutcomeCache, Policy, PredictedPolicy, simulate
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.tree.objective import Objective, ShapeChooser, StepCosts, choose_verify_width, expected_tokens_by_width

if TYPE_CHECKING:
    from tests.profiling.conftest import MakeTraces

COSTS = StepCosts(
    head_ms=1.0,
    draft_ms={1: 0.5, 2: 0.75, 3: 1.0},
    verify_ms={1: 4.0, 2: 4.25, 4: 5.0, 8: 9.0},
    overhead_ms=0.25,
    plain_ms=4.5,
)


@dataclass(frozen=True)
class ListedPolicy:
    """A different tree at every row."""

    shapes: list[tuple[int, int]]
    verify_width: int | None
    objective: Objective

    def __call__(self, index: int) -> tuple[int, int]:
        return self.shapes[index]


def chain_traces(lengths: list[int], document: list[int], max_depth: int, edge: float = 0.5) -> TraceSet:
    """Return traces of width 1: a chain a row of which the first ``length`` nodes are hits."""
    num_rows = len(lengths)
    starts = [document.index(number) for number in document]
    chain = np.arange(max_depth)
    return TraceSet(
        hidden=np.zeros((num_rows, 2), dtype=np.float32),
        repetition=np.zeros((num_rows, 6), dtype=np.float32),
        head=np.full((num_rows, 2), -np.inf, dtype=np.float32),
        document=np.array(document),
        position=np.arange(num_rows) - np.array(starts) + 100,
        scores={1: np.tile(((chain + 1) * np.log(edge)).astype(np.float32), (num_rows, 1))},
        depth={1: np.tile((chain + 1).astype(np.int8), (num_rows, 1))},
        hit={1: chain < np.array(lengths)[:, None]},
        edge_log_probability={1: np.full((num_rows, max_depth), np.log(edge), dtype=np.float32)},
        parent={1: np.tile((chain - 1).astype(np.int16), (num_rows, 1))},
    )


# Document 7: row 0 accepts 2, on to row 3, which accepts 1, on to row 5, which accepts 0: 6 tokens in 3 steps.
# Document 8: row 6 accepts 1, on to row 8, which accepts 2 and runs past the end: 3 tokens in 2 steps.
HAND_MADE = chain_traces([2, 0, 0, 1, 2, 0, 1, 0, 2], [7] * 6 + [8] * 3, max_depth=2)


def test_fixed_policy_by_hand() -> None:
    result = simulate(HAND_MADE, FixedPolicy(width=1, depth=2, verify_width=4), COSTS)

    assert (result.tokens, result.iterations) == (9, 5)
    assert result.milliseconds == 5 * (1.0 + 0.5 + 5.0 + 0.25)
    assert result.aal == 9 / 5
    assert result.ms_per_token == result.milliseconds / 9
    assert result.histograms == {
        "width": {1: 5},
        "depth": {2: 5},
        "verify_width": {4: 5},
        "accepted": {0: 1, 1: 2, 2: 2},
    }


def test_pruned_and_plain_steps_by_hand() -> None:
    # Verify width 2 keeps one node: rows 0, 2, 3, 5 and 6, 8.
    pruned = simulate(HAND_MADE, FixedPolicy(width=1, depth=2, verify_width=2), COSTS)
    assert (pruned.iterations, pruned.histograms["accepted"]) == (6, {0: 2, 1: 4})

    plain = simulate(HAND_MADE, FixedPolicy(width=1, depth=0), COSTS)
    assert (plain.tokens, plain.iterations, plain.milliseconds) == (9, 9, 9 * 4.5)
    assert plain.histograms["verify_width"] == {1: 9}


def test_verify_width_is_chosen_after_drafting_by_hand() -> None:
    # Drafting and overhead cost 1.75 ms. Expected tokens: 1 at width 1, 1.5 at width 2, 1.75 at width 4.
    # 1.75 / 6.75 beats 1.5 / 6 and 1 / 5.75; where width 4 costs 5.5 ms, 1.5 / 6 beats 1.75 / 7.25.
    result = simulate(HAND_MADE, FixedPolicy(width=1, depth=2), COSTS)
    assert result.histograms["verify_width"] == {4: 5}
    dear = replace(COSTS, verify_ms=COSTS.verify_ms | {4: 5.5})
    assert simulate(HAND_MADE, FixedPolicy(width=1, depth=2), dear).histograms["verify_width"] == {2: 6}
    aal_only = FixedPolicy(width=1, depth=2, objective="aal")
    assert simulate(HAND_MADE, aal_only, dear).histograms["verify_width"] == {4: 5}


def slow_simulation(traces: TraceSet, policy: Policy) -> tuple[int, int, float]:
    """Return (tokens, iterations, milliseconds), choosing each verify width with the run-time function."""
    tokens, iterations, milliseconds = 0, 0, 0.0
    for document in sorted(set(traces.document.tolist())):
        rows = [row for row in range(traces.num_positions) if traces.document[row] == document]
        while rows:
            width, depth = policy(rows[0])
            accepted, verify_width = 0, 1
            if depth:
                scores = np.sort(traces.scores[width][rows[0], : width * depth].astype(float))[::-1]
                verify_width = policy.verify_width or choose_verify_width(
                    expected_tokens_by_width(np.exp(scores), COSTS.verify_widths),
                    COSTS.drafting_ms(width, depth),
                    COSTS,
                    policy.objective,
                )
                accepted = int(traces.accepted_length(width, depth, verify_width)[rows[0]])
            milliseconds += COSTS.iteration_ms(width, depth, verify_width)
            iterations += 1
            tokens += len(rows[: accepted + 1])
            rows = rows[accepted + 1 :]
    return tokens, iterations, milliseconds


@pytest.mark.parametrize("objective", ["latency", "aal"])
@pytest.mark.parametrize("verify_width", [None, 4])
def test_simulation_matches_a_slow_walk(
    make_traces: "MakeTraces", objective: Objective, verify_width: int | None
) -> None:
    traces = make_traces().traces
    random = np.random.default_rng(3)
    cache = OutcomeCache(traces, COSTS.verify_widths)
    for _ in range(5):
        shapes = [(int(random.integers(1, 4)), int(random.integers(0, 5))) for _ in range(traces.num_positions)]
        policy = ListedPolicy(shapes, verify_width, objective)

        result = simulate(traces, policy, COSTS, cache)

        tokens, iterations, milliseconds = slow_simulation(traces, policy)
        assert (result.tokens, result.iterations) == (tokens, iterations)
        assert result.milliseconds == pytest.approx(milliseconds)
        assert sum(result.histograms["accepted"].values()) == iterations


def test_constant_prediction_is_the_fixed_policy(make_traces: "MakeTraces") -> None:
    traces = make_traces().traces
    chooser = ShapeChooser(COSTS, traces.ratio_tables(COSTS.verify_widths, reference_width=3))
    survival = traces.survival_table(3, 32)
    shape = chooser.choose(survival)
    assert shape.depth > 0

    constant = simulate(traces, PredictedPolicy(np.tile(survival, (traces.num_positions, 1)), chooser), COSTS)

    assert constant == simulate(traces, FixedPolicy(shape.width, shape.depth), COSTS)


def test_knowing_the_length_beats_every_fixed_tree() -> None:
    lengths = np.random.default_rng(0).choice([0, 0, 0, 6], size=200).tolist()
    traces = chain_traces(lengths, [1] * 200, max_depth=6, edge=0.9)
    chooser = ShapeChooser(COSTS, traces.ratio_tables(COSTS.verify_widths, reference_width=1))
    survival = (np.array(lengths)[:, None] > np.arange(6)).astype(np.float32)

    oracle = simulate(traces, PredictedPolicy(survival, chooser), COSTS)

    choices = [FixedPolicy(1, depth, width) for depth in range(7) for width in (None, 1, 2, 4, 8)]
    fixed = [simulate(traces, policy, COSTS) for policy in choices]
    assert oracle.ms_per_token < 0.9 * min(result.ms_per_token for result in fixed)
    assert len(oracle.histograms["depth"]) == 2
    assert oracle.histograms["accepted"].keys() == {0, max(oracle.histograms["depth"])}


def test_what_cannot_be_simulated_is_refused(make_traces: "MakeTraces") -> None:
    traces = make_traces().traces
    with pytest.raises(ValueError, match="no cost for verify width 5"):
        simulate(traces, FixedPolicy(2, 2, verify_width=5), COSTS)
    with pytest.raises(ValueError, match="no positions"):
        simulate(traces.select([]), FixedPolicy(2, 2), COSTS)
    with pytest.raises(ValueError, match="belongs to other"):
        simulate(traces.select([5]), FixedPolicy(2, 2), COSTS, OutcomeCache(traces, COSTS.verify_widths))
