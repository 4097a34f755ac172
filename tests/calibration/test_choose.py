"""From a recording to a choice, and what stages cost with and without a drafter; every candidate's figures are kept."""

import sys
from dataclasses import replace
from itertools import chain, count, repeat

import pytest
from integrity import check_traces
from tiny_pair import SHAPES, TEXT, byte_tokenizer, make_pair

from yggdrasil.calibration.choose import Gain, _error_of_ratio, choose
from yggdrasil.calibration.measurement import stages
from yggdrasil.calibration.measurement.stages import READ, costs_from, measure_stages, useful_verify_widths
from yggdrasil.calibration.record import concatenate, record_document
from yggdrasil.calibration.replay import recorded_documents
from yggdrasil.drafters import NGramDrafter, NGramOptions
from yggdrasil.drafters.registry import ngram_options
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.bundle import Learned
from yggdrasil.predictor.repetition import repeated_share
from yggdrasil.profiling.tally import Totals
from yggdrasil.scheduling.plan import Expectation
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

COSTS = StepCosts(0.1, {1: 0.1, 2: 0.11, 4: 0.12}, {w: 1 + 0.02 * w for w in SHAPES.verify_widths}, 0.05, 1.05)


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def recording(pair, **options):
    """Traces of four documents; the prompts repeat themselves, so that n-grams find something."""
    decoder = pair.decoder(PLAIN_POLICY, **options)
    parts = []
    for document in range(4):
        prompt = list(TEXT[document : document + 12]) * 2
        tokens = decoder.generate(prompt, max_new_tokens=16).tokens
        parts.append(record_document(decoder.assembly, decoder.assembly.engine.drafter, prompt, tokens, document))
    return concatenate(parts)


def test_a_draft_model_is_chosen_for_with_and_without_its_first_guesses(pair, tmp_path):
    traces = recording(pair)
    check_traces(traces)
    choice = choose(traces, AcceptanceCalibration.identity(), COSTS)
    policies = [choice.predicted.policy, *(expectation.policy for expectation in choice.rejected)]

    assert set(choice.reports) == {"predictor", "head"}
    assert {"depth from predictor", "depth from head", "depth from mean", "plain decoding"} == set(policies)
    assert policies[0] == f"depth from {choice.depth_from}"

    choice.learned.save(tmp_path)
    loaded = Learned.load(tmp_path)
    assert loaded.reads == choice.learned.reads
    sizes = (traces.hidden.shape[1], traces.repetition.shape[1], traces.head.shape[1])
    assert loaded.reads in {sizes, (*sizes[:2], 0)}
    assert loaded.added_tokens == choice.learned.added_tokens > 0.0
    replace(loaded, added_tokens=None).save(tmp_path)  # as of an earlier calibration
    assert Learned.load(tmp_path).added_tokens is None


def test_a_prediction_says_how_much_of_its_text_repeats_itself(pair):
    """Of the one document that is held out, behind its prompt."""
    traces, shares = recording(pair), []
    prompts = {number: document.answer for number, document in enumerate(recorded_documents(traces, {}))}  # all copied
    for known in ({}, prompts):
        choice = choose(traces, AcceptanceCalibration.identity(), COSTS, prompts=known)
        each = {round(repeated_share([document]), 3) for document in recorded_documents(traces, known)}
        assert choice.predicted.repeats in each
        assert {expected.repeats for expected in choice.rejected} == {None}
        shares.append(choice.predicted.repeats)
    assert shares[0] < shares[1]


@pytest.mark.parametrize(
    ("predictor_ms", "head_ms", "chosen"),
    [(99.0, 100.0, "mean"), (97.0, 98.5, "predictor"), (98.5, 97.0, "head"), (101.0, 102.0, "mean")],
)
def test_a_predictor_must_pay_for_the_time_it_takes(pair, monkeypatch, predictor_ms, head_ms, chosen):
    """The simulation does not see that time: 2 % are asked for."""
    times = chain((100.0, predictor_ms, head_ms), repeat(100.0))
    module = sys.modules[choose.__module__]
    monkeypatch.setattr(module, "replay", lambda *_, **__: Totals(100, 50, next(times) * 100, {}))

    assert choose(recording(pair), AcceptanceCalibration.identity(), COSTS).depth_from == chosen


@pytest.mark.parametrize(("draft_ms", "pays"), [(1e-4, True), (20.0, False)])
def test_a_drafter_pays_by_what_others_guess_without_it(pair, draft_ms, pays):
    """Plain steps are not its rival here: the same trees without it are, on the same documents."""
    costs = replace(COSTS, head_ms=draft_ms, draft_ms=dict.fromkeys(COSTS.draft_ms, draft_ms))
    choice = choose(recording(pair), AcceptanceCalibration.identity(), costs, default_statistics(), {})
    without = [each for each in choice.rejected if each.policy == "text alone"]

    assert choice.gain.pays == pays
    assert choice.gain.without.policy == "text alone"
    assert len(without) == 1
    if not pays:
        assert choice.gain.drafting.tpot_ms == pytest.approx(choice.gain.without.tpot_ms, rel=0.02)
    assert choose(recording(pair), AcceptanceCalibration.identity(), costs).gain is None


