"""Captured steps on a CPU, where a capture is the work itself: the call path of a GPU, the tokens of transformers."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from no_waiting import refuse_waiting
from test_engine import PROMPT, TREES
from tiny_pair import SHAPES, TEXT, OracleDrafter, addresses, byte_tokenizer, cache_rows

from yggdrasil.acceptance.sampling import Constraint, SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.engine.parity import ProbeText, measure_parity
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.engine.targets.sampled_captures import SampledCaptures
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.passes import Readback
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import TreeShape

NUM_TOKENS = 24
SMALL = replace(SHAPES, draft_widths=(4,), max_depth=3, verify_widths=(1, 8))


@pytest.mark.parametrize("shape", [TREES[number] for number in (1, 3, 4, 6, 7)], ids=str)
def test_tokens_equal_transformers(pair, shape):
    captured, native = (
        pair.decoder(FixedPolicy(shape), backend=backend).generate(PROMPT, max_new_tokens=NUM_TOKENS)
        for backend in ("cudagraph", "native")
    )

    assert captured.tokens == pair.reference(PROMPT, NUM_TOKENS)
    assert captured.metrics.iterations == native.metrics.iterations


SCHEDULES = {  # launches of an iteration: head draft, levels and verification, and what runs ahead of time
    "usual": ({}, 2),  # the next tree is drafted in one launch, behind the pass
    "the head tells the depth": ({"depth_prediction": "informed"}, 3),
    "late depths, books kept while a pass runs": ({"depth_prediction": "late", "bookkeeping": "overlapped"}, 2),
    "tail ahead": ({"tail_draft": "ahead"}, 4),  # accepted rows are moved in the next head draft
    "tail read after acceptance": ({"tail_draft": "conditional"}, 4),
    "head ahead": ({"head_draft": "ahead", "bookkeeping": "overlapped"}, 3),
    "head ahead, which tells the depth": ({"head_draft": "ahead", "depth_prediction": "informed"}, 4),
    "all ahead": (
        {"depth_prediction": "late", "head_draft": "ahead", "tail_draft": "ahead", "bookkeeping": "overlapped"}, 3,
    ),
}  # fmt: skip


DRAWN = SamplingParams(temperature=5.0, seed=2)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [*((name, SamplingParams()) for name in SCHEDULES), *((name, DRAWN) for name in ("usual", "all ahead"))],
)
def test_schedules_give_the_same_tokens_and_wait_once(pair, monkeypatch, name, sampling):
    variants, most = SCHEDULES[name]
    usual = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)))
    expected = usual.generate(PROMPT, max_new_tokens=NUM_TOKENS, sampling=sampling)
    refuse_waiting(monkeypatch)
    calls = count_calls(monkeypatch)
    stages = Schedule.of(variants).labels
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend="cudagraph", stages=stages)
    decoder.generate(PROMPT, max_new_tokens=2, sampling=sampling)
    num_reading = calls["Capture"]  # of the prompt by both models, and an iteration
    decoder.assembly.forget()
    calls.clear()
    generation = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, sampling=sampling)

    assert generation.tokens == expected.tokens
    iterations = generation.metrics.iterations
    assert iterations == expected.metrics.iterations < NUM_TOKENS - 1
    assert calls["Readback"] <= iterations + 4  # of the prompt's chunks, of a first token, and of a pass past the end
    assert calls["Capture"] <= most * iterations + num_reading


def test_acceptance_on_the_host_is_refused(pair):
    stages = Schedule.of({"accept": "host"}).labels
    message = "cannot run the stage accept=host; take a plan with accept=device"
    for options in ({"stages": stages}, {"other_stages": [stages]}):
        with pytest.raises(YggdrasilError, match=message):
            pair.decoder(PLAIN_POLICY, backend="cudagraph", **options)
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend="cudagraph")
    with pytest.raises(YggdrasilError, match=message):
        decoder.assembly.engine.use_schedule(stages)

    assert decoder.generate(PROMPT, max_new_tokens=5).tokens == pair.reference(PROMPT, 5)


DEVICE_SAMPLES = {
    "greedy": {},
    "drawn": {"sampling": SamplingParams(temperature=6.0, seed=1)},
    "drawn among few": {"sampling": SamplingParams(temperature=8.0, top_k=5, top_p=0.9, min_p=0.01, seed=2**64 - 1)},
    "penalties and a bias": {
        "sampling": SamplingParams(repetition_penalty=1.3, frequency_penalty=2.0, logit_bias={3: 2.0})
    },
    "penalties, drawn among few": {
        "sampling": SamplingParams(temperature=4.0, top_k=9, presence_penalty=1.0, repetition_penalty=1.2, seed=5)
    },
    "plain and drawn": {"sampling": SamplingParams(temperature=6.0, seed=1), "speculation": False},
}


def halved(_, scores):
    return scores / 2


def ends_of(name):
    """End tokens of a request above. Token 35 comes after five tokens of the greedy text."""
    return (0,) if "constraint" in name else (35,) if name == "a minimum length" else ()


_PATTERN = Constraint("regex", "[a-zA-Z0-9.,!? -]{12}stuv")
_GREEDY_LOGPROBS = SamplingParams(logprobs=3)
DEVICE_SAMPLES |= {
    "log-probabilities": {"sampling": _GREEDY_LOGPROBS},
    "drawn, with log-probabilities": {"sampling": SamplingParams(temperature=6.0, top_k=9, seed=4, logprobs=60)},
    "a constraint": {"sampling": SamplingParams(constraint=_PATTERN, logprobs=0)},
    "drawn under a constraint": {
        "sampling": SamplingParams(temperature=9.0, top_p=0.9, seed=3, constraint=_PATTERN, presence_penalty=0.5)
    },
    "typical-p": {"sampling": SamplingParams(temperature=6.0, typical_p=0.7, min_p=0.001, seed=10)},
    "a minimum length": {"sampling": SamplingParams(min_new_tokens=9)},
    "bad words": {"sampling": SamplingParams(bad_words=((84,), (57, 35), (53, 43, 35)))},
    "bad words, drawn": {
        "sampling": SamplingParams(temperature=5.0, bad_words=((84,), (7, 6), (35, 51)), seed=6, logprobs=1)
    },
    "typical": {
        "sampling": SamplingParams(temperature=8.0, seed=1, logprobs=0),
        "speculation": Speculation(rule="typical", typical_epsilon=0.02, typical_delta=0.1),
    },
    "relaxed": {"speculation": Speculation(rule="relaxed", relaxed_topk=4, relaxed_delta=20.0)},
    "relaxed, drawn with penalties": {
        "sampling": SamplingParams(temperature=5.0, frequency_penalty=1.0, seed=4),
        "speculation": Speculation(rule="relaxed", relaxed_topk=6, relaxed_delta=4.0),
    },
}
_RELAXED = Speculation(rule="relaxed", relaxed_topk=4, relaxed_delta=20.0, thinking_only=True)
DEVICE_SAMPLES |= {
    "thinking": {"speculation": _RELAXED},
    "thinking, drawn": {"sampling": SamplingParams(temperature=4.0, seed=2), "speculation": _RELAXED},
}
HOST_DECIDES = {
    "a processor of its own": {"sampling": SamplingParams(temperature=1.0, logits_processors=(halved,), seed=1)},
    "k-ary": {"speculation": Speculation(expansion=(2, 1))},
    "drawn candidates": {
        "sampling": SamplingParams(temperature=6.0, seed=3), "speculation": Speculation(rule="specinfer"),
    },
}  # fmt: skip
OTHER_REQUESTS = DEVICE_SAMPLES | HOST_DECIDES


@pytest.fixture
def thinking(monkeypatch):
    """A tokenizer with the marks of a thinking section; the relaxed text opens one and ends it."""
    vocabulary = {**byte_tokenizer().get_vocab(), "<think>": 18, "</think>": 84}
    monkeypatch.setattr(type(byte_tokenizer()), "get_vocab", lambda self: vocabulary)


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("name", OTHER_REQUESTS)
def test_other_requests_give_what_they_give_on_a_cpu(pair, monkeypatch, name):
    """The same coins by position, so the same tokens, and the same cache behind them; with or without trees."""
    if name in DEVICE_SAMPLES:
        refuse_waiting(monkeypatch)
    options, found, eos = OTHER_REQUESTS[name], {}, ends_of(name)
    for backend in ("native", "cudagraph"):
        decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend=backend, eos=eos)
        found[backend] = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, **options)
        plain = decoder.generate(PROMPT, max_new_tokens=5)
        assert plain.tokens == pair.reference(PROMPT, 5)  # chosen by the request's own parameters
    native, captured = found.values()

    assert ("_host" in vars(decoder)) == (name in HOST_DECIDES)
    assert captured.tokens == native.tokens
    assert len(set(captured.tokens)) > 5
    # On a CPU, drafts that a constraint forbids are dropped before the tree is pruned.
    assert captured.metrics.iterations - native.metrics.iterations in (range(3) if "constraint" in name else (0,))
    assert captured.metrics.decoding == native.metrics.decoding
    assert_equal_logprobs(captured.logprobs, native.logprobs)
    target = decoder.assembly.engine.target
    again = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, **{"speculation": False, **options})
    assert again.tokens == native.tokens
    if "speculation" not in options:
        assert captured.metrics.iterations < again.metrics.iterations == len(again.tokens) - 1
    text = [*PROMPT, *captured.tokens]
    expected, length = cache_rows(pair.plain_target, text), min(target.length, len(text) - 1)
    for ours, theirs in zip(target.runner.cache.tensors(), expected, strict=True):
        torch.testing.assert_close(ours[:, :length], theirs[:, :length], atol=1e-4, rtol=1e-4)


def assert_equal_logprobs(ours, theirs):
    """Of the chosen tokens and of the alternatives; logits of 100 in float32 differ by 1e-5 from kernel to kernel."""
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or (), theirs or (), strict=True):
        assert mine.token == other.token
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]
        values = [mine.logprob, *(value for _, value in mine.top)]
        assert values == pytest.approx([other.logprob, *(value for _, value in other.top)], rel=1e-5, abs=1e-4)


def count_calls(monkeypatch):
    """Launches of captures and transfers to the host from now on, by class."""
    calls = Counter()

    def counting(name, original):
        def counted(self, *arguments):
            calls[name] += 1
            return original(self, *arguments)

        return counted

    for owner, name in ((Capture, "__call__"), (Readback, "begin")):
        monkeypatch.setattr(owner, name, counting(owner.__name__, getattr(owner, name)))
    return calls


def test_a_pass_that_the_host_decides_is_one_launch(pair):
    """And one more where accepted rows have to be moved."""
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend="cudagraph")
    sampling = SamplingParams(temperature=1.0, seed=1, logits_processors=(halved,))
    decoder.generate(PROMPT, max_new_tokens=5, sampling=sampling)
    recorded = decoder.assembly.target.recorder.num_recorded
    generation = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, sampling=sampling)

    assert decoder.assembly.target.recorder.num_recorded - recorded <= 4  # drafts and heads of the first request
    assert generation.metrics.aal > 1.5


@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "seed": 1, "logprobs": 1}], ids=["best", "drawn"])
def test_a_grammar_that_ends_before_the_least_length_leaves_no_token(pair, sampling):
    """Without the check the first token of the vocabulary follows."""
    drawn = SamplingParams(constraint=Constraint("regex", "a"), min_new_tokens=5, **sampling)
    for policy in (PLAIN_POLICY, FixedPolicy(TreeShape(4, 3, 8))):
        decoder = pair.decoder(policy, SMALL, backend="cudagraph", eos=[0])
        with pytest.raises(YggdrasilError, match="no token may follow"):
            decoder.generate(PROMPT, max_new_tokens=9, sampling=drawn)


def test_a_grammar_may_end_with_the_text(pair):
    """Drafts continue after ``max_new_tokens``, where the grammar allows no token; plain decoding never asks there."""
    text = pair.decoder(PLAIN_POLICY).generate(PROMPT, max_new_tokens=9).text
    pattern = Constraint("regex", "".join(f"[{each}]" if each not in "^]\\-" else f"\\{each}" for each in text))
    drawn = SamplingParams(constraint=pattern, min_new_tokens=30)
    expected = pair.reference(PROMPT, 9)
    drafter = OracleDrafter([*PROMPT, *pair.reference(PROMPT, 20)])
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), SMALL, drafter=drafter, backend="cudagraph", eos=[0])
    for count in range(1, 10):
        assert decoder.generate(PROMPT, max_new_tokens=count, sampling=drawn).tokens == expected[:count]
    with pytest.raises(YggdrasilError, match="no token may follow"):
        decoder.generate(PROMPT, max_new_tokens=10, sampling=drawn)
    assert decoder.generate(PROMPT, max_new_tokens=12).tokens == pair.reference(PROMPT, 12)


def test_no_request_is_prepared_for_the_host_while_another_runs(pair):
    """The first one's passes are recorded, which overwrites the cache."""
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), SMALL, backend="cudagraph")
    running = decoder.start(PROMPT, max_new_tokens=20)
    pieces = iter(running)
    next(pieces)
    on_host = SamplingParams(logits_processors=(halved,))
    with pytest.raises(YggdrasilError, match="this thread's own request is under way"):
        decoder.start(TEXT[:9], max_new_tokens=4, sampling=on_host)
    list(pieces)
    assert running.result().tokens == pair.reference(PROMPT, 20)
    assert decoder.generate(PROMPT, max_new_tokens=8, sampling=on_host).tokens == pair.reference(PROMPT, 8)


