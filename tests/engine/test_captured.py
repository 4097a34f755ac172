"""Captured steps on a CPU, where a capture is the work itself: the call path of a GPU, the tokens of transformers."""

import pytest
import torch
from no_waiting import refuse_waiting
from test_engine import PROMPT, TREES
from tiny_pair import SHAPES, TEXT, OracleDrafter, addresses, cache_rows

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.engine.parity import ProbeText, measure_parity
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.scheduling.executors import InOrderExecutor
from yggdrasil.scheduling.stages import HEAD_FIRST_ORDER, STAGES, Schedule
from yggdrasil.tree.shape import TreeShape

NUM_TOKENS = 60


@pytest.mark.parametrize("shape", TREES, ids=str)
def test_tokens_equal_transformers(pair, shape):
    decoder = pair.decoder(FixedPolicy(shape), backend="cudagraph")
    generation = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS)

    assert generation.tokens == pair.reference(PROMPT, NUM_TOKENS)
    assert (
        generation.metrics.iterations
        == pair.decoder(FixedPolicy(shape)).generate(PROMPT, max_new_tokens=NUM_TOKENS).metrics.iterations
    )


def test_a_depth_chosen_after_the_head_draft(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend="cudagraph", stages=HEAD_FIRST_ORDER)

    assert decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS).tokens == pair.reference(PROMPT, NUM_TOKENS)


OTHER_VARIANTS = [
    (name, variant)
    for name, variants in STAGES.items()
    for variant in list(variants)[1:]
    if (name, variant) != ("depth_prediction", "informed")
]


@pytest.mark.parametrize(("name", "variant"), OTHER_VARIANTS, ids="=".join)
def test_other_schedules_are_refused(pair, name, variant):
    stages = Schedule.of({name: variant}).labels
    message = f"cannot run the stage {name}={variant}; take a plan with {name}="
    for options in ({"stages": stages}, {"other_stages": [stages]}):
        with pytest.raises(YggdrasilError, match=message):
            pair.decoder(PLAIN_POLICY, backend="cudagraph", **options)
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend="cudagraph")
    with pytest.raises(YggdrasilError, match=message):
        decoder.assembly.engine.use(stages)

    assert decoder.generate(PROMPT, max_new_tokens=5).tokens == pair.reference(PROMPT, 5)


HOST_DECIDES = {
    "drawn": {"sampling": SamplingParams(temperature=1.0, seed=1)},
    "drawn among few": {"sampling": SamplingParams(temperature=8.0, top_k=5, top_p=0.9, min_p=0.01, seed=2)},
    "penalties and a bias": {"sampling": SamplingParams(repetition_penalty=1.3, logit_bias={3: 2.0})},
    "log-probabilities": {"sampling": SamplingParams(logprobs=1)},
    "plain and drawn": {"sampling": SamplingParams(temperature=1.0, seed=1), "speculation": False},
    "k-ary": {"speculation": Speculation(expansion=(2, 1))},
    "drawn candidates": {
        "sampling": SamplingParams(temperature=6.0, seed=3), "speculation": Speculation(rule="specinfer"),
    },
}  # fmt: skip


@pytest.mark.parametrize("options", HOST_DECIDES.values(), ids=HOST_DECIDES)
def test_what_the_host_decides_is_what_it_decides_on_a_cpu(pair, options):
    """The same coins by position, so the same tokens, and the same cache behind them."""
    found = {}
    for backend in ("eager", "cudagraph"):
        decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend=backend)
        decoder.generate(PROMPT, max_new_tokens=5)  # a request that the device decides comes before
        found[backend] = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, **options)
    eager, captured = found.values()

    assert captured.tokens == eager.tokens
    assert captured.metrics.iterations == eager.metrics.iterations
    target = decoder.assembly.engine.target
    text = [*PROMPT, *captured.tokens]
    expected, length = cache_rows(pair.plain_target, text), min(target.length, len(text) - 1)
    for ours, theirs in zip(target.runner.cache.tensors(), expected, strict=True):
        torch.testing.assert_close(ours[:, :length], theirs[:, :length], atol=1e-4, rtol=1e-4)