def test_what_a_drafter_gains_is_of_all_documents(pair, monkeypatch):
    module = sys.modules[choose.__module__]
    played = []

    def play(documents, policy, **options):
        played.append((len(documents), options["trees"].traces.num_positions))
        return module_replay(documents, policy, **options)

    module_replay = module.replay
    monkeypatch.setattr(module, "replay", play)
    traces = recording(pair)
    choose(traces, AcceptanceCalibration.identity(), COSTS, default_statistics(), {})

    assert played.count((4, traces.num_positions)) == 2
    assert max(played) == (4, traces.num_positions)
    assert len(played) > 4


def test_policies_are_played_with_what_drafting_adds(pair, monkeypatch):
    module, lifts = sys.modules[choose.__module__], []

    class Noted(module.ObjectivePolicy):
        def __init__(self, *arguments, added_tokens, **options):
            lifts.append(added_tokens)
            super().__init__(*arguments, added_tokens=added_tokens, **options)

    monkeypatch.setattr(module, "ObjectivePolicy", Noted)
    choice = choose(recording(pair), AcceptanceCalibration.identity(), COSTS, default_statistics(), {})
    assert set(lifts) == {choice.learned.added_tokens}


def test_three_percent_are_asked_of_a_drafter():
    without = Expectation("text alone", 2.0, 1.0, 1.5)

    assert [Gain(replace(without, tpot_ms=ms), without).pays for ms in (0.96, 0.98, 1.1)] == [True, False, False]


@pytest.mark.parametrize(
    ("over", "under", "error"),
    [((1.0, 3.0), (2.0, 2.0), 0.5), ((3.0, 6.0), (1.0, 2.0), 0.0), ((4.0,), (2.0,), 0.0)],
)
def test_the_error_of_a_ratio_by_hand(over, under, error):
    """1 and 3 are each off by 1 from 2 and 2: 2 ** .5 a document, of two, of 4 in all. One document tells of none."""
    assert _error_of_ratio(over, under) == pytest.approx(error)


def test_where_documents_differ_more_is_asked_of_a_drafter(pair, monkeypatch):
    module, results = sys.modules[choose.__module__], []
    module_replay = module.replay
    monkeypatch.setattr(module, "replay", lambda *a, **k: results.append(module_replay(*a, **k)) or results[-1])
    gain = choose(recording(pair), AcceptanceCalibration.identity(), COSTS, default_statistics(), {}).gain
    drafting, without = (each for each in results if each.tokens == max(result.tokens for result in results))

    assert len(drafting.document_ms) == 4
    assert sum(drafting.document_ms) == drafting.milliseconds
    assert gain.error == _error_of_ratio(drafting.document_ms, without.document_ms) > 0.0
    assert replace_times(gain, 0.96 - gain.error).pays
    assert not replace_times(gain, 0.98 - gain.error).pays


def replace_times(gain, ratio):
    return gain._replace(drafting=replace(gain.without, tpot_ms=ratio * gain.without.tpot_ms))


def beside_each_other(frame):
    """Verify widths by streak of plain steps, in order."""
    return [set(part["verify_width"]) for _, part in frame[frame["stage"] == "iteration"].groupby("cycle")]


def test_free_trees_are_measured_between_drafted_ones(pair):
    decoder = pair.decoder(PLAIN_POLICY, model_free=default_statistics())
    frame = measure_stages(
        decoder.assembly, lambda: TextStream(byte_tokenizer(), frozenset(), 1 << 30, ()), list(TEXT[:40]), 2,
        lambda fraction: None,
    )  # fmt: skip
    wide = {width for width in SHAPES.verify_widths if width > 1}
    for is_free in (True, False):
        trees = frame[(frame["depth"] > 0) & ((frame["width"] == 0) == is_free)]
        assert set(trees["verify_width"]) == wide
    assert beside_each_other(frame) == [{1, width} for width in sorted(wide)]
    costs = costs_from(frame, SHAPES)[0]

    assert not decoder.assembly.engine.target.text.tokens, "what was timed last is no text to go on from"
    assert costs.model_free_overhead_ms is not None
    assert costs.head_ms > 0.0


