"""Guesses that cost no pass, alone or in a drafted tree: the same tokens and caches by every schedule, and when."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_pair import SHAPES, TEXT, cache_rows

from yggdrasil.acceptance.grammar import Constraint
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.drafters import Capabilities
from yggdrasil.drafters.counts import usual_counts
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.policy import Decision, FixedPolicy
from yggdrasil.engine.promises import KeptPromises
from yggdrasil.scheduling.executors import InOrderExecutor, ThreadedExecutor
from yggdrasil.scheduling.stages import Schedule, all_variants
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape
from yggdrasil.tree.stakes import NO_STAKES
from yggdrasil.tree.step_costs import StepCosts

LOOPING = TEXT[:6] * 5  # what follows is the model's own; the prompt alone repeats
EVERY = [Schedule.of(variants).labels for variants in all_variants()]
WIDEST = SHAPES.verify_widths[-1]
VERIFY_WIDTHS, MAX_DEPTH = (1, 2, 4, 8, 16), 4


class Alternating(FixedPolicy):
    """Twice what costs no pass, then a drafted tree and a plain step, over and over."""

    wants_free = True

    def __init__(self):
        super().__init__(TreeShape(2, 4, 16))
        self.learner, self.promises, self.taken, self.drafted = self, KeptPromises(), [], []
        self._asked = self._rests = 0

    def begin(self):
        return

    def settle(self, decision, tokens, milliseconds, *, rested, pass_ms=None):
        if decision.shape.is_free:
            self.taken.append((decision, tokens))
        elif not rested:
            self.drafted.append(tokens)

    def stakes(self, context):
        return NO_STAKES

    def stakes_beside(self, shape, context):
        return NO_STAKES

    def free(self, expected, depth, context):
        self._asked += 1
        if self._asked % 4 in (0, 3) or expected[-1] == 1.0:
            return None
        assert all(1.0 <= earlier <= later <= depth + 1 for earlier, later in pairwise(expected))
        return Decision(TreeShape(0, depth, (2, 8, WIDEST)[self._asked % 3]), 2.0, 1.0)

    def rest(self, context):
        self._rests += 1
        return Decision(PLAIN_STEP) if self._rests % 2 == 0 else None


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
    return pair.decoder(Alternating(), SHAPES, other_stages=EVERY, free=SUGGESTIONS)


@pytest.fixture
def suggested(pair):
    """Prompt and text whose continuation is suggested to ``decoder``."""
    prompt = TEXT[:20]
    SUGGESTIONS.text = [*prompt, *pair.reference(prompt, 60)]
    return prompt, SUGGESTIONS.text


def counting(pair, policy, **options):
    """A decoder that counts the text beside its draft model."""
    return pair.decoder(policy, free=usual_counts(), **options)


@pytest.mark.parametrize("stages", EVERY, ids="-".join)
def test_every_schedule_gives_the_same_tokens_and_drafter_rows(pair, decoder, suggested, stages):
    prompt, text = suggested
    engine, policy = decoder.assembly.engine, Alternating()
    decoder.policy = policy
    engine.use(stages)
    generation = decoder.generate(prompt, max_new_tokens=42)

    assert generation.tokens == text[20:62]
    assert generation.metrics.free_trees == len(policy.taken)
    assert 0 < generation.metrics.plain_steps < generation.metrics.iterations - generation.metrics.free_trees
    assert max(tokens for _, tokens in policy.taken) > MAX_DEPTH + 1
    assert max(policy.drafted) > MAX_DEPTH + 1  # more than the draft model's levels: others go on below its nodes
    drafter = engine.drafter
    read = drafter.runner.text.tokens[: drafter.runner.text.num_rows]
    assert len(read) > 30
    for ours, reference in zip(drafter.runner.cache.tensors(), cache_rows(pair.plain_drafter, read), strict=True):
        torch.testing.assert_close(ours[:, : len(read)], reference, rtol=1e-3, atol=1e-4)


def test_the_targets_rows_are_those_of_a_fresh_prefill(pair, decoder, suggested):
    prompt, text = suggested
    decoder.assembly.engine.use(EVERY[0])
    decoder.policy = Alternating()
    decoder.generate(prompt, max_new_tokens=42)
    target = decoder.assembly.engine.target

    assert target.length > 55
    rows = cache_rows(pair.plain_target, text[: target.length])
    for ours, reference in zip(target.runner.cache.tensors(), rows, strict=True):
        torch.testing.assert_close(ours[:, : target.length], reference, rtol=1e-3, atol=1e-4)


class Looking(Alternating):
    """Looks at the free tree each time, and has another one drafted."""

    def free(self, expected, depth, context):
        self._asked += 1

    def rest(self, context):
        return None


@pytest.mark.parametrize("stages", EVERY, ids="-".join)
def test_a_look_at_free_guesses_changes_nothing_of_the_drafters(decoder, suggested, monkeypatch, stages):
    """A root that an iteration planted ahead is still there in the next one."""
    prompt, _ = suggested
    decoder.assembly.engine.use(stages)
    drafted, whole = [], SUGGESTIONS.propose
    for looks in (True, False):
        if not looks:
            monkeypatch.setattr(
                SUGGESTIONS, "propose", lambda tree, budget: None if budget.from_root else whole(tree, budget)
            )
        decoder.policy = Looking()
        decoder.generate(prompt, max_new_tokens=42)
        drafted.append(decoder.policy.drafted)

    assert drafted[0] == drafted[1]
    assert max(drafted[0]) > 1


BOOKS = [Schedule.of({"bookkeeping": variant}).labels for variant in ("inline", "overlapped")]


@pytest.mark.parametrize("stages", BOOKS, ids=["inline", "overlapped"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_no_more_is_guessed_than_may_still_be_emitted(decoder, suggested, count, stages):
    prompt, _ = suggested
    policy = Alternating()
    decoder.assembly.engine.use(stages)
    decoder.policy = policy
    generation = decoder.generate(prompt, max_new_tokens=count)

    assert len(generation.tokens) == count
    depths = [decision.shape.depth for decision, _ in policy.taken]
    assert all(depth <= count - 2 for depth in depths)  # one token is the prefill's, one the bonus
    assert depths or count == 2


def test_an_end_within_the_guesses_is_the_end(decoder, suggested):
    """Also where a stop string lies within a chain that stands; what follows is as if nothing had."""
    prompt, text = suggested
    decoder.assembly.engine.use(EVERY[0])
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
    decoder.assembly.engine.use(EVERY[0])
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
    assert generation.metrics.free_trees > 0


def test_threads_decode_the_same(pair, decoder, suggested):
    prompt, text = suggested
    engine = decoder.assembly.engine
    try:
        for stages in (EVERY[0], EVERY[-1]):
            engine.use(stages)
            engine.executor, decoder.policy = ThreadedExecutor(lambda _: 0.0), Alternating()
            generation = decoder.generate(prompt, max_new_tokens=42)

            assert generation.tokens == text[20:62]
            assert generation.metrics.free_trees > 0
    finally:
        engine.executor = InOrderExecutor()


SPECULATIONS = {
    "strict": (Speculation(exactness="strict", tolerance=0.5), True),
    "fixed-width": (Speculation(exactness="fixed-width", fixed_width=8), False),
    "relaxed": (Speculation(rule="relaxed"), False),
    "typical": (Speculation(rule="typical"), False),
}


@pytest.mark.parametrize(("speculation", "is_free"), SPECULATIONS.values(), ids=SPECULATIONS)
def test_only_exact_passes_of_any_width_have_free_guesses(pair, speculation, is_free):
    """A lossy rule would keep copied tokens that are likely enough; one width has no price that the plan knows."""
    generation = counting(pair, Alternating()).generate(LOOPING, max_new_tokens=40, speculation=speculation)

    assert (generation.metrics.free_trees > 0) == is_free
    if speculation.is_lossless:
        assert generation.tokens == pair.reference(LOOPING, 40)


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


def test_counts_of_the_text_follow_its_loop(pair):
    """No stand-in: a prompt that loops is followed, and the outcome is transformers' own."""
    policy = Alternating()
    generation = counting(pair, policy).generate(LOOPING, max_new_tokens=40)

    assert generation.tokens == pair.reference(LOOPING, 40)
    assert policy.taken


