"""The simulation against the engine, with a drafter, with counts and with both, and against an example by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_pair import SHAPES, TEXT

from yggdrasil.calibration.choose import choose
from yggdrasil.calibration.record import record_document
from yggdrasil.calibration.replay import RecordedTrees, recorded_documents, replay
from yggdrasil.calibration.survival import _added_tokens, _Beginning, survival_of
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.protocol import Budget, Capabilities, group_of
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.policy.objective import Decision, PassValues
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

COSTS = StepCosts(0.1, {1: 0.1, 2: 0.11, 4: 0.12}, {w: 1 + 0.05 * w for w in SHAPES.verify_widths}, 0.05, 1.1)
MAKE_FREE = {
    "none": lambda: None,
    "text": lambda: group_of([default_statistics()]),
    "n-gram and text": lambda: group_of([NGramDrafter(), default_statistics()]),
}
PROMPT = list(TEXT[:20])
ANSWER = 128  # what the pair's cache holds beside the prompt


class DraftedTreePolicy(FixedPolicy):
    """One shape, with the best verify width of every tree, beside the guesses of others."""

    wants_model_free = True

    def __init__(self, costs, shape):
        super().__init__(shape)
        drafting_ms = costs.drafting_ms(shape.width, shape.depth) + costs.overhead_ms
        self._widths, self._passes = costs.verify_widths, PassValues(costs, drafting_ms)

    def prune(self, decision, expected, context):
        width = self._widths[self._passes.best(expected)[0]]
        return decision._replace(shape=decision.shape._replace(verify_width=width))


class Costly(ObjectivePolicy):
    """Told what the costs say, not what this machine took."""

    def observe(self, decision, tokens, milliseconds):
        super().observe(decision, tokens, COSTS.iteration_ms(*decision.shape))


@pytest.fixture(scope="module")
def traces(pair):
    decoder = pair.decoder(PLAIN_POLICY)
    text = pair.reference(PROMPT, ANSWER + SHAPES.max_depth)
    return record_document(decoder.assembly, decoder.assembly.engine.drafter, PROMPT, text, 3)


def policy(traces):
    survival = survival_of(traces, COSTS, None, {3: PROMPT})
    return Costly(
        {0: COSTS}, survival.ratios, survival.mean.astype(np.float32), None, added_tokens=survival.added_tokens
    )


def counted(played, name):
    """Iterations by one number of their shapes."""
    found = Counter()
    for shape, count in played.shapes.items():
        found[getattr(shape, name)] += count
    return found


@pytest.mark.parametrize("kind", MAKE_FREE)
def test_the_simulation_decodes_as_the_engine_does(pair, traces, kind, monkeypatch):
    """As many iterations of the same shapes for the same tokens."""
    monkeypatch.setattr("yggdrasil.calibration.replay.ANSWER", ANSWER)
    free = MAKE_FREE[kind]()
    documents = recorded_documents(traces, {3: PROMPT})
    played = replay(documents, policy(traces), COSTS, trees=RecordedTrees(traces, COSTS, free), model_free=free)
    generation = pair.decoder(policy(traces), model_free=MAKE_FREE[kind]()).generate(PROMPT, max_new_tokens=ANSWER)

    assert [*documents[0].answer] == generation.tokens
    assert (played.tokens, played.iterations) == (ANSWER - 1, generation.metrics.iterations)
    assert counted(played, "verify_width") == generation.metrics.verify_widths
    assert counted(played, "width") == generation.metrics.draft_widths
    assert sum(count for width, count in counted(played, "width").items() if width) > 5
    assert (generation.metrics.model_free_trees > 0) == (free is not None)


@pytest.mark.parametrize("kind", MAKE_FREE)
def test_a_fixed_tree_is_filled_and_played_too(pair, traces, kind):
    """With the guesses of others below and beside its own nodes there is more in it."""
    free = MAKE_FREE[kind]()
    trees = RecordedTrees(traces, COSTS, free)
    promised = trees.grow(0, TreeShape(2, 3, 1), fills=False)[-1]
    documents = recorded_documents(traces, {3: PROMPT})
    played = replay(documents, DraftedTreePolicy(COSTS, TreeShape(2, 3, 1)), COSTS, trees=trees, model_free=free)
    fixed = pair.decoder(FixedPolicy(TreeShape(2, 3, 8))).generate(PROMPT, max_new_tokens=ANSWER)

    assert 1.0 < promised < 4.0
    assert set(counted(played, "width")) == {2}
    assert played.aal >= fixed.metrics.aal * (1.0 if kind == "none" else 1.02) - 0.3
    trees.grow(0, TreeShape(2, 3, 1), fills=True)
    assert (trees.tree.size > 1 + 2 * 3) == (kind != "none")


def chains(lengths, document, max_depth, edge=0.5):
    """Traces of width 1: a chain a row of which the first ``length`` nodes are what came next, token row + 1."""
    rows, chain = len(lengths), np.arange(max_depth)
    hit = chain < np.array(lengths)[:, None]
    return TraceSet(
        hidden=np.zeros((rows, 2), dtype=np.float32),
        repetition=np.zeros((rows, 6), dtype=np.float32),
        head=np.full((rows, 2), -np.inf, dtype=np.float32),
        document=np.array(document),
        position=np.arange(rows) - np.array([document.index(number) for number in document]) + 100,
        root=np.arange(rows, dtype=np.int32),
        scores={1: np.tile(((chain + 1) * np.log(edge)).astype(np.float32), (rows, 1))},
        depth={1: np.tile((chain + 1).astype(np.int8), (rows, 1))},
        hit={1: hit},
        edge_log_probability={1: np.full((rows, max_depth), np.log(edge), dtype=np.float32)},
        parent={1: np.tile((chain - 1).astype(np.int16), (rows, 1))},
        token={1: np.where(hit, np.arange(rows)[:, None] + chain + 1, 9999).astype(np.int32)},
    )


# Document 7: row 0 accepts 2, on to row 3, which accepts 1 and gives the last token. Document 8: row 6 accepts 1.
BY_HAND = chains([2, 0, 0, 1, 2, 0, 1, 0, 2], [7] * 6 + [8] * 3, max_depth=2)
HAND_COSTS = StepCosts(1.0, {1: 0.5}, {1: 4.0, 2: 4.25, 4: 5.0}, 0.25, 4.5)


def played_by_hand(made, traces=BY_HAND):
    trees = RecordedTrees(traces, HAND_COSTS, None)
    return replay(recorded_documents(traces, {}), made, HAND_COSTS, trees=trees)


def test_iterations_by_hand():
    """1.75 tokens for 6.75 ms at width 4 beat 1.5 for 6 and 1 for 5.75; the prefill gives a document's first token."""
    result = played_by_hand(DraftedTreePolicy(HAND_COSTS, TreeShape(1, 2, 1)))
    assert (result.tokens, result.iterations) == (7, 3)
    assert result.milliseconds == 3 * (1.0 + 0.5 + 5.0 + 0.25)
    assert result.shapes == {TreeShape(1, 2, 4): 3}

    pruned = played_by_hand(FixedPolicy(TreeShape(1, 2, 2)))  # one node: rows 0, 2, 3 and 6
    assert pruned.shapes == {TreeShape(1, 2, 2): 4}

    plain = played_by_hand(PLAIN_POLICY)
    assert (plain.tokens, plain.iterations, plain.milliseconds) == (7, 7, 7 * 4.5)

    with pytest.raises(ValueError, match="no text"):
        replay([], PLAIN_POLICY, HAND_COSTS)


