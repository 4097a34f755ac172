"""Every schedule gives the tokens of transformers' greedy decoding, whoever runs it and whatever is delayed."""

import random
from dataclasses import replace
from functools import partial

import pytest
from drafters.example_drafter import LastFollowerDrafter
from threaded_executor import ThreadedExecutor
from tiny_pair import SHAPES, TEXT

from yggdrasil.engine.trace import InOrderExecutor
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.scheduling.stages import NAMED_VARIANTS, Schedule, all_variants
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

PROMPT = TEXT[:20]
EVERY = [Schedule.of(variants).labels for variants in all_variants()]
SHAPE_CYCLE = (
    TreeShape(2, 3, 8),
    TreeShape(1, 4, 4),
    PLAIN_STEP,
    TreeShape(4, 4, 16),
    TreeShape(4, 2, 1),
    TreeShape(1, 1, 2),
)


class CyclingPolicy(FixedPolicy):
    """Another shape every time: narrow, wide, none, drafted for nothing."""

    def __init__(self):
        super().__init__(PLAIN_STEP)
        self._count = 0

    def choose(self, context, model_free=None, features=None):
        if features is None:
            self._count += 1
        elif SHAPE_CYCLE[self._count % len(SHAPE_CYCLE)].depth:
            assert features.hidden().shape == (64,)
        shape = SHAPE_CYCLE[self._count % len(SHAPE_CYCLE)]
        if features is None and shape.depth:
            return None
        return Decision(shape, is_drafting=shape.depth > 0)

    def prune(self, decision, expected, context):
        return decision._replace(shape=next(other for other in SHAPE_CYCLE if other[:2] == decision.shape[:2]))


@pytest.fixture(scope="module")
def decoder(pair):
    return pair.decoder(CyclingPolicy(), SHAPES, other_stages=EVERY)


@pytest.fixture(scope="module")
def perfect_decoder(perfect_pair):
    return perfect_pair.decoder(FixedPolicy(TreeShape(2, 4, 8)), SHAPES, other_stages=EVERY, backend="eager")


@pytest.mark.parametrize("stages", EVERY, ids="-".join)
def test_every_schedule_gives_the_same_tokens(pair, decoder, stages):
    decoder.assembly.engine.use_schedule(stages)
    decoder.policy = CyclingPolicy()

    assert decoder.generate(PROMPT, max_new_tokens=18).tokens == pair.reference(PROMPT, 18)


@pytest.mark.parametrize("name", NAMED_VARIANTS)
def test_long_accepted_paths_end_in_leaves_that_the_drafter_has_yet_to_read(perfect_pair, perfect_decoder, name):
    perfect_decoder.assembly.engine.use_schedule(Schedule.of(NAMED_VARIANTS[name]).labels)
    generation = perfect_decoder.generate(PROMPT, max_new_tokens=41)

    assert generation.tokens == perfect_pair.reference(PROMPT, 41)
    # A row that the drafter lacks or keeps in the wrong place makes a perfect drafter guess wrong.
    assert generation.metrics.iterations == 8


# What is delayed: each stage alone, and all at random.
DELAYS = ("head_draft", "tail_draft", "commit", "accept", "depth_prediction", "bookkeeping")


@pytest.mark.parametrize("name", [*NAMED_VARIANTS, "overlapped and late"])
def test_threads_that_honour_declared_dependencies_alone_decode_the_same(perfect_pair, perfect_decoder, name):
    """The same tokens in as many iterations: what a drafter read too early makes it guess wrong, not the target."""
    late = {"bookkeeping": "overlapped", "depth_prediction": "late", "head_draft": "ahead", "tail_draft": "ahead"}
    engine, source = perfect_decoder.assembly.engine, random.Random(7)
    engine.use_schedule(Schedule.of(NAMED_VARIANTS.get(name, late)).labels)
    in_order = perfect_decoder.generate(PROMPT, max_new_tokens=16)
    assert in_order.tokens == perfect_pair.reference(PROMPT, 16)
    try:
        for slow in (*DELAYS, None):
            engine.executor = ThreadedExecutor(partial(delay, source, slow))
            delayed = perfect_decoder.generate(PROMPT, max_new_tokens=16)
            assert delayed.tokens == in_order.tokens, slow
            assert delayed.metrics.iterations == in_order.metrics.iterations, slow
    finally:
        engine.executor = InOrderExecutor()