def test_parity_is_refused(pair):
    decoder = pair.decoder(PLAIN_POLICY, backend="cudagraph")
    with pytest.raises(YggdrasilError, match="captured steps"):
        measure_parity(decoder.assembly, [ProbeText("text", PROMPT)], 3)


def test_a_target_of_captured_steps_refuses_what_it_cannot_tell(pair):
    engine = pair.decoder(PLAIN_POLICY, backend="cudagraph").assembly.engine
    with pytest.raises(YggdrasilError, match="take a plan with accept=device"):
        engine.target.accept_on_host((), 8, engine.tree)


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


def test_recording_ahead_changes_no_token_and_moves_no_buffer(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 4, 16)), backend="cudagraph")
    before = addresses(decoder)
    decoder.assembly.complete()
    recorded = decoder.assembly.target.recorder.num_recorded
    for prompt in (PROMPT, TEXT[30:41]):
        assert decoder.generate(prompt, max_new_tokens=30).tokens == pair.reference(prompt, 30)

    assert decoder.assembly.target.recorder.num_recorded == recorded
    assert addresses(decoder) == before


def test_masks_of_a_grammar_are_written_while_the_pass_runs(pair, monkeypatch):
    events = []

    def noting(owner, name):
        function = getattr(owner, name)

        def noted(self, *given):
            events.append(name)
            return function(self, *given)

        monkeypatch.setattr(owner, name, noted)

    for name in ("_rank", "_pass", "_accept"):
        noting(SampledCaptures, name)
    noting(CapturedTarget, "_write_masks")
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), backend="cudagraph", eos=ends_of("a constraint"))
    decoder.generate(PROMPT, max_new_tokens=2, **DEVICE_SAMPLES["a constraint"])
    events.clear()
    generation = decoder.generate(PROMPT, max_new_tokens=12, **DEVICE_SAMPLES["a constraint"])

    first, *passes = events  # the first token comes from the prompt's logits
    assert first == "_write_masks"
    assert passes == ["_rank", "_pass", "_write_masks", "_accept"] * generation.metrics.iterations


PREPARED = {
    "drawn": {"sampling": SamplingParams(temperature=5.0, seed=2)},
    "drawn among few": {"sampling": SamplingParams(temperature=8.0, top_k=5, top_p=0.9, seed=1)},
    "a lossy rule": DEVICE_SAMPLES["relaxed"],
    "decided on the host": HOST_DECIDES["a processor of its own"],
}


@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_kind_of_request_defines_and_captures_nothing(pair, monkeypatch, name):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), SMALL, backend="cudagraph")
    decoder.assembly.complete()
    decoder.prepare_sampling(**{"sampling": SamplingParams(), **PREPARED[name]})
    defined, late = list(decoder.assembly.target.defined), []
    launch = Capture.__call__

    def noted(self):
        late.extend([] if self.is_prepared else [self])
        return launch(self)

    monkeypatch.setattr(Capture, "__call__", noted)
    decoder.generate(PROMPT, max_new_tokens=8, **PREPARED[name])

    assert late == []
    assert list(decoder.assembly.target.defined) == defined
