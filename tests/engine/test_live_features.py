"""Training reads what decoding reads: the same numbers, position by position. A plain step reads nothing at all."""

import numpy as np
import pytest
from integrity import check_traces
from tiny_pair import SHAPES, TEXT, byte_tokenizer

from yggdrasil.calibration.record import record_document
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.engine.trace import Trace
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.policy.objective import Decision, DepthPrediction
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.predictor.features import FeatureSizes
from yggdrasil.scheduling.stages import HEAD_FIRST_ORDER
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

PROMPT = TEXT[:20]
NUM_TOKENS = 50


class Reader(FixedPolicy):
    """Reads all features at every position and drafts trees of several shapes, with plain steps between."""

    def __init__(self):
        super().__init__(PLAIN_STEP)
        self._shapes = [TreeShape(4, 4, 16), TreeShape(1, 2, 4), PLAIN_STEP, TreeShape(2, 3, 8)]
        self.seen = {}

    def choose(self, context, model_free=None, features=None):
        if features is None:
            return None
        self.seen[context] = tuple(part().copy() for part in (features.hidden, features.repetition, features.head))
        return Decision(self._shapes[len(self.seen) % len(self._shapes)], is_drafting=True)

    def prune(self, decision, expected, context):
        return decision


def test_recorded_evidence_is_the_evidence_of_decoding(pair):
    policy = Reader()
    decoder = pair.decoder(policy, stages=HEAD_FIRST_ORDER)
    generation = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS)
    assert generation.tokens == pair.reference(PROMPT, NUM_TOKENS)
    assembly = decoder.assembly
    traces = record_document(assembly, assembly.engine.drafter, PROMPT, generation.tokens, 0)

    compared = 0
    for row, position in enumerate(traces.position.tolist()):
        if position not in policy.seen:  # inside an accepted block
            continue
        hidden, repetition, head = policy.seen[position]
        np.testing.assert_allclose(traces.hidden[row], hidden, atol=1e-4)
        assert (traces.repetition[row] == repetition).all()
        np.testing.assert_allclose(traces.head[row], head, atol=1e-4)
        compared += 1
    assert compared > 5
    assert (np.diff(traces.head, axis=1) <= 0).all()  # best first
    check_traces(traces)


class CountingPredictor:
    """A depth predictor that counts its calls and always says the same."""

    num_features, max_depth = 6, SHAPES.max_depth

    def __init__(self, survival):
        self.calls, self._survival = 0, np.array(survival, dtype=np.float32)

    def survival(self, features):
        self.calls += 1
        return self._survival


@pytest.mark.parametrize("stages", [None, HEAD_FIRST_ORDER], ids=["depth first", "head first"])
def test_plain_steps_of_a_spent_budget_call_neither_predictor_nor_drafter(pair, stages, monkeypatch):
    """Drafting never pays here: where asking has cost the grant, plain steps touch nothing but the target."""
    costs = StepCosts(9.0, dict.fromkeys((1, 2, 4), 9.0), dict.fromkeys(SHAPES.verify_widths, 9.0), 9.0, 1.0)
    ratios = {w: np.ones((4, 4, 5), dtype=np.float32) for w in (1, 2, 4)}
    predictor = CountingPredictor([0.1, 0.0, 0.0, 0.0])
    depth = DepthPrediction(predictor, FeatureSizes(0, 6, 0))
    policy = ObjectivePolicy({50: costs}, ratios, predictor.survival(None), depth, is_head_first=stages is not None)
    observe = policy.observe  # at promised times, of which reading the features is two plain steps
    policy.observe = lambda decision, tokens, _: observe(
        decision, tokens, decision.milliseconds + (2.0 if decision.is_drafting else 0.0)
    )
    decoder = pair.decoder(policy, **({} if stages is None else {"stages": stages}))
    engine, heads = decoder.assembly.engine, []
    head = engine.drafter._draft_head
    monkeypatch.setattr(engine.drafter, "_draft_head", lambda: heads.append(head()))
    predictor.calls = 0
    trace, stream = Trace(), TextStream(byte_tokenizer(), frozenset(), 61, ())
    list(engine.decode(PROMPT, stream, policy, trace))

    num_calls = 10 if stages is None else 6  # the first is charged in the end; then 2 of 16 plain steps, or at most 4
    assert trace.plain_steps == trace.iterations == 60
    assert predictor.calls == num_calls
    assert len(heads) == (num_calls if stages is not None else 0)
    assert set(trace.stage_ns) >= {"plain", "commit"}
    assert stream.tokens == pair.reference(PROMPT, 61)
