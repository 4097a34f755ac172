"""Guesses that cost no pass, alone or in a drafted tree: the same tokens and caches by every schedule, and when."""

from itertools import pairwise

import pytest
import torch
from threaded_executor import ThreadedExecutor
from tiny_pair import SHAPES, TEXT, cache_rows

from yggdrasil.acceptance.grammar import Constraint
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.drafters import Capabilities
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.engine.trace import InOrderExecutor
from yggdrasil.policy.fixed import FixedPolicy, ModelFreePolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.scheduling.stages import Schedule, all_variants
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

LOOPING = TEXT[:6] * 5  # what follows is the model's own; the prompt alone repeats
EVERY = [Schedule.of(variants).labels for variants in all_variants()]
WIDEST, MAX_DEPTH = SHAPES.verify_widths[-1], 4


class Alternating(FixedPolicy):
    """Twice model-free drafts, then a drafted tree and a plain step, over and over."""

    wants_model_free = True

    def __init__(self):
        super().__init__(TreeShape(2, 4, 16))
        self.taken, self.drafted = [], []
        self._asked, self._others = 0, [0, 0]  # with a model-free tree or without: a schedule may decide early

    def observe(self, decision, tokens, milliseconds):
        if decision.kind == "model_free":
            self.taken.append((decision, tokens))
        elif decision.kind == "drafted":
            self.drafted.append(tokens)

    def choose(self, context, model_free=None, features=None):
        if model_free is not None:
            expected, depth = model_free
            self._asked += 1
            assert all(1.0 <= earlier <= later <= depth + 1 for earlier, later in pairwise(expected))
            if self._asked % 4 not in (0, 3) and expected[-1] > 1.0:
                return Decision(TreeShape(0, depth, (2, 8, WIDEST)[self._asked % 3]), 2.0, 1.0)
        self._others[model_free is None] += 1
        return Decision(PLAIN_STEP) if self._others[model_free is None] % 2 == 0 else self._decision


class Suggesting:
    """Stands in for counts of a text that repeats: the target's own continuation, every seventh token wrong."""

    name, capabilities = "suggestions", Capabilities()

    def __init__(self):
        self.text, self._size = [], 0  # the whole text, and what of it is certain

    def begin(self, tokens):
        self._size = len(tokens)

    def extend(self, tokens, states):
        self._size += len(tokens)

    def cost(self, budget):
        return ()

    def propose(self, tree, budget):
        places = range(self._size, min(self._size + budget.depth, len(self.text)))
        guesses = [(self.text[place] + (place % 7 == 0)) % 90 for place in places]
        tree.graft(list(range(len(guesses))), guesses, [-0.1] * len(guesses))


SUGGESTIONS = Suggesting()


@pytest.fixture(scope="module")
def decoder(pair):
    return pair.decoder(Alternating(), SHAPES, other_stages=EVERY, model_free=SUGGESTIONS)


@pytest.fixture
def suggested(pair):
    """Prompt and text whose continuation is suggested to ``decoder``."""
    prompt = TEXT[:20]
    SUGGESTIONS.text = [*prompt, *pair.reference(prompt, 60)]
    return prompt, SUGGESTIONS.text


def counting(pair, policy, **options):
    """A decoder that counts the text beside its draft model."""
    return pair.decoder(policy, model_free=default_statistics(), **options)


@pytest.mark.parametrize("stages", EVERY, ids="-".join)
def test_every_schedule_gives_the_same_tokens_and_drafter_rows(pair, decoder, suggested, stages):
    prompt, text = suggested
    engine, policy = decoder.assembly.engine, Alternating()
    decoder.policy = policy
    engine.use_schedule(stages)
    generation = decoder.generate(prompt, max_new_tokens=30)

    assert generation.tokens == text[20:50]
    assert generation.metrics.model_free_trees == len(policy.taken)
    assert 0 < generation.metrics.plain_steps < generation.metrics.iterations - generation.metrics.model_free_trees
    assert max(tokens for _, tokens in policy.taken) > MAX_DEPTH + 1
    assert max(policy.drafted) > MAX_DEPTH + 1  # more than the draft model's levels: others go on below its nodes
    drafter = engine.drafter
    read = drafter.runner.text.tokens[: drafter.runner.text.num_rows]
    assert len(read) > 30
    for ours, reference in zip(drafter.runner.cache.tensors(), cache_rows(pair.plain_drafter, read), strict=True):
        torch.testing.assert_close(ours[:, : len(read)], reference, rtol=1e-3, atol=1e-4)


