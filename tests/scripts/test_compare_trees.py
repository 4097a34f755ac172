"""Every registered tree on our engine: same tokens as transformers, within its budget, and the tree it claims to be."""

from dataclasses import replace

import pytest
import torch
from integrity import check_tree
from rivals.k_ary import expansion
from rivals.trees import TREES, Arrangement, TreeBench, TreeSystem, drafting_ms, tree_systems
from tiny_pair import SHAPES, TEXT

from yggdrasil.drafters.protocol import Budget
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

PLAIN = FixedPolicy(PLAIN_STEP)
COSTS = StepCosts(0.1, {1: 0.1, 2: 0.1, 4: 0.1}, {1: 1.0, 8: 1.1, 16: 1.2}, 0.05, 1.0)
PROMPT, COUNT = TEXT[:20], 20


@pytest.fixture(scope="module")
def bench(pair):
    made = TreeBench(pair.decoder(PLAIN), (8, 16), COSTS)
    made.calibrate([TEXT[30:50], TEXT[50:70]], 40)
    return made


@pytest.mark.parametrize("budget", [8, 16])
@pytest.mark.parametrize("name", TREES)
def test_every_tree_is_lossless(bench, pair, name, budget):
    system = TreeSystem(name, bench, TREES[name](bench, budget))
    found = system.decode(PROMPT, COUNT)

    assert found.tokens == pair.reference(PROMPT, COUNT)
    assert found.passes < found.decoded, "nothing was ever accepted, so nothing was tested"


@pytest.mark.parametrize("name", TREES)
def test_every_tree_is_lossless_on_captured_steps(bench, pair, name):
    captured = TreeBench(pair.decoder(PLAIN), (8,), COSTS, backend="cudagraph")
    captured.acceptance = bench.acceptance
    found = TreeSystem(name, captured, TREES[name](captured, 8)).decode(PROMPT, COUNT)
    usual = TreeSystem(name, bench, TREES[name](bench, 8)).decode(PROMPT, COUNT)

    assert found.tokens == pair.reference(PROMPT, COUNT)
    assert found.passes == usual.passes


@pytest.mark.parametrize("budget", [8, 16])
@pytest.mark.parametrize("name", TREES)
def test_every_tree_is_whole_and_within_its_budget(bench, name, budget):
    arrangement = TREES[name](bench, budget)
    bench.arrange(arrangement)
    drafter, tree = bench.decoder.assembly.engine.drafter, bench.decoder.assembly.engine.tree
    with torch.inference_mode():
        drafter.begin(PROMPT)
        drafter.propose(tree, Budget(arrangement.shape.depth, arrangement.shape.width))
    check_tree(tree)

    assert tree.size > 1
    assert arrangement.shape.verify_width <= budget
    assert int(tree.depths[: tree.size].max()) <= arrangement.shape.depth
    if name in ("sequence", "k-ary", "sequoia", "sequoia-by-costs", "merged"):
        assert tree.size <= budget, "a tree that is not pruned must fit"


def test_a_sequence_is_the_drafters_own_greedy_text(bench, pair):
    bench.arrange(TREES["sequence"](bench, 8))
    drafter, tree = bench.decoder.assembly.engine.drafter, bench.decoder.assembly.engine.tree
    with torch.inference_mode():
        drafter.begin(PROMPT)
        drafter.propose(tree, Budget(4, 1))
    drafted = pair._replace(plain_target=pair.plain_drafter).reference(PROMPT, 4)

    assert tree.tokens[1:5].tolist() == drafted
    assert tree.parents[1:5].tolist() == [0, 1, 2, 3]


def test_edges_are_the_drafters_own_probabilities(bench, pair):
    """Of every node of a bushy tree: each is read at its own position, behind its own path."""
    bench.arrange(Arrangement(expansion((3, 2, 1)), TreeShape(4, 3, 16)))
    drafter, tree = bench.decoder.assembly.engine.drafter, bench.decoder.assembly.engine.tree
    with torch.inference_mode():
        drafter.begin(PROMPT)
        drafter.propose(tree, Budget(3, 4))
        for node in range(1, tree.size):
            *path, token = (int(tree.tokens[i]) for i in tree.path(node)[1:])
            logits = pair.plain_drafter(torch.tensor([[*PROMPT, *path]])).logits[0, -1]
            assert float(tree.edges[node]) == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-3)

    assert tree.size == 1 + 3 + 6 + 6


def test_a_tree_that_is_named_twice_is_one_system(bench):
    assert [system.name for system in tree_systems(bench, ["sequence"], [8, 16, 8])] == ["sequence 8", "sequence 16"]


def test_a_budget_beyond_the_context_is_refused(pair):
    with pytest.raises(YggdrasilError, match=r"a verify budget of 100000 is more than the context holds \(\d+\); give"):
        TreeBench(pair.decoder(PLAIN), (8, 100_000), COSTS)


def test_a_perfect_drafter_makes_chains_as_long_as_they_may_be(perfect_pair):
    bench = TreeBench(perfect_pair.decoder(PLAIN), (8,), COSTS)
    acceptance = bench.calibrate([PROMPT], 24)
    found = TreeSystem("sequence", bench, TREES["sequence"](bench, 8)).decode(PROMPT, 1 + 25)

    assert acceptance[0] == 1.0
    assert sum(acceptance) == 1.0
    assert found.passes == 5  # four drafted and the bonus token a pass