class RestsFirst(DraftedTreePolicy):
    """Takes plain steps where a document begins."""

    def begin(self):
        self.left = 2

    def choose(self, context, model_free=None, features=None):
        self.left -= 1
        return Decision(PLAIN_STEP) if self.left >= 0 else super().choose(context)


@pytest.mark.parametrize(
    ("made", "read"), [(DraftedTreePolicy, 12 + 30), (RestsFirst, 12 + 2)], ids=["at once", "late"]
)
def test_a_drafter_reads_what_it_has_not_drafted_through(made, read):
    """Before its first tree of a request the prompt, and what went by without it; document 8 is never drafted late."""
    prompts = {7: [0] * 12, 8: [0] * 30}
    costs, shape = replace(HAND_COSTS, reading_ms=0.01), TreeShape(1, 2, 1)
    times = [
        replay(
            recorded_documents(BY_HAND, prompts),
            made(HAND_COSTS, shape),
            paid,
            trees=RecordedTrees(BY_HAND, paid, None),
        ).milliseconds
        for paid in (HAND_COSTS, costs)
    ]
    assert times[1] - times[0] == pytest.approx(0.01 * read)


class Silent:
    """Guesses nothing."""

    name = "silent"
    capabilities = Capabilities()

    def begin(self, tokens):
        return

    def extend(self, tokens, states):
        return

    def propose(self, tree, budget):
        return

    def cost(self, budget):
        return ()


class Listening(Silent):
    """Remembers the text at which it was asked for a tree of its own."""

    def __init__(self):
        self.heard = []

    def begin(self, tokens):
        self._text = list(tokens)

    def extend(self, tokens, states):
        self._text += tokens

    def propose(self, tree, budget):
        if not budget.is_first:
            return
        self.heard.append(list(self._text))


def tables_of(survival):
    return {width: ratios * survival.mean[None, :, None] for width, ratios in survival.ratios.items()}


def test_survival_is_that_of_places_where_iterations_begin():
    """Of each three places the first keeps two tokens; the others lie within that iteration."""
    traces = chains([2, 1, 0] * 4, [7] * 12, max_depth=2)
    survival = survival_of(traces, HAND_COSTS, None, {})

    assert survival.mean.tolist() == [1.0, 1.0]
    assert survival.ratios[1][1].tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    assert survival.added_tokens == 2.0


def test_others_know_the_text_up_to_where_an_iteration_begins():
    """Document 7 begins iterations at its tokens 0 and 3, document 8 at 0 and 2: behind its token 4 is no room."""
    traces, listening = chains([2, 1, 0] * 2 + [1, 0] * 3, [7] * 6 + [8] * 6, max_depth=2), Listening()
    survival = survival_of(traces, HAND_COSTS, group_of([listening]), {7: [50, 51]})

    assert listening.heard == [[50, 51, 0], [50, 51, 0, 1, 2, 3], [6], [6, 7, 8]]
    assert survival.mean.tolist() == [1.0, 0.5]


