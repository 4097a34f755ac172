"""Figures of a request, worked out by hand."""

import json

import pytest
from tiny_pair import TEXT

from yggdrasil.engine.trace import Trace
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


def hand_made_trace():
    """Four iterations: a plain step, two trees that accept 3 and 0, and one cut short by the end of the text."""
    trace = Trace(prefill_ns=7_000_000, decode_ns=20_000_000)
    trace.note(PLAIN_STEP, tokens=1, expected=1.0, predicted_ms=4.0)
    trace.note(TreeShape(2, 4, 8), tokens=4, expected=3.5, predicted_ms=6.0)
    trace.note(TreeShape(2, 4, 8), tokens=1, expected=2.5, predicted_ms=6.0)
    trace.note(TreeShape(1, 3, 4), tokens=2, expected=3.0, predicted_ms=5.0)
    for stage, ns in {"head_draft": 1, "draft_steps": 3, "verify": 8, "plain": 4, "prune": 2, "commit": 1}.items():
        trace.stage_ns[stage] = ns * 1_000_000
    return trace


def test_figures():
    metrics = hand_made_trace().metrics()

    assert metrics.iterations == 4
    assert metrics.aal == 8 / 4
    assert metrics.tpot_ms == 20 / 8  # the first token is the prefill's
    assert metrics.ttft_ms == 7.0
    assert metrics.proposed == 7 + 7 + 3
    assert metrics.accepted == 3 + 0 + 1
    assert metrics.acceptance_rate == 4 / 17
    assert metrics.plain_steps == 1
    assert metrics.depths == {0: 1, 3: 1, 4: 2}
    assert metrics.draft_widths == {0: 1, 1: 1, 2: 2}
    assert metrics.verify_widths == {1: 1, 4: 1, 8: 2}
    assert metrics.stage_ms["verify"] == 8.0
    assert metrics.overhead_share == pytest.approx(1 - (1 + 3 + 8 + 4) / 20)
    assert metrics.predicted_tpot_ms == pytest.approx((4 + 6 + 6 + 5) / (1 + 3.5 + 2.5 + 3))


def test_free_guesses_are_counted_apart():
    trace = hand_made_trace()
    trace.note(TreeShape(0, 5, 8), tokens=6, expected=5.0, predicted_ms=5.0)  # in five levels
    metrics = trace.metrics()

    assert hand_made_trace().metrics().model_free_trees == 0
    assert (metrics.model_free_trees, metrics.plain_steps, metrics.draft_widths[0]) == (1, 1, 2)
    assert (metrics.proposed, metrics.accepted) == (17 + 7, 4 + 5)


def test_an_empty_trace_has_figures_too():
    metrics = Trace(prefill_ns=5_000_000).metrics()

    assert (metrics.iterations, metrics.aal, metrics.tpot_ms, metrics.ttft_ms) == (0, 0.0, 0.0, 5.0)
    assert (metrics.acceptance_rate, metrics.overhead_share, metrics.predicted_tpot_ms) == (0.0, 0.0, None)


def test_figures_can_be_written_as_json():
    metrics = hand_made_trace().metrics()
    written = json.loads(json.dumps(metrics.as_dict()))

    assert written["aal"] == metrics.aal
    assert written["depths"] == {"0": 1, "3": 1, "4": 2}


def test_a_request_counts_what_it_emitted(perfect_pair):
    """Prefill 1, then blocks of 5; the ninth iteration is cut to 3 by the length limit."""
    decoder = perfect_pair.decoder(FixedPolicy(TreeShape(1, 4, 8)))
    request = decoder.start(TEXT[:20], max_new_tokens=44)
    list(request)
    trace, metrics = request._trace, request.result().metrics

    assert (metrics.iterations, trace.tokens, metrics.accepted) == (9, 43, 8 * 4 + 2)
    assert metrics.proposed == 9 * 7
    assert set(metrics.stage_ms) == set(trace.stage_ns)
    assert 0 < sum(metrics.stage_ms.values()) <= metrics.tpot_ms * 43