def test_acceptance_is_what_the_models_say(bench, pair):
    """The share of positions at which the drafter's likeliest token is the target's, by transformers."""
    text = [*TEXT[30:50], *pair.reference(TEXT[30:50], 40)]
    with torch.no_grad():
        guesses = pair.plain_drafter(torch.tensor([text[:-1]])).logits[0, 19:].topk(bench.candidates).indices
    truth = torch.tensor(text[20:])[:, None]
    expected = (guesses == truth).float().mean(0)
    alone = TreeBench(pair.decoder(PLAIN), (8,), COSTS)

    assert alone.calibrate([TEXT[30:50]], 40) == pytest.approx(expected.tolist())


def test_acceptance_is_of_the_tokens_that_there_was_room_for(perfect_pair):
    """A prompt that all but fills the context leaves few; those that never came were not guessed wrong."""
    bench = TreeBench(perfect_pair.decoder(PLAIN, replace(SHAPES, max_length=30)), (8,), COSTS)

    assert bench.calibrate([PROMPT], 24)[0] == 1.0


def test_wide_levels_take_several_steps(bench, pair):
    """A level of 15 nodes on steps of at most four rows, the last one padded."""
    growth = expansion((3, 5))
    shape = TREES["k-ary"](bench, 16).shape._replace(depth=2, verify_width=16)
    bench.arrange(Arrangement(growth, shape))
    drafter, tree = bench.decoder.assembly.engine.drafter, bench.decoder.assembly.engine.tree
    with torch.inference_mode():
        drafter.begin(PROMPT)
        drafter.propose(tree, Budget(2, 1))
    check_tree(tree)

    assert tree.size == 19
    assert tree.parents[4:19].tolist() == [1] * 5 + [2] * 5 + [3] * 5
    assert TreeSystem("wide", bench, Arrangement(growth, shape)).decode(PROMPT, COUNT).tokens == pair.reference(
        PROMPT, COUNT
    )


def test_calibration_is_on_only_where_asked_for(pair):
    bench, knots = TreeBench(pair.decoder(PLAIN), (8,), COSTS), []
    for name in ("egt", "egt-uncalibrated"):
        bench.knots.fill_(-0.5)
        bench.arrange(TREES[name](bench, 8))
        knots.append(bench.drafter.knots.clone())

    assert (knots[0] == -0.5).all()
    assert not (knots[1] == -0.5).any()


def test_drafting_costs_follow_the_levels(bench):
    """Head and one step a level below the last; 15 sequences on steps of four rows are four steps a level."""
    costs = {name: drafting_ms(bench, TREES[name](bench, 16)) for name in ("sequence", "egt", "eagle-2", "k-ary")}

    assert costs["sequence"] == pytest.approx(0.1 + 3 * 0.1)
    assert costs["egt"] == pytest.approx(0.1 + 3 * 0.1)
    assert costs["eagle-2"] == pytest.approx(0.1 + 3 * 3 * 0.1)  # ten nodes: 4 + 4 + 2
    assert costs["k-ary"] == pytest.approx(0.1 + 0.1 + 0.1)  # levels of 2 and 4; the last, of 8, is not read
    assert bench.max_depth == 4


def test_shapes_that_follow_the_budget(bench):
    """Unpruned growth fills 7 and 15 nodes best with 2 x 3 and 4 x 3; sequences are three, or as many as fit."""
    shapes = {b: TREES["egt-unpruned"](bench, b).shape for b in (8, 16)}
    merged = {b: TREES["merged"](bench, b) for b in (8, 16)}

    assert shapes == {8: TreeShape(2, 3, 8), 16: TreeShape(4, 3, 16)}
    assert [(len(a.growth.widths(9)), a.shape.depth, a.growth.widths(9)[0]) for a in merged.values()] == [
        (8, 2, 3), (8, 4, 3),
    ]  # fmt: skip


def test_costs_end_an_opt_tree_early(bench, pair):
    """Where drafting a level costs more than any level can add, one level is all."""
    dear = TreeBench(pair.decoder(PLAIN), (16,), StepCosts(9.0, dict.fromkeys((1, 2, 4), 9.0), COSTS.verify_ms, 0.1, 1))
    depths = []
    for made, name in ((bench, "opt-tree"), (dear, "opt-tree"), (dear, "opt-tree-by-costs")):
        made.arrange(TREES[name](made, 16))
        drafter, tree = made.decoder.assembly.engine.drafter, made.decoder.assembly.engine.tree
        with torch.inference_mode():
            drafter.begin(PROMPT)
            drafter.propose(tree, Budget(4, 4))
        depths.append(int(tree.depths[: tree.size].max()))

    assert depths == [4, 4, 1]


def test_faults_are_named(pair):
    decoder = pair.decoder(PLAIN)
    with pytest.raises(YggdrasilError, match="must hold the root and a drafted node"):
        TreeBench(decoder, (1,), COSTS)
    fresh = TreeBench(decoder, (8,), COSTS)
    with pytest.raises(YggdrasilError, match="no tree 'oak'; choose from sequence, "):
        tree_systems(fresh, ["oak"], [8])
    with pytest.raises(YggdrasilError, match="give prompts to calibrate"):
        tree_systems(fresh, ["sequoia"], [8])
    assert [s.name for s in tree_systems(fresh, ["egt", "k-ary"], [8])] == ["egt 8", "k-ary 8"]
    assert SHAPES.spare_nodes == 0
