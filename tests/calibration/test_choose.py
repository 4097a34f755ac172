"""From a recording to a choice, and what stages cost with and without a drafter; every candidate's figures are kept."""

import sys
from dataclasses import replace
from itertools import chain, count, repeat
from types import SimpleNamespace

import pytest
from integrity import check_traces
from tiny_pair import SHAPES, TEXT, byte_tokenizer, make_pair

from yggdrasil.calibration import pipeline
from yggdrasil.calibration.choose import Gain, _error_of_ratio, choose
from yggdrasil.calibration.measurement.costs import costs_from, useful_verify_widths
from yggdrasil.calibration.measurement.iterations import READ, WARM_UP, measured_policies
from yggdrasil.calibration.record import concatenate, record_document
from yggdrasil.calibration.replay import recorded_documents
from yggdrasil.drafters import NGramDrafter, NGramOptions
from yggdrasil.drafters.registry import ngram_options
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.engine.iteration import ModelFreeDrafts
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.predictor.bundle import Learned
from yggdrasil.predictor.repetition import repeated_share
from yggdrasil.profiling.tally import Totals
from yggdrasil.scheduling.plan import Expectation

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
    ("over", "under", "error"), [((1.0, 3.0), (2.0, 2.0), 0.5), ((3.0, 6.0), (1.0, 2.0), 0.0), ((4.0,), (2.0,), 0.0)]
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


def measured(decoder, prompt, samples=4):
    """Samples of a calibration with so many iterations of a kind."""
    effort = SimpleNamespace(effort=SimpleNamespace(samples=samples))
    job = SimpleNamespace(assembly=decoder.assembly, tokenizer=byte_tokenizer(), settings=effort)
    return pipeline._samples_at(job, prompt, lambda fraction: None)


def test_every_kind_of_iteration_is_timed_in_every_turn(pair):
    decoder = pair.decoder(PLAIN_POLICY, model_free=default_statistics())
    samples = measured(decoder, list(TEXT[:40]) * 2)
    for turn in range(pipeline.ITERATION_TURNS):
        timed = {each[2:5] for each in samples if each.cycle == turn and each.stage == "verify"}
        assert {shape[0] for shape in timed} == {0, *SHAPES.draft_widths}
        assert sum(each.stage == "plain" and each.cycle == turn and not each.depth for each in samples) == 1
    (costs,) = costs_from(samples, SHAPES)

    assert not decoder.assembly.engine.target.text.tokens, "what was timed last is no text to go on from"
    assert costs.model_free_overhead_ms is not None
    assert costs.head_ms > 0.0
    assert set(costs.draft_ms) == set(SHAPES.draft_widths)


def test_model_free_drafts_extend_measured_trees_as_far_as_they_are_verified(pair, monkeypatch):
    filled, fill = [], ModelFreeDrafts.fill
    monkeypatch.setattr(ModelFreeDrafts, "fill", lambda drafts, *given: filled.append(fill(drafts, *given)))
    measured(pair.decoder(PLAIN_POLICY), list(TEXT[:40]))
    assert not filled
    measured(pair.decoder(PLAIN_POLICY, model_free=default_statistics()), list(TEXT[:40]))
    assert len(filled) >= pipeline.ITERATION_TURNS * len(SHAPES.draft_widths)


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
    reading = [each.ms for each in measured(decoder, prompt) if each.stage == "reading"]

    assert len(reading) == READ
    assert all((len(prompt) - 4) / len(prompt) <= ms <= (len(prompt) + 4) / len(prompt) for ms in reading)


@pytest.mark.parametrize("free", [None, NGramDrafter(), default_statistics()], ids=["none", "n-gram", "text"])
def test_a_target_without_a_drafter_has_costs(pair, free):
    widths = SHAPES.verify_widths if free else (1,)
    shapes = replace(SHAPES, draft_widths=(), verify_widths=widths)
    decoder = pair.decoder(PLAIN_POLICY, shapes, drafter=None, model_free=free)
    samples = measured(decoder, [*range(1, 45), *range(1, 45)])
    costs = costs_from(samples, shapes)[0].steps()

    assert costs.draft_ms == {}
    assert costs.head_ms == 0.0
    assert costs.overhead_ms > 0.0
    assert set(costs.verify_ms) == set(widths) == set(useful_verify_widths(samples, shapes)) | set(widths)
    trees = {each.verify_width for each in samples if each.stage == "verify" and each.depth}
    assert trees == ({widths[-1]} if free else set())


def test_a_drafter_without_a_verify_width_for_trees_is_refused(pair):
    with pytest.raises(YggdrasilError, match=r"the only verify width is 1.*--verify-widths"):
        measured_policies(pair.decoder(PLAIN_POLICY, replace(SHAPES, verify_widths=(1,))).assembly)


def test_iterations_are_timed_behind_their_text_and_not_far_behind(pair, monkeypatch):
    """A request that went on to the context's end would tell of that."""
    contexts, choose = [], FixedPolicy.choose
    monkeypatch.setattr(
        FixedPolicy, "choose", lambda policy, *asked: contexts.append(asked[0]) or choose(policy, *asked)
    )
    measured(pair.decoder(PLAIN_POLICY), list(TEXT[:30]))

    assert 30 <= min(contexts) <= max(contexts) < 30 + (WARM_UP + 1) * (SHAPES.max_depth + 1)
    assert contexts.count(30) > pipeline.ITERATION_TURNS  # requests that began again


def test_n_gram_options_of_the_command_line():
    given = ngram_options("max_draft_len=4, is_public_pool=true")
    assert given == NGramOptions(max_draft_len=4, is_public_pool=True)
    assert ngram_options("") == NGramOptions()
    for wrong, named in (("max_draft_len", "name=value"), ("length=4", "length"), ("max_draft_len=0", "at least 1")):
        with pytest.raises(YggdrasilError, match=named):
            ngram_options(wrong)