def test_what_drafting_adds_is_fitted_by_the_inverse_of_what_is_promised():
    """At least as wide as the typical tree, and as the other one."""
    kept = np.array([[0, 1, 1], [0, 1, 3]])
    sure, unsure = (_Beginning(0, kept, promised, promised, width) for promised, width in ((2.0, 2), (1.0, 0)))

    assert _added_tokens([sure], shape=1, width=1) == (4 - 2) * 2
    assert _added_tokens([unsure], shape=1, width=1) == 2 - 1
    assert _added_tokens([sure, unsure], shape=1, width=1) == pytest.approx((2 / 2 + 1) / (1 / 4 + 1))
    assert _added_tokens([sure], shape=0, width=1) == 0.0
    boastful = _Beginning(0, kept, 2.0, 1.5, 2)
    assert _added_tokens([boastful], shape=1, width=1) == (4 - 1.5) * 2, "it is added to what is given"


def test_trees_that_nothing_is_added_to_are_the_drafters_own(traces):
    silent, alone = (survival_of(traces, COSTS, free, {3: PROMPT}) for free in (group_of([Silent()]), None))
    assert silent.mean.tolist() == alone.mean.tolist()
    assert all(np.array_equal(table, alone.ratios[width]) for width, table in silent.ratios.items())
    assert silent.added_tokens == alone.added_tokens


def test_drafting_adds_to_other_guesses_and_to_none(traces):
    alone, beside = (survival_of(traces, COSTS, free, {3: PROMPT}) for free in (None, group_of([default_statistics()])))
    assert beside.added_tokens > 0.0
    assert 1.0 < alone.added_tokens < 3.0, "all that a tree keeps"


def test_a_level_of_the_drafters_own_is_worth_less_where_counts_go_on_with_its_tree(traces):
    both = None, group_of([default_statistics()])
    alone, filled = (tables_of(survival_of(traces, COSTS, free, {3: PROMPT})) for free in both)
    tokens = {name: table[4].sum(axis=1)[:, -1] for name, table in (("alone", alone), ("filled", filled))}  # [D budget]
    assert (tokens["filled"] > tokens["alone"])[:-1].all()
    assert tokens["filled"][-1] / tokens["filled"][0] < 0.8 * tokens["alone"][-1] / tokens["alone"][0]


def test_of_texts_no_longer_than_trees_are_deep_what_there_is_is_known(traces):
    short = TraceSet.from_arrays({name: array[: SHAPES.max_depth] for name, array in traces.to_arrays().items()})
    found = survival_of(short, COSTS, group_of([default_statistics()]), {3: PROMPT})
    assert found.mean[0] > 0.0
    assert tables_of(found)[4].max() <= 1.0


def likelihoods(tree, count):
    """Paths of the best nodes with their probabilities."""
    best = sorted(range(1, tree.size), key=lambda node: -float(tree.scores[node]))[:count]
    return {tuple(tree.tokens[step].item() for step in path_to(tree, node)): float(tree.scores[node]) for node in best}


def path_to(tree, node):
    return [*path_to(tree, int(tree.parents[node])), node] if node else []


@pytest.mark.parametrize("shape", [TreeShape(1, 1, 1), TreeShape(2, 2, 1), TreeShape(4, 3, 1), TreeShape(4, 4, 1)])
def test_recorded_trees_are_filled_as_those_that_are_grown_no_deeper(pair, traces, shape):
    """What was attached at deeper levels is still a candidate there, and so is what never was."""
    assembly, free = pair.decoder(PLAIN_POLICY).assembly, default_statistics()
    drafter, tree, trees = (
        assembly.engine.drafter,
        assembly.engine.tree,
        RecordedTrees(traces, COSTS, default_statistics()),
    )
    answer = recorded_documents(traces, {})[0].answer
    for index in (3, 17, 40):
        text = [*PROMPT, *answer[: index + 1]]
        with torch.inference_mode():
            drafter.begin(text)
            drafter.propose(tree, Budget(shape.depth, shape.width))
        free.begin(text)
        free.propose(tree, Budget(tree.num_nodes, is_first=False))
        trees._free.begin(text)
        trees.grow(index, shape, fills=True)
        grown, recorded = likelihoods(tree, 12), likelihoods(trees.tree, 12)
        assert grown.keys() == recorded.keys()
        assert grown == pytest.approx(recorded, abs=1e-3)


def test_a_choice_goes_by_filled_trees(traces):
    chosen = choose(traces, AcceptanceCalibration.identity(), COSTS, group_of([default_statistics()]), {3: PROMPT})
    filled = survival_of(traces, COSTS, group_of([default_statistics()]), {3: PROMPT})
    assert all(np.allclose(table, filled.ratios[width]) for width, table in chosen.learned.ratios.items())
    np.testing.assert_allclose(chosen.learned.mean_survival, filled.mean, rtol=1e-6)
