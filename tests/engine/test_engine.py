"""Whatever is drafted, the tokens are those of transformers' own greedy decoding."""

import numpy as np
import pytest
import torch
from drafters.example_drafter import LastFollowerDrafter
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_pair import SHAPES, TEXT, VOCAB_SIZE, OracleDrafter

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.drafters import Capabilities, NGramDrafter
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.policy.policy import ObjectivePolicy, RegretBudget
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

PROMPT = TEXT[:20]
NUM_TOKENS = 30
TREES = (
    TreeShape(1, 1, 2),
    TreeShape(1, 4, 4),
    TreeShape(2, 3, 4),
    TreeShape(4, 1, 4),
    TreeShape(4, 4, 8),
    TreeShape(4, 4, 16),
    TreeShape(2, 2, 16),  # wider than the tree: the rest is padding
    TreeShape(4, 3, 1),  # drafted for nothing
)


def made_up_policy(shapes, draft_ms=0.1, verify_ms=0.01, overhead_ms=0.0, plain_ms=1.0, *, wants_model_free=True):
    """An objective policy with costs that rise by ``verify_ms`` a verified token, and flat acceptance tables."""
    costs = StepCosts(
        head_ms=draft_ms,
        draft_ms=dict.fromkeys(shapes.draft_widths, draft_ms),
        verify_ms={width: plain_ms + verify_ms * width for width in shapes.verify_widths},
        overhead_ms=overhead_ms,
        plain_ms=plain_ms,
    )
    levels = range(1, shapes.max_depth + 1)
    ratios = {
        width: [[min(1.0, verify / (1 + width * level)) for verify in shapes.verify_widths] for level in levels]
        for width in shapes.draft_widths
    }
    survival = [0.8**level for level in levels]
    budgets = np.tril(np.ones((shapes.max_depth, shapes.max_depth), dtype=np.float32))[:, :, None]
    tables = {width: budgets * as_array(table) for width, table in ratios.items()}
    return ObjectivePolicy({50: costs}, tables, as_array(survival), None, wants_model_free=wants_model_free)


def as_array(values):
    return np.array(values, dtype=np.float32)


def test_plain_decoding(pair):
    for decoder in (pair.decoder(PLAIN_POLICY), pair.decoder(PLAIN_POLICY, drafter=None)):
        generation = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS)

        assert generation.tokens == pair.reference(PROMPT, NUM_TOKENS)
        assert generation.metrics.plain_steps == generation.metrics.iterations == NUM_TOKENS - 1


@pytest.mark.parametrize("shape", TREES, ids=str)
def test_trees_of_a_draft_model(pair, shape):
    decoder = pair.decoder(FixedPolicy(shape))
    generation = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS)

    assert generation.tokens == pair.reference(PROMPT, NUM_TOKENS)
    metrics = generation.metrics
    assert (metrics.depths, metrics.draft_widths) == (
        {shape.depth: metrics.iterations},
        {shape.width: metrics.iterations},
    )
    if shape.verify_width > 1:
        assert 0 < metrics.acceptance_rate < 1  # else the comparison says nothing of accepting, or of refusing


def test_a_right_drafter_is_accepted_as_far_as_it_goes(perfect_pair):
    generation = perfect_pair.decoder(FixedPolicy(TreeShape(1, 4, 8))).generate(PROMPT, max_new_tokens=41)

    assert generation.tokens == perfect_pair.reference(PROMPT, 41)
    assert generation.metrics.iterations == 8
    assert generation.metrics.aal == 5.0


def test_speculation_can_be_turned_off_for_one_request(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 4, 8)))
    plain = decoder.generate(PROMPT, max_new_tokens=12, speculation=False)
    tree = decoder.generate(PROMPT, max_new_tokens=12)

    assert plain.tokens == tree.tokens == pair.reference(PROMPT, 12)
    assert plain.metrics.plain_steps == 11
    assert tree.metrics.plain_steps == 0


@pytest.mark.parametrize("kind", ["n-gram", "example", "oracle"])
@pytest.mark.parametrize("shape", [TreeShape(1, 4, 8), TreeShape(4, 3, 16)], ids=str)
def test_other_drafters(pair, kind, shape):
    reference = pair.reference(PROMPT, NUM_TOKENS)
    drafters = {
        "n-gram": NGramDrafter(),
        "example": LastFollowerDrafter(),
        "oracle": OracleDrafter([*PROMPT, *reference]),
    }
    generation = pair.decoder(FixedPolicy(shape), drafter=drafters[kind]).generate(PROMPT, max_new_tokens=NUM_TOKENS)

    assert generation.tokens == reference
    assert 0 < generation.metrics.acceptance_rate < 1