def test_the_targets_rows_are_those_of_a_fresh_prefill(pair, decoder, suggested):
    prompt, text = suggested
    decoder.assembly.engine.use_schedule(EVERY[0])
    decoder.policy = Alternating()
    decoder.generate(prompt, max_new_tokens=42)
    target = decoder.assembly.engine.target

    assert target.length > 55
    rows = cache_rows(pair.plain_target, text[: target.length])
    for ours, reference in zip(target.runner.cache.tensors(), rows, strict=True):
        torch.testing.assert_close(ours[:, : target.length], reference, rtol=1e-3, atol=1e-4)


class Looking(Alternating):
    """Looks at the free tree each time, and has another one drafted."""

    def choose(self, context, model_free=None, features=None):
        return self._decision


@pytest.mark.parametrize("stages", EVERY, ids="-".join)
def test_a_look_at_free_guesses_changes_nothing_of_the_drafters(decoder, suggested, monkeypatch, stages):
    """A root that an iteration planted ahead is still there in the next one."""
    prompt, _ = suggested
    decoder.assembly.engine.use_schedule(stages)
    drafted, whole = [], SUGGESTIONS.propose
    for looks in (True, False):
        if not looks:
            monkeypatch.setattr(
                SUGGESTIONS, "propose", lambda tree, budget: None if budget.is_first else whole(tree, budget)
            )
        decoder.policy = Looking()
        decoder.generate(prompt, max_new_tokens=16)
        drafted.append(decoder.policy.drafted)

    assert drafted[0] == drafted[1]
    assert max(drafted[0]) > 1


BOOKS = [Schedule.of({"bookkeeping": variant}).labels for variant in ("inline", "overlapped")]