def test_where_nothing_is_guessed_there_is_no_free_tree(pair, suggested):
    """Even if a pass of two were cheaper than a plain step."""
    prompt, text = suggested
    SUGGESTIONS.text = text[:24]
    policy = Alternating()
    generation = pair.decoder(policy, free=SUGGESTIONS).generate(prompt, max_new_tokens=30)

    assert generation.tokens == text[20:50]
    assert all(decision.shape.depth > 0 for decision, _ in policy.taken)
    assert generation.metrics.free_trees == len(policy.taken) < 3


def test_captured_steps_rank_free_trees_as_they_are(pair):
    """On a GPU the order of the nodes is the device's own, by their scores."""
    policy = Alternating()
    generation = counting(pair, policy, backend="cudagraph").generate(LOOPING, max_new_tokens=40)

    assert generation.tokens == pair.reference(LOOPING, 40)
    assert max(tokens for _, tokens in policy.taken) > 1


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampling_gives_the_same_draws(pair, temperature):
    sampling = SamplingParams(temperature=temperature, seed=3)
    policy = Alternating()
    decoder = counting(pair, policy)
    alone = decoder.generate(LOOPING, max_new_tokens=40, sampling=sampling, speculation=False)
    generation = decoder.generate(LOOPING, max_new_tokens=40, sampling=sampling)

    assert generation.tokens == alone.tokens
    assert generation.metrics.free_trees > 0
    assert alone.metrics.free_trees == 0