def test_what_a_drafter_takes_to_read_a_text_is_measured(pair, monkeypatch):
    """By a clock that its head moves on by a millisecond for each token that it has been told since the one before."""
    decoder, prompt, unread, now = pair.decoder(PLAIN_POLICY), list(TEXT[:40]), [], count()
    drafter = decoder.assembly.engine.drafter
    extend, head, passed = drafter.extend, drafter._draft_head, []

    def read():
        passed.append(1_000_000 * sum(unread))
        unread.clear()
        head()

    monkeypatch.setattr(drafter, "extend", lambda tokens, hidden: unread.append(len(tokens)) or extend(tokens, hidden))
    monkeypatch.setattr(drafter, "_draft_head", read)
    monkeypatch.setattr("yggdrasil.engine.trace.perf_counter_ns", lambda: next(now) + sum(passed))
    frame = measure_stages(
        decoder.assembly, lambda: TextStream(byte_tokenizer(), frozenset(), 1 << 30, ()), prompt, 2, lambda _: None
    )
    reading = frame[frame["stage"] == "reading"]["ms"]

    assert len(reading) == READ
    assert reading.between((len(prompt) - 4) / len(prompt), (len(prompt) + 4) / len(prompt)).all()


@pytest.mark.parametrize("free", [None, NGramDrafter(), default_statistics()], ids=["none", "n-gram", "text"])
def test_stages_without_a_drafter_have_costs(pair, free):
    """Free trees are measured as they are decoded; where the text says nothing their pass is as wide."""
    widths = SHAPES.verify_widths if free else (1,)
    shapes = replace(SHAPES, draft_widths=(), verify_widths=widths)
    decoder = pair.decoder(PLAIN_POLICY, shapes, drafter=None, model_free=free)
    frame = measure_stages(
        decoder.assembly, lambda: TextStream(byte_tokenizer(), frozenset(), 1 << 30, ()), list(range(1, 90)), 2,
        lambda fraction: None,
    )  # fmt: skip
    costs = costs_from(frame, shapes)[0].steps()

    assert costs.draft_ms == {}
    assert costs.head_ms == 0.0
    assert costs.overhead_ms > 0.0
    assert set(costs.verify_ms) == set(widths) == set(useful_verify_widths(frame, shapes)) | set(widths)
    measured = frame[(frame["stage"] == "verify") & (frame["depth"] > 0)].groupby("verify_width").size()
    assert set(measured.index) == {width for width in widths if width > 1}
    assert measured.min() >= 2 if free else measured.empty


def test_n_gram_options_of_the_command_line():
    given = ngram_options("max_draft_len=4, is_public_pool=true")
    assert given == NGramOptions(max_draft_len=4, is_public_pool=True)
    assert ngram_options("") == NGramOptions()
    for wrong, named in (("max_draft_len", "name=value"), ("length=4", "length"), ("max_draft_len=0", "at least 1")):
        with pytest.raises(YggdrasilError, match=named):
            ngram_options(wrong)


def test_stages_are_measured_behind_their_text_and_not_far_behind(pair, monkeypatch):
    """A request that went on to the context's end would tell of that.

    However requests begin and end, plain steps stand beside the trees of one width.
    """
    monkeypatch.setattr(stages, "SPAN", 12)
    seen, choose = [], stages.ShapeCycle.choose
    monkeypatch.setattr(
        stages.ShapeCycle,
        "choose",
        lambda cycle, *asked: seen.append((asked[0], choose(cycle, *asked))) or seen[-1][1],
    )
    decoder = pair.decoder(PLAIN_POLICY)
    frame = measure_stages(
        decoder.assembly, lambda: TextStream(byte_tokenizer(), frozenset(), 1 << 30, ()), list(TEXT[:30]), 2,
        lambda fraction: None,
    )  # fmt: skip

    contexts = [context for context, _ in seen]
    assert 30 <= min(contexts) <= max(contexts) < 30 + 12 + SHAPES.max_depth + 1
    assert contexts.count(30) > 2  # requests that began again
    assert set(frame["verify_width"]) == set(SHAPES.verify_widths)
    assert beside_each_other(frame) == [{1, width} for width in SHAPES.verify_widths[1:]]


def test_narrow_passes_are_measured_before_wide_ones_and_all_behind_plain_steps():
    shapes = [TreeShape(4, 2, 64), TreeShape(4, 2, 8), TreeShape(4, 8, 8), TreeShape(4, 8, 64)]
    cycle, order = stages.ShapeCycle(shapes, seed=0), []
    for _ in range(20 * cycle.length):
        order.append(cycle.choose(30).shape)

    streaks = order[:: stages.STREAK]
    assert order == [shape for shape in streaks for _ in range(stages.STREAK)]
    cycles = [streaks[i : i + 6] for i in range(0, len(streaks), 6)]
    assert cycle.length == 6 * stages.STREAK
    for each in cycles:
        assert sorted(each) == sorted([*shapes, PLAIN_STEP, PLAIN_STEP])
        assert [shape.verify_width for shape in each] == [1, 8, 8, 1, 64, 64]
    assert len({tuple(each) for each in cycles}) == 4  # those of one width take turns