@pytest.mark.parametrize("stages", BOOKS, ids=["inline", "overlapped"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_no_more_is_guessed_than_may_still_be_emitted(decoder, suggested, count, stages):
    prompt, _ = suggested
    policy = Alternating()
    decoder.assembly.engine.use_schedule(stages)
    decoder.policy = policy
    generation = decoder.generate(prompt, max_new_tokens=count)

    assert len(generation.tokens) == count
    depths = [decision.shape.depth for decision, _ in policy.taken]
    assert all(depth <= count - 2 for depth in depths)  # one token is the prefill's, one the bonus
    assert depths or count == 2


def test_an_end_within_the_guesses_is_the_end(decoder, suggested):
    """Also where a stop string lies within a chain that stands; what follows is as if nothing had."""
    prompt, text = suggested
    decoder.assembly.engine.use_schedule(EVERY[0])
    decoder.policy, whole = Alternating(), decoder.generate(prompt, max_new_tokens=42)
    for end in (24, 26, 30, 41):
        decoder.policy = Alternating()
        place = len(decoder.tokenizer.decode(text[20:end], skip_special_tokens=True))
        stop = whole.text[place : place + 2]
        generation = decoder.generate(prompt, max_new_tokens=42, stop=[stop])

        assert generation.finish_reason == "stop"
        assert generation.text == whole.text[: whole.text.index(stop)]


def test_a_cancelled_request_leaves_nothing_behind(decoder, suggested):
    prompt, text = suggested
    decoder.assembly.engine.use_schedule(EVERY[0])
    decoder.policy = Alternating()
    for _, _ in zip(decoder.start(prompt, max_new_tokens=42), range(3), strict=False):
        pass

    assert decoder.generate(prompt, max_new_tokens=42).tokens == text[20:62]


def test_a_context_that_is_nearly_full_holds_no_more(pair):
    """As many tokens as plain decoding gives, whatever the text suggests."""
    decoder = counting(pair, Alternating())
    limit = decoder.assembly.engine.max_length
    prompt = (LOOPING * limit)[: limit - 12]
    plain = decoder.generate(prompt, max_new_tokens=50, speculation=False)
    generation = decoder.generate(prompt, max_new_tokens=50)

    assert plain.finish_reason == generation.finish_reason == "context"
    assert generation.tokens == plain.tokens
    assert generation.metrics.model_free_trees > 0


def test_threads_decode_the_same(pair, decoder, suggested):
    prompt, text = suggested
    engine = decoder.assembly.engine
    try:
        for stages in (EVERY[0], EVERY[-1]):
            engine.use_schedule(stages)
            engine.executor, decoder.policy = ThreadedExecutor(lambda _: 0.0), Alternating()
            generation = decoder.generate(prompt, max_new_tokens=42)

            assert generation.tokens == text[20:62]
            assert generation.metrics.model_free_trees > 0
    finally:
        engine.executor = InOrderExecutor()


SPECULATIONS = {
    "strict": (Speculation(exactness="strict", tolerance=0.5), True),
    "fixed-width": (Speculation(exactness="fixed-width", fixed_width=8), False),
    "relaxed": (Speculation(rule="relaxed"), False),
    "typical": (Speculation(rule="typical"), False),
}


@pytest.mark.parametrize(("speculation", "is_model_free"), SPECULATIONS.values(), ids=SPECULATIONS)
def test_only_exact_passes_of_any_width_have_free_guesses(pair, speculation, is_model_free):
    """A lossy rule would keep copied tokens that are likely enough; one width has no price that the plan knows."""
    generation = counting(pair, Alternating()).generate(LOOPING, max_new_tokens=40, speculation=speculation)

    assert (generation.metrics.model_free_trees > 0) == is_model_free
    if speculation.is_lossless:
        assert generation.tokens == pair.reference(LOOPING, 40)


def test_a_rule_that_finds_nothing_to_accept_says_so(pair):
    decoder = pair.decoder(ModelFreePolicy(4), drafter=None, model_free=DrafterGroup([NGramDrafter()]))
    with pytest.warns(UserWarning, match="the rule typical accepts drafts of a draft model or head alone"):
        decoder.generate(LOOPING, max_new_tokens=4, speculation=Speculation(rule="typical"))


def test_under_a_grammar_guesses_are_what_it_forces_or_allows(pair):
    """Alone, and never what the text repeats if that is not allowed."""
    pytest.importorskip("llguidance")
    sampling = SamplingParams(constraint=Constraint("regex", "[ab]{12}(stuvwxyz){3}"))
    decoder, guided, free, plain = counting(pair, Alternating(), eos=[0]), [], [], []
    generation = decoder.generate(LOOPING, max_new_tokens=60, sampling=sampling, watch=guided.append)
    alone = decoder.generate(LOOPING, max_new_tokens=60, sampling=sampling, speculation=False, watch=plain.append)
    decoder.generate(LOOPING, max_new_tokens=24, watch=free.append)

    assert generation.tokens == alone.tokens
    assert len(guided) < len(plain)
    assert max(len(tree.accepted) for tree in guided if tree.drafter == "text, guided") > 5  # what is forced
    assert {tree.drafter for tree in free} > {"none", "text"}
    assert any(tree.drafter.endswith(", guided") for tree in guided)
    letters = set("abstuvwxyz")
    for tree in guided:
        guesses = decoder.tokenizer.decode([tree.tokens[node] for node in tree.verified[1:]])
        assert set(guesses) <= letters


@pytest.mark.parametrize("backend", ["native", "cudagraph"])
def test_counts_of_the_text_follow_its_loop(pair, backend):
    """No stand-in: the outcome is transformers' own. On a GPU the order of the nodes is the device's, by scores."""
    policy = Alternating()
    generation = counting(pair, policy, backend=backend).generate(LOOPING, max_new_tokens=40)

    assert generation.tokens == pair.reference(LOOPING, 40)
    assert max(tokens for _, tokens in policy.taken) > 1


def test_where_nothing_is_guessed_there_is_no_free_tree(pair, suggested):
    """Even if a pass of two were cheaper than a plain step."""
    prompt, text = suggested
    SUGGESTIONS.text = text[:24]
    policy = Alternating()
    generation = pair.decoder(policy, model_free=SUGGESTIONS).generate(prompt, max_new_tokens=30)

    assert generation.tokens == text[20:50]
    assert all(decision.shape.depth > 0 for decision, _ in policy.taken)
    assert generation.metrics.model_free_trees == len(policy.taken) < 3


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampling_gives_the_same_draws(pair, temperature):
    sampling = SamplingParams(temperature=temperature, seed=3)
    policy = Alternating()
    decoder = counting(pair, policy)
    alone = decoder.generate(LOOPING, max_new_tokens=40, sampling=sampling, speculation=False)
    generation = decoder.generate(LOOPING, max_new_tokens=40, sampling=sampling)

    assert generation.tokens == alone.tokens
    assert generation.metrics.model_free_trees > 0
    assert alone.metrics.model_free_trees == 0