# ==== when it is worth it ====


def costs(verify_ms=0.1):
    """A plain step takes 1 ms, a verified row ``verify_ms`` more, a draft level 0.2, overhead 0.1."""
    verified = {width: 1.0 + verify_ms * (width - 1) for width in VERIFY_WIDTHS}
    return StepCosts(0.2, {1: 0.2, 2: 0.2}, verified, 0.1, 1.0)


def objective_policy(verify_ms=0.1, rate=0.6, lift=None):
    """Trees give 1 + ``rate`` + ``rate``^2 + ... tokens; the steps that show what plain ones cost are behind it."""
    of_the_tree = [0.0, *[1.0] * (len(VERIFY_WIDTHS) - 1)]  # the root alone gives nothing
    ratios = {width: np.tile(of_the_tree, (MAX_DEPTH, 1)) for width in (1, 2)}
    survival = np.array([rate**level for level in range(1, MAX_DEPTH + 1)], dtype=np.float32)
    policy = ObjectivePolicy({100: costs(verify_ms)}, ratios, survival, None, lift=lift)
    policy.begin()
    while (sample := policy.rest(100)) is not None:
        policy.settle(sample, 1, sample.milliseconds, rested=True)
    return policy


class Context:
    """All the evidence that a policy without a predictor asks for."""

    context = 100


def expected_of(survival):
    """Tokens by width of a chain that survives with ``survival``."""
    return [1.0 + sum(survival[: width - 1]) for width in VERIFY_WIDTHS]


def asked(policy, survival):
    """What ``policy`` makes of a chain of these estimates, with room for no more."""
    return policy.free(expected_of(survival), len(survival), 100)


def geometric(rate, count=WIDEST - 1):
    return [rate**level for level in range(1, count + 1)]


