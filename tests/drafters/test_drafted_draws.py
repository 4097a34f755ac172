"""Draft models and heads draft what the target will draw: candidates are reweighed by the noise of their position."""

import pytest
import torch
from laws import reweigh as reweighed_by
from tiny_pair import TEXT, TinyPair, make_pair, random_model

from yggdrasil import SamplingParams
from yggdrasil.acceptance.coins import draw_key
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.drafters import level_drafter
from yggdrasil.drafters.statistics.draws import Draws, draft_weights
from yggdrasil.native.portable import reweigh, reweighed
from yggdrasil.native.random_numbers import gumbel_noise
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.tree.shape import TreeShape
from yggdrasil.tree.token_tree import TokenTree, offer_candidates

PROMPT = TEXT[:24]


def test_the_law_is_that_of_the_counts():
    """Also for nodes of several levels, and where candidates' probabilities are more than one in total."""
    likely = torch.tensor([[0.5, 0.2, 0.1], [0.7, 0.2, 0.2], [0.01, 0.005, 0.001]])
    tokens, levels = torch.tensor([[3, 9, 5], [70_000, 1, 2], [8, 7, 6]]), torch.tensor([0, 2, 5])
    draws = Draws(-(2**60) + 17, 0.6, 0.9)
    buffers = torch.tensor([draws.key, 40]), torch.tensor([1.0, *draws[1:]])

    ours = torch.ops.yggdrasil.reweigh(torch.zeros(3, 3), likely.log(), tokens, levels, *buffers).exp()

    for row, (given, drafted, level) in enumerate(zip(likely.tolist(), tokens.tolist(), levels.tolist(), strict=True)):
        expected = reweighed_by(draws, dict(zip(drafted, given, strict=True)), 40 + 1 + level)
        assert ours[row].tolist() == pytest.approx([expected[token] for token in drafted], rel=1e-4)


def test_nothing_changes_where_the_target_is_greedy():
    likely = torch.tensor([[-0.1, -0.2], [-3.0, -12.0]])
    rest = likely + 0.05, torch.tensor([[4, 5], [6, 7]]), torch.tensor([0, 1]), torch.tensor([0, 9]), torch.zeros(3)

    for each in (reweigh, reweighed):
        assert torch.equal(each(likely, *rest), likely)


@pytest.fixture(scope="module")
def unsure() -> TinyPair:
    """A target that draws other tokens than its most probable ones, and a draft model with the same weights."""
    target, drafter = (random_model() for _ in range(2))
    with torch.no_grad():
        for model in (target, drafter):
            model.lm_head.weight.div_(8)
    return TinyPair(prepare_model(target, "target", 1), prepare_model(drafter, "drafter", 1), target, drafter)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_draft_model_is_right_more_often_with_the_noise(unsure, temperature, monkeypatch):
    decoder = unsure.decoder(FixedPolicy(TreeShape(1, 4, 8)))
    drafter, lengths = decoder.assembly.engine.drafter, []
    sampling = SamplingParams(temperature=temperature, seed=5)
    alone = decoder.generate(PROMPT, max_new_tokens=60, sampling=sampling, speculation=False)
    for follow in (drafter.follow_draws, lambda *_: None):
        drafter.follow_draws(None, 0.0)
        monkeypatch.setattr(drafter, "follow_draws", follow)
        result = decoder.generate(PROMPT, max_new_tokens=60, sampling=sampling)
        assert result.tokens == alone.tokens
        lengths.append(result.metrics.aal)

    assert lengths[0] > 1.1 * lengths[1]


def test_a_token_with_much_noise_is_drafted_though_others_are_likelier():
    """Of a node's candidates for a sampling target; a greedy one gets the likeliest."""
    tree, knots = TokenTree.on_host(4, candidates=2), torch.linspace(-12.0, -0.01, 8)
    logits, root = torch.linspace(0.0, -0.9, 10)[None], torch.zeros(1, dtype=torch.int64)
    tree.plant(3)
    offer_candidates(tree, root, logits, knots)
    assert tree.pool_tokens[:2].tolist() == [0, 1]
    tree.draws.copy_(torch.tensor([draw_key(7), 20]))
    tree.draw_weights.copy_(torch.tensor(draft_weights(1.0)))
    offer_candidates(tree, root, logits, knots)

    noise = gumbel_noise(tree.draws[:1], torch.tensor([[21]]), torch.arange(10)[None])[0]
    best = (logits[0] + noise).topk(2).indices.sort().values.tolist()
    assert tree.pool_tokens[:2].tolist() == best != [0, 1]
    assert tree.pool_edges[:2].tolist() == pytest.approx(logits[0].log_softmax(-1)[best].tolist())


@pytest.mark.parametrize("rule", ["typical", "relaxed"])
def test_drafts_for_a_lossy_rule_ignore_the_noise(rule):
    decoder = make_pair().decoder(FixedPolicy(TreeShape(1, 2, 4)))
    tree, warm = decoder.assembly.engine.tree, SamplingParams(temperature=0.7, seed=3)
    decoder.generate(PROMPT, max_new_tokens=4, sampling=warm)
    assert tree.draw_weights.tolist() == pytest.approx(draft_weights(0.7))
    decoder.generate(PROMPT, max_new_tokens=4, sampling=warm, speculation=Speculation(rule=rule))

    assert tree.draw_weights.tolist() == [0.0, 0.0, 0.0]


def test_a_request_tells_its_seed_and_the_roots_position():
    decoder = make_pair().decoder(FixedPolicy(TreeShape(1, 2, 4)))
    drafter, tree = decoder.assembly.engine.drafter, decoder.assembly.engine.tree
    roots, draft = [], drafter._draft_head
    drafter._draft_head = lambda: (roots.append(int(tree.draws[1])), draft())[1]
    for seed in (9, 2**63 + 5):
        roots.clear()
        decoder.generate(PROMPT, max_new_tokens=12, sampling=SamplingParams(temperature=0.7, seed=seed))

        assert int(tree.draws[0]) == draw_key(seed)
        assert tree.draw_weights.tolist() == pytest.approx(draft_weights(0.7))
        assert roots[0] == len(PROMPT)  # of the first token, which is drawn before anything is drafted
        assert roots == sorted(set(roots))

    decoder.generate(PROMPT, max_new_tokens=4)
    assert tree.draw_weights.tolist() == list(level_drafter.NOTHING_DRAWN)