class LayerReader:
    """Guesses nothing; keeps the target's states it is handed."""

    name = "reader"

    def __init__(self, hidden_layers):
        self.capabilities = Capabilities(layers=hidden_layers)

    def begin(self, tokens):
        self.states = {layer: [] for layer in self.capabilities.layers}
        self._last = tokens[-1]

    def extend(self, tokens, states):
        self._last = tokens[-1]
        for layer, rows in states.items():
            self.states[layer].append(rows.clone())

    def cost(self, budget):
        return ()

    def propose(self, tree, budget):
        tree.attach(0, (self._last + 1) % VOCAB_SIZE, -1.0)


def test_a_drafter_sees_the_states_of_the_layers_it_names(pair):
    """Layer i's states are what transformers calls hidden_states[i + 1]; -1 is the normed input of the head."""
    drafter = LayerReader((0, -1))
    generation = pair.decoder(FixedPolicy(TreeShape(1, 1, 2)), drafter=drafter).generate(PROMPT, max_new_tokens=12)
    text = torch.tensor([[*PROMPT, *generation.tokens[:-1]]])
    with torch.no_grad():
        expected = pair.plain_target(text, output_hidden_states=True).hidden_states

    torch.testing.assert_close(torch.cat(drafter.states[0]), expected[1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(drafter.states[-1]), expected[-1][0], atol=1e-4, rtol=1e-4)


class Watcher(FixedPolicy):
    """Wants features in every iteration and notes what the engine tells it."""

    def begin(self):
        self.contexts, self.states, self.settled = [], [], []

    def choose(self, context, model_free=None, features=None):
        if features is None:
            return None
        self.contexts.append(features.context)
        self.states.append(torch.from_numpy(features.hidden().copy()))
        return self._decision

    def observe(self, decision, tokens, milliseconds):
        self.settled.append((tokens, milliseconds))


@pytest.mark.parametrize("shape", [TreeShape(0, 0, 1), TreeShape(4, 4, 16), TreeShape(1, 4, 8)], ids=str)
def test_a_policy_is_told_of_every_iteration(pair, shape):
    """Its state is the normed one behind the last certain token, the last entry of transformers' hidden_states."""
    policy = Watcher(shape)
    decoder = pair.decoder(policy)
    decoder.generate(TEXT[50:60], max_new_tokens=9)
    generation = decoder.generate(PROMPT, max_new_tokens=40)  # a new request begins with a clean slate
    with torch.no_grad():
        text = torch.tensor([[*PROMPT, *generation.tokens]])
        expected = pair.plain_target(text, output_hidden_states=True).hidden_states[-1][0]

    assert len(policy.contexts) == generation.metrics.iterations
    assert policy.contexts[0] == len(PROMPT)
    for context, state in zip(policy.contexts, policy.states, strict=True):
        torch.testing.assert_close(state, expected[context - 1], atol=1e-4, rtol=1e-4)
    lengths = [tokens for tokens, _ in policy.settled]  # the last past the end of the text or not
    assert policy.contexts == [len(PROMPT) + sum(lengths[:i]) for i in range(len(lengths))]
    assert (max(lengths) > 1) == (shape.depth > 0)
    assert all(milliseconds > 0.0 for _, milliseconds in policy.settled)


def test_objective_policy_uses_many_shapes(pair):
    policy = made_up_policy(SHAPES, verify_ms=0.1)
    generation = pair.decoder(policy).generate(PROMPT, max_new_tokens=NUM_TOKENS)

    assert generation.tokens == pair.reference(PROMPT, NUM_TOKENS)
    assert len(generation.metrics.verify_widths) > 1
    assert generation.metrics.predicted_tpot_ms > 0


def test_objective_policy_takes_plain_steps_where_speculation_costs_too_much(pair):
    policy = made_up_policy(SHAPES, draft_ms=50.0, wants_model_free=False)
    policy.observe = lambda *_: None  # at the costs that were made up
    generation = pair.decoder(policy).generate(PROMPT, max_new_tokens=30)

    assert generation.tokens == pair.reference(PROMPT, 30)
    assert generation.metrics.plain_steps == 29
    assert generation.metrics.predicted_tpot_ms == pytest.approx(1.0)


class Boaster:
    """Is sure of a token that never comes."""

    name = "boaster"
    capabilities = Capabilities()

    def __init__(self, token):
        self._token = token

    def begin(self, tokens):
        return

    def extend(self, tokens, states):
        return

    def cost(self, budget):
        return ()

    def propose(self, tree, budget):
        tree.attach(0, self._token, -0.01)


def test_a_drafter_that_promises_too_much_is_left_and_tried_again(pair, monkeypatch):
    monkeypatch.setattr(RegretBudget, "EARNED", 0.3)  # the context is short
    policy = made_up_policy(SHAPES, draft_ms=0.4, wants_model_free=False)
    observe = policy.observe  # the account goes by expected times, so that a busy machine changes nothing
    policy.observe = lambda decision, tokens, _: observe(decision, tokens, decision.milliseconds)
    never = next(token for token in range(VOCAB_SIZE) if token not in pair.reference(PROMPT, 100))
    decoder, shapes = pair.decoder(policy, drafter=Boaster(never)), []
    choose = policy.choose

    def note(context, model_free=None, features=None):
        decision = choose(context, model_free, features)
        shapes.append(decision.shape)
        return decision

    policy.choose = note

    for _ in range(4):
        assert decoder.generate(PROMPT, max_new_tokens=100).tokens == pair.reference(PROMPT, 100)
    is_plain = "".join("p" if shape.depth == 0 else "T" for shape in shapes)
    assert is_plain.startswith("T")
    assert "T" + "p" * 8 in is_plain  # in the red
    assert is_plain.rstrip("p").count("pT") > 1  # and again
    assert is_plain.count("p") > is_plain.count("T")


@st.composite
def legal_settings(draw):
    """Shapes, and a tree shape that they allow."""

    def widths(largest):
        return tuple(sorted(draw(st.sets(st.integers(1, largest), min_size=1, max_size=3))))

    draft_widths, verify_widths = widths(5), widths(20)
    shapes = Shapes(
        max_length=draw(st.integers(70, 90)),
        draft_widths=draft_widths,
        max_depth=draw(st.integers(1, 5)),
        candidates=draw(st.integers(draft_widths[-1], 7)),
        verify_widths=verify_widths,
        prefill_widths=widths(24),
    )
    depth = draw(st.integers(1, shapes.max_depth))
    return shapes, TreeShape(draw(st.sampled_from(draft_widths)), depth, draw(st.sampled_from(verify_widths)))


@examples(120)
@given(legal_settings(), st.integers(1, 45))
def test_any_legal_shapes_give_the_same_tokens(pair, legal, prompt_length):
    shapes, shape = legal
    prompt = TEXT[:prompt_length]
    generation = pair.decoder(FixedPolicy(shape), shapes).generate(prompt, max_new_tokens=12)

    assert generation.tokens == pair.reference(prompt, 12)


@examples(50)
@given(legal_settings(), st.integers(1, 45), st.floats(0, 2), st.floats(0, 0.5), st.floats(0, 1), st.floats(0.1, 2))
def test_any_costs_give_the_same_tokens(pair, legal, prompt_length, draft_ms, verify_ms, overhead_ms, plain_ms):
    shapes, _ = legal
    with_plain = Shapes(**{**vars(shapes), "verify_widths": tuple(sorted({1, *shapes.verify_widths}))})
    policy = made_up_policy(with_plain, draft_ms + 1e-3, verify_ms, overhead_ms, plain_ms)
    prompt = TEXT[:prompt_length]
    generation = pair.decoder(policy, with_plain).generate(prompt, max_new_tokens=12)

    assert generation.tokens == pair.reference(prompt, 12)


@pytest.mark.parametrize("options", [{}, {"sampling": SamplingParams(temperature=1.0, seed=1)}], ids=["best", "drawn"])
def test_the_cache_lies_on_huge_pages_from_the_first_request_on_whose_text_may_be_long(pair, monkeypatch, options):
    decoder, huge_page_calls = pair.decoder(FixedPolicy(TreeShape(2, 2, 4))), []
    runner = decoder.assembly.target
    monkeypatch.setattr(runner.cache.arena, "use_huge_pages", lambda: huge_page_calls.append(True))
    row_bytes = runner.cache.num_bytes / runner.cache.capacity
    share = (len(PROMPT) + 8) * row_bytes / sum(weight.nbytes for weight in runner.weights)
    monkeypatch.setattr("yggdrasil.runtime.runner._SMALL_SHARE", share)
    decoder.generate(PROMPT, max_new_tokens=8, **options)
    assert not huge_page_calls
    decoder.generate(PROMPT, max_new_tokens=9, **options)
    assert huge_page_calls


@pytest.mark.parametrize("count", [1, 3])
def test_a_request_leaves_pytorch_as_it_was(pair, count):
    decoder, before = pair.decoder(FixedPolicy(TreeShape(2, 2, 4))), torch.get_num_threads()

    def as_before():
        return torch.get_num_threads() == count and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    torch.set_num_threads(count)
    try:
        decoder.generate(PROMPT, max_new_tokens=8)
        assert as_before()
        for _ in decoder.start(PROMPT, max_new_tokens=8):
            assert as_before()
        next(iter(decoder.start(PROMPT, max_new_tokens=8)))  # dropped
        assert as_before()
    finally:
        torch.set_num_threads(before)