def delay(source, slow, stage, seconds=0.004):
    return source.random() * seconds if slow is None else seconds * (stage == slow)


def needed_pairs(schedule):
    """Every (stage, predecessor) that no other pair implies; a superset tail is no work: it neither waits nor is
    waited for."""
    befores = schedule.predecessors
    behind = {}
    for stage in schedule.stages:  # what each stage waits for, directly or not
        behind[stage.name] = befores[stage.name].union(*(behind[before] for before in befores[stage.name]))
    return [
        (stage, before)
        for stage in befores
        for before in sorted(befores[stage])
        if not any(before in behind[other] for other in befores[stage])
        and not ("tail_draft" in (stage, before) and schedule.variants["tail_draft"] == "superset")
    ]


def signature(decoder, monkeypatch):
    """What a request gave: its tokens, its iterations, and how many head drafts no stage had run."""
    drafter, heads = decoder.assembly.engine.drafter, []
    with monkeypatch.context() as patch:
        head = drafter.head
        patch.setattr(drafter, "head", lambda: heads.append(head()))
        try:
            generation = decoder.generate(PROMPT, max_new_tokens=31)
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            return type(error).__name__
    return generation.tokens, generation.metrics.iterations, len(heads)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in NAMED_VARIANTS), "default", "overlapped and late"]
)
def test_every_dependency_that_is_forgotten_shows(perfect_pair, perfect_decoder, name, monkeypatch):
    """The stress test can fail: whichever one a stage does not wait for, something else comes out."""
    other = {"bookkeeping": "overlapped", "depth_prediction": "late", "head_draft": "ahead", "tail_draft": "ahead"}
    engine = perfect_decoder.assembly.engine
    engine.use_schedule(Schedule.of({"default": {}, **NAMED_VARIANTS}.get(name, other)).labels)
    expected = signature(perfect_decoder, monkeypatch)
    assert expected[0] == perfect_pair.reference(PROMPT, 31)
    unseen = []
    try:
        for pair in needed_pairs(engine.schedule):
            for _ in range(3):  # threads may run in the right order by chance
                # Another text first: rows that the same request left in the caches would be those that were forgotten.
                engine.executor = InOrderExecutor()
                perfect_decoder.generate(PROMPT[::-1], max_new_tokens=31)
                engine.executor = ThreadedExecutor(lambda _: 0.0, forgotten=[pair])
                if signature(perfect_decoder, monkeypatch) != expected:
                    break
            else:
                unseen.append(pair)
    finally:
        engine.executor = InOrderExecutor()
    assert unseen == []


def test_drafters_without_stages_take_every_schedule(pair):
    for chosen in NAMED_VARIANTS.values():
        stages = Schedule.of(chosen).labels
        decoder = pair.decoder(FixedPolicy(TreeShape(1, 2, 4)), drafter=LastFollowerDrafter(), stages=stages)

        assert decoder.generate(PROMPT, max_new_tokens=12).tokens == pair.reference(PROMPT, 12)


@pytest.mark.parametrize("bookkeeping", ["inline", "overlapped"])
@pytest.mark.parametrize("num_free", [1, 2, 5, 9])
def test_a_full_context_ends_the_text_at_its_last_place(perfect_pair, bookkeeping, num_free):
    shapes = replace(SHAPES, max_length=len(PROMPT) + num_free)
    stages = Schedule.of({"bookkeeping": bookkeeping, "depth_prediction": "late", "head_draft": "ahead"}).labels
    decoder = perfect_pair.decoder(FixedPolicy(TreeShape(2, 4, 16)), shapes, stages=stages)
    generation = decoder.generate(PROMPT, max_new_tokens=100)

    assert generation.finish_reason == "context"
    assert generation.tokens == perfect_pair.reference(PROMPT, num_free)


def test_an_end_found_late_drops_what_was_decoded_behind_it(pair, decoder):
    decoder.assembly.engine.use_schedule(Schedule.of({"bookkeeping": "overlapped"}).labels)
    decoder.policy = FixedPolicy(TreeShape(2, 3, 8))
    for limit in range(1, 9):
        generation = decoder.generate(PROMPT, max_new_tokens=limit)

        assert (generation.tokens, generation.finish_reason) == (pair.reference(PROMPT, limit), "length")