def test_a_pass_that_the_host_decides_is_one_launch(pair):
    """And one more where accepted rows have to be moved."""
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend="cudagraph")
    sampling = SamplingParams(temperature=1.0, seed=1)
    decoder.generate(PROMPT, max_new_tokens=5, sampling=sampling)
    recorded = decoder.assembly.target.recorder.num_recorded
    generation = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, sampling=sampling)

    assert decoder.assembly.target.recorder.num_recorded - recorded <= 4  # drafts and heads of the first request
    assert generation.metrics.aal > 1.5


def test_parity_is_refused(pair):
    decoder = pair.decoder(PLAIN_POLICY, backend="cudagraph")
    with pytest.raises(YggdrasilError, match="captured steps"):
        measure_parity(decoder.assembly, [ProbeText("text", PROMPT)], 3)


def test_a_target_of_captured_steps_refuses_what_it_cannot_tell(pair):
    engine = pair.decoder(PLAIN_POLICY, backend="cudagraph").assembly.engine
    with pytest.raises(YggdrasilError, match="take a plan with accept=device"):
        engine.target.accept_on_host((), 8, engine.tree)


def test_a_measurement_waits_after_every_stage(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend="cudagraph")
    waits = []
    decoder.assembly.engine.executor = InOrderExecutor(lambda: waits.append(1))
    generation = decoder.generate(PROMPT, max_new_tokens=30)

    assert len(waits) == generation.metrics.iterations * (len(STAGES) - 1)  # a superset's tail has nothing to do


def test_a_drafter_on_the_host(pair):
    reference = pair.reference(PROMPT, NUM_TOKENS)
    drafter = OracleDrafter([*PROMPT, *reference])
    generation = pair.decoder(FixedPolicy(TreeShape(4, 3, 16)), backend="cudagraph", drafter=drafter).generate(
        PROMPT, max_new_tokens=NUM_TOKENS
    )

    assert generation.tokens == reference
    assert 0 < generation.metrics.acceptance_rate < 1


def test_expected_tokens_come_back_with_the_outcome(pair, monkeypatch):
    """The expectation of the verified nodes, ranked by the step itself, equals what the engine reads before it."""

    def expected(backend):
        noted = []
        monkeypatch.setattr(Trace, "note", lambda self, shape, tokens, expected, ms: noted.append(expected))
        decoder = pair.decoder(Estimating(TreeShape(4, 4, 8), SHAPES.verify_widths), backend=backend)
        decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS)
        return noted

    noted = expected("eager")
    # The host and the device add the same numbers in different orders.
    assert expected("cudagraph") == pytest.approx(noted, rel=1e-5)
    assert len(set(noted)) > 3


class Estimating(FixedPolicy):
    """Keeps what the tree's scores expect at its verify width."""

    def __init__(self, shape, verify_widths):
        super().__init__(shape)
        self._index = verify_widths.index(shape.verify_width)

    def prune(self, decision, expected, context):
        return super().prune(decision, expected, context)._replace(tokens=expected[self._index])


def test_rows_are_kept_on_the_device(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 4, 16)), backend="cudagraph")
    generation = decoder.generate(PROMPT, max_new_tokens=50)
    target = decoder.assembly.engine.target
    expected = cache_rows(pair.plain_target, [*PROMPT, *generation.tokens])

    length = min(target.length, len(PROMPT) + 49)
    for ours, theirs in zip(target.runner.cache.tensors(), expected, strict=True):
        torch.testing.assert_close(ours[:, :length], theirs[:, :length], atol=1e-4, rtol=1e-4)


def test_recording_ahead_changes_no_token_and_moves_no_buffer(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 4, 16)), backend="cudagraph")
    before = addresses(decoder)
    decoder.assembly.warm()
    recorded = decoder.assembly.target.recorder.num_recorded
    for prompt in (PROMPT, TEXT[30:41]):
        assert decoder.generate(prompt, max_new_tokens=30).tokens == pair.reference(prompt, 30)

    assert decoder.assembly.target.recorder.num_recorded == recorded
    assert addresses(decoder) == before


def test_steps_never_wait_for_the_device(pair, monkeypatch):
    refuse_waiting(monkeypatch)
    for policy in (PLAIN_POLICY, FixedPolicy(TreeShape(4, 4, 16)), FixedPolicy(TreeShape(1, 3, 4))):
        decoder = pair.decoder(policy, backend="cudagraph")
        assert decoder.generate(PROMPT, max_new_tokens=30).tokens == pair.reference(PROMPT, 30)