@pytest.mark.parametrize("verify_ms", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("rate", [0.5, 0.9, 0.95, 0.99])
def test_the_width_is_the_argmax_and_beats_the_typical_tree(rate, verify_ms):
    policy, survival, table = objective_policy(verify_ms), geometric(rate), costs(verify_ms)
    decision = asked(policy, survival)
    tree = policy._drafted.typical[0]
    found = {width: (1 + sum(survival[: width - 1])) / (0.1 + table.verify_ms[width]) for width in VERIFY_WIDTHS[1:]}

    if max(found.values()) > max(tree.worth, 1.0):
        width = max(found, key=found.get)
        assert (decision.shape.width, decision.shape.verify_width) == (0, width)
        assert decision.tokens == pytest.approx(1 + sum(survival[: width - 1]))
        assert decision.milliseconds == pytest.approx(0.1 + table.verify_ms[width])
    else:
        assert decision is None


@pytest.mark.parametrize(("rate", "verifies_them"), [(0.1, False), (0.3, False), (0.5, True), (0.9, True)])
def test_drafting_adds_less_where_guesses_are_sure_already(rate, verifies_them):
    """A drafted tree as wide gives 2 / x more where x tokens are promised without it, for the same 0.8 ms."""
    policy, survival = objective_policy(rate=0.9, lift=2.0), geometric(rate)
    free = policy._free_trees.best(expected_of(survival), len(survival), 0, 1.0)
    typical = policy._drafted.typical[0]

    shape, tokens = policy._drafted.typically(0, free)
    assert shape == typical.shape._replace(verify_width=max(2, free.shape.verify_width))
    assert tokens == pytest.approx(free.tokens + 2.0 / free.tokens)
    assert policy._drafted.typically(0, None) == (typical.shape, typical.tokens)
    assert policy._drafted.typically(0, Decision(TreeShape(0, 1, 1), 1.0, 1.0))[0].verify_width == 2
    is_better = free.tokens / free.milliseconds > tokens / costs().iteration_ms(*shape)
    assert (asked(policy, survival) is not None) == is_better == verifies_them


def test_a_drafter_whose_trees_fail_adds_less():
    policy = objective_policy(rate=0.9, lift=1.0)
    free = policy._free_trees.best(expected_of([0.9, 0.8]), 2, 0, 1.0)
    before = policy._drafted.typically(0, free)[1]
    for _ in range(32):
        asked(policy, [0.9, 0.8])
        tree = policy.choose(Context())
        policy.settle(tree, 1, tree.milliseconds, rested=False)

    after = policy._drafted.typically(0, free)[1]
    assert free.tokens <= after < free.tokens + 0.5 * (before - free.tokens)
    for _ in range(500):
        policy.settle(Decision(TreeShape(0, 2, 2), 1.0, 1.0), 1, 1.0, rested=False)
    assert policy._drafted.typically(0, free)[1] > free.tokens + 0.9 * (before - free.tokens), (
        "in the end, as calibrated"
    )


def test_where_others_guess_nothing_all_that_a_tree_keeps_is_what_the_drafter_adds():
    policy = objective_policy(rate=0.9, lift=1.0)
    for _ in range(32):
        assert asked(policy, [0.0]) is None
        tree = policy.choose(Context())
        policy.settle(tree, 1, tree.milliseconds, rested=False)
    assert policy._drafted._kept_lift.kept < 0.8  # until no tree is worth its time any more


@pytest.mark.parametrize(("mean", "kept"), [(1.65, 1.0), (1.25, 0.3), (2.05, 1.7)])
def test_what_a_drafter_adds_is_told_by_the_places_where_it_was_preferred(mean, kept):
    """Others promise 1.25 there, to which it is to add 0.4: little beside its typical tree, but no less than expected.

    What is believed beforehand still counts for a third.
    """
    policy = objective_policy(rate=0.9, lift=0.5)
    assert policy._drafted.typical[0].tokens > 2.5
    generator, free, added = np.random.default_rng(0), Decision(TreeShape(0, 1, 2), 1.25, 1.0), []
    for _ in range(2000):
        tokens = 1 + int(generator.random() < (mean - 1) / 2) * 2
        policy._drafted.settle(TreeShape(2, 3, 8), None, 0, tokens, 1.25)
        added.append(policy._drafted.typically(0, free)[1] - 1.25)
    assert np.mean(added[200:]) == pytest.approx(kept * 0.4, abs=0.05)


def test_few_guesses_are_verified_in_the_narrowest_pass():
    assert asked(objective_policy(0.01), geometric(0.99, 5)).shape == TreeShape(0, 5, 8)


def test_what_is_not_kept_is_believed_less_and_the_drafter_is_asked_again():
    policy, survival = objective_policy(), geometric(0.9)
    promised = asked(policy, survival)
    for _ in range(30):
        decision = asked(policy, survival)
        if decision is None:
            break
        policy.settle(decision, 1, decision.milliseconds, rested=False)
    else:
        pytest.fail("guesses that are never right are verified for ever")

    assert promised.tokens > 5
    assert policy.rest(100) is None  # trees have lost nothing of their account


def test_guesses_that_once_failed_are_tried_again_while_trees_run():
    """Promises and account recover; else one bad text would end free trees for good."""
    policy, survival = objective_policy(), geometric(0.9)
    while (decision := asked(policy, survival)) is not None:
        policy.settle(decision, 1, decision.milliseconds, rested=False)
    waited = 0
    while asked(policy, survival) is None and waited < 1000:
        waited += 1
        tree = policy.choose(Context())
        policy.settle(tree, round(tree.tokens), tree.milliseconds, rested=False)

    assert 3 < waited < 500


def test_the_first_tree_behind_guesses_does_not_set_the_trees_pace():
    """Its drafter has to read all that was guessed without it; the one behind it is as fast as any."""
    policy = objective_policy()
    policy.settle(asked(policy, geometric(0.95)), 12, 2.6, rested=False)
    tree = policy.choose(Context())
    policy.settle(tree, 2, 3 * tree.milliseconds, rested=False)
    assert policy._paces.tree == 1.0
    policy.settle(tree, 2, 3 * tree.milliseconds, rested=False)

    assert policy._paces.tree > 1.1


def test_the_first_tree_of_a_request_does_not_set_the_trees_pace():
    """Its drafter has to read the prompt."""
    policy = objective_policy()
    policy.begin()
    tree = policy.choose(Context())
    policy.settle(tree, 2, 3 * tree.milliseconds, rested=False)
    assert policy._paces.tree == 1.0
    policy.settle(tree, 2, 3 * tree.milliseconds, rested=False)

    assert policy._paces.tree > 1.1


def test_what_gives_more_than_promised_is_believed_more_but_never_beyond_its_length():
    policy, survival = objective_policy(), geometric(0.8)
    before = asked(policy, survival)
    for _ in range(30):
        decision = asked(policy, survival)
        policy.settle(decision, decision.shape.verify_width, decision.milliseconds, rested=False)
    after = asked(policy, survival)

    assert after.tokens / before.tokens > 1.5
    assert after.tokens <= after.shape.depth + 1


def test_guesses_that_take_longer_than_promised_are_taken_at_their_pace():
    policy = objective_policy()
    for _ in range(60):
        decision = asked(policy, geometric(0.95))
        policy.settle(decision, 12, 2 * costs().iteration_ms(*decision.shape), rested=False)

    promised = asked(policy, geometric(0.95))
    assert promised.milliseconds == pytest.approx(2 * costs().iteration_ms(*promised.shape), rel=0.01)
    assert policy._paces.plain == 1.0


def test_steps_that_show_the_price_of_plain_ones_stay_plain():
    policy = objective_policy()
    for _ in range(400):
        policy.settle(Decision(TreeShape(2, 2, 4), 2.0, 1.0), 1, 1.0, rested=False)
    policy.begin()

    assert asked(policy, geometric(0.99)) is None
    assert policy.rest(100).shape == PLAIN_STEP


def test_where_trees_are_paused_guesses_have_to_beat_plain_steps_only():
    policy, survival = objective_policy(verify_ms=0.05), geometric(0.3)
    assert asked(policy, survival) is None
    for _ in range(4):
        policy.settle(Decision(TreeShape(2, 2, 4), 2.0, 2.0), 1, 12.0, rested=False)
        policy.begin()
        policy._steps = 2
    assert policy.rest(100).shape == PLAIN_STEP

    assert asked(policy, survival).shape.is_free


def test_near_the_end_a_tree_is_worth_no_more_than_is_left():
    """A tree gives 4 tokens in 2 ms, one guess almost 2 in 1.2: but where only two may still come, the guess wins."""
    policy = objective_policy(rate=0.9)
    assert asked(policy, [0.9, *geometric(0.3, 6)]) is None
    assert asked(policy, [0.9]).shape == TreeShape(0, 1, 2)
