"""Counted continuations, against counting by hand."""

import gc
from collections import Counter
from dataclasses import replace
from itertools import product
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from integrity import check_tree
from laws import likelihoods
from toy_target import decode, plain_decode, wandering_target

from yggdrasil.calibration.statistics.scorer_fit import Candidates, fit, mean_loss
from yggdrasil.drafters.model_free_options import NGramOptions, StatisticsOptions
from yggdrasil.drafters.protocol import Budget
from yggdrasil.drafters.registry import named_drafters
from yggdrasil.drafters.statistics.contexts import (
    BRANCHES,
    LONGEST,
    MOST_TOKEN,
    NUM_CONTEXTS,
    TABLE_LENGTH,
    has_one_token,
    is_longest,
    table_key,
)
from yggdrasil.drafters.statistics.drafter import LEAST_PATH, StatisticsDrafter
from yggdrasil.drafters.statistics.scorer import SHAPES, NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.tree.token_tree import NO_SCORE, TokenTree

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)
DOCUMENTS = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), TEXT), max_size=4)
DRAWN = np.random.default_rng(0)
SCORER = NGramScorer(**{name: DRAWN.normal(scale=0.5, size=shape) for name, shape in SHAPES.items()})
MAX_CONTINUATIONS, MOST_LIKELY = 16, 0.98  # of a context of the text; of all children of a node together


def new_tree(num_nodes=17):
    return TokenTree.allocate(num_nodes, candidates=1, device=torch.device("cpu"))


def grown(drafter, text, num_nodes=17, depth=5):
    tree = new_tree(num_nodes)
    drafter.begin(text)
    drafter.propose(tree, Budget(depth))
    check_tree(tree)
    return tree


LEAST = st.sampled_from([0.0, 1e-9, 0.03, 0.2])  # probability of paths that are left out


def best_scores(drafter, num_nodes, depth, least):
    """Return the highest log-probabilities of paths below the text, descending, as many as a tree has room for."""
    found, waiting = [], [((), 0.0)]
    while waiting and len(found) < num_nodes:
        waiting.sort(key=lambda each: each[1])
        path, score = waiting.pop()
        found.append(score)
        children = sorted(likelihoods(SCORER, drafter.features(path)).items(), key=lambda each: -each[1])
        left = MOST_LIKELY
        for token, likely in children[:BRANCHES] if len(path) < depth else ():
            share = min(likely, left)
            left -= share
            if share >= 1e-6 and score + log(share) >= max(LEAST_PATH, least):
                waiting.append(((*path, token), score + log(share)))
    return found


@given(text=TEXT, documents=DOCUMENTS, depth=st.integers(1, 6), num_nodes=st.integers(1, 20), least=LEAST)
@examples(60)
def test_a_tree_has_the_likeliest_paths(text, documents, depth, num_nodes, least):
    drafter = StatisticsDrafter(SCORER, Table.of(documents) if documents else None)
    drafter.leave_out_below(least)

    tree = grown(drafter, text, num_nodes, depth)

    wanted = best_scores(drafter, num_nodes, depth, log(least) if least else LEAST_PATH)
    assert tree.scores[: tree.size].tolist() == pytest.approx(wanted, abs=1e-4)


def test_a_long_text_of_many_contexts_is_counted():
    """Thousands of contexts, more than there is room for at once; some have dozens of continuations, most have one."""
    drawn = np.random.default_rng(1)
    text = [int(number) for number in np.minimum(drawn.geometric(0.08, size=3000), 60)]
    drafter = StatisticsDrafter(SCORER)
    drafter.begin(text)

    most = 0
    for path in ([], [1], [2, 1], [7, 3], [59]):
        rows, path = drafter.features(path).tolist(), path or text
        most = max(most, len(rows))
        followers = Counter(text[end] for end in range(1, len(text)) if text[end - 1] == path[-1])
        for token, count, *_, total in [(row[0], row[1], row[1 + NUM_CONTEXTS]) for row in rows]:
            assert total == sum(followers.values())
            assert count in (0, followers[token]), "of a context the sixteen most frequent are looked at"
    assert most > MAX_CONTINUATIONS, "several contexts add to them"
    assert grown(drafter, [5, 1, 5], num_nodes=9).tokens[1] == 1, "the long text is forgotten"


def test_paths_below_the_least_probability_are_left_out_and_no_others():
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 5, 1]
    every = grown(StatisticsDrafter(SCORER), text, num_nodes=40)
    least = 0.999 * float(every.scores[: every.size].exp().median())
    drafter = StatisticsDrafter(SCORER)
    drafter.leave_out_below(least)
    drafter.set_scorer(SCORER, None)  # as before

    some = grown(drafter, text, num_nodes=40)

    assert 1 < some.size < every.size
    assert torch.equal(some.tokens[: some.size], every.tokens[: some.size])
    assert float(every.scores[some.size].exp()) < least <= float(some.scores[some.size - 1].exp()) + 1e-6


@given(text=TEXT, documents=DOCUMENTS)
@examples(40)
def test_features_are_what_counting_by_hand_finds(text, documents):
    drafter = StatisticsDrafter(SCORER, Table.of(documents))
    drafter.begin(text)

    seen, followed = [0] * NUM_CONTEXTS, {}

    def count(context, tokens):
        seen[context] = len(tokens)
        for token, times in Counter(tokens).items():
            followed.setdefault(token, [0] * NUM_CONTEXTS)[context] = times

    for length in range(1, min(LONGEST, len(text)) + 1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        count(length - 1, [text[end] for end in ends])
    for length in range(1, min(TABLE_LENGTH, len(text)) + 1):
        wholes = [([*prompt[-TABLE_LENGTH:], *answer], len(answer)) for prompt, answer in documents]
        known = [
            whole[end]
            for whole, size in wholes
            for end in range(max(length, len(whole) - size), len(whole))
            if whole[end - length : end] == text[-length:]
        ]
        count(LONGEST + length - 1, known)
    found = {token: counts for token, *counts in drafter.features(()).tolist()}
    assert found == {token: [*counts, *seen] for token, counts in followed.items()}


def test_nodes_come_best_first_and_siblings_leave_something_over():
    certain = replace(NGramScorer.none(), nothing=np.full(1, -9.0))
    tree = grown(StatisticsDrafter(certain), [1, 2, 1, 3, 1, 2, 1], depth=3)
    scores = tree.scores[: tree.size].tolist()
    assert scores == sorted(scores, reverse=True)
    assert tree.tokens[1] in (2, 3)
    children = tree.edges[1 : tree.size][tree.parents[1 : tree.size] == 0].double().exp().sum()
    assert float(children) <= MOST_LIKELY + 1e-6


def test_of_many_continuations_the_newest_are_looked_at_and_the_likeliest_are_children():
    text = [token for continuation in range(1, 41) for token in (0, continuation)] + [0]
    for nothing in (0.0, 1.0):  # one candidate is as likely as another, and as none of them or less
        drafter = StatisticsDrafter(replace(NGramScorer.none(), nothing=np.full(1, nothing)))
        tree = grown(drafter, text, num_nodes=40, depth=1)
        assert drafter.features(()).numpy()[:, 0].tolist() == list(range(40, 40 - MAX_CONTINUATIONS, -1))
        assert tree.tokens[1 : tree.size].tolist() == list(range(40, 40 - BRANCHES, -1))


def test_a_large_table_lies_on_huge_pages_where_the_system_has_them():
    """On small ones looking up its places behind a pass takes several times as long."""
    smaps = Path("/proc/self/smaps")
    if (
        not (smaps.exists() and "VmFlags" in smaps.read_text())
        or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    ):
        pytest.skip("this system does not say")
    gc.collect()  # what other tests left on huge pages goes now, and not in between
    before = _advised_kilobytes(smaps)
    table = Table.of([([], np.random.default_rng(0).integers(0, 4000, 60_000).tolist())])
    with_table = _advised_kilobytes(smaps)
    drafters = [StatisticsDrafter(SCORER, table) for _ in range(4)]  # one may get pages that others had

    assert with_table - before >= table.contexts.nbytes / 1024
    assert _advised_kilobytes(smaps) - with_table >= 2 * 2048, drafters[0].name  # their maps of the contexts


def _advised_kilobytes(smaps):
    """Of the process's memory, how much is to have huge pages."""
    sizes, total = [0], 0
    for line in smaps.read_text().splitlines():
        name, *values = line.split()
        if name == "Size:":
            sizes.append(int(values[0]))
        elif name == "VmFlags:" and "hg" in values:
            total += sizes[-1]
    return total


def test_a_table_keeps_the_most_frequent():
    answer = [token for continuation in range(1, 21) for token in (0, continuation)] + [0, 7]
    table = Table.of([([], answer)])
    place = table.keys.tolist().index(table_key((0,)))
    kept = table.tokens[table.starts[place] : table.starts[place + 1]].tolist()
    assert len(kept) == BRANCHES
    assert kept[0] == 7
    assert table.totals[place] == 21


def test_a_text_that_goes_on_keeps_its_counts_and_another_has_its_own():
    drafter, text = StatisticsDrafter(SCORER), [1, 2, 3, 1, 2]
    grown(drafter, text)
    drafter.extend([9, 9, 9], {})  # the end of a request, which the next one does not go on from
    for following in ([*text, 3, 1], [2, 2, 2]):
        fresh = grown(StatisticsDrafter(SCORER), following)
        for kept, anew in zip(grown(drafter, following).tensors()[:6], fresh.tensors()[:6], strict=True):
            assert torch.equal(kept, anew)


def test_tokens_are_the_targets_own_and_fewer_passes_make_them():
    prompt = [1, 2, 3]
    known = plain_decode(wandering_target, prompt, 60)
    for table in (None, Table.of([(prompt, known)])):
        drafter = StatisticsDrafter(NGramScorer.default(with_table=table is not None), table)
        decoded = decode(drafter, wandering_target, prompt, 60, new_tree())
        assert decoded.tokens == known
        assert decoded.num_iterations < (50 if table is None else 30)


def test_a_fitted_scorer_weighs_candidates_and_their_absence():
    """Of two candidates one has followed a long context, the other a short one; at other places there is but that."""
    generator = np.random.default_rng(1)
    strong, weak = np.zeros((2, 1 + 2 * NUM_CONTEXTS), dtype=np.int64)
    for features, context, count in ((strong, 3, 3), (weak, 0, 1)):
        features[1 + context] = count
        for each in (strong, weak):
            each[1 + NUM_CONTEXTS + context] = 3 if context else 10
    alone = weak.copy()
    alone[1 + NUM_CONTEXTS + 3] = 0
    features, place, is_right = [], [], []
    for number in range(3000):
        both = number % 2 == 0
        drawn = generator.random()
        rows = [(strong, drawn < 0.8), (weak, 0.8 < drawn < 0.85)] if both else [(alone, drawn < 0.3)]
        for row, hits in rows:
            features.append(row), place.append(number), is_right.append(hits)
    scorer = fit(
        Candidates(np.stack(features), np.array(place), np.array(is_right)), NGramScorer.default(with_table=False)
    )

    def likely(*rows):
        named = np.stack(rows)
        named[:, 0] = np.arange(len(rows))
        return list(likelihoods(scorer, torch.from_numpy(named)).values())

    assert likely(strong, weak) == pytest.approx([0.8, 0.05], abs=0.04)
    assert likely(alone) == pytest.approx([0.3], abs=0.04)


def test_what_never_varies_moves_no_weight_and_a_callers_inference_mode_is_none_of_ours():
    """One candidate a place, always right: there is nothing to learn from its counts, all the same."""
    row = np.zeros(1 + 2 * NUM_CONTEXTS, dtype=np.int64)
    row[1], row[1 + NUM_CONTEXTS] = 49, 49
    usual = NGramScorer.default(with_table=False)
    state = torch.get_rng_state()
    with torch.inference_mode():
        places = Candidates(np.stack([row] * 50), np.arange(50), np.ones(50, dtype=bool))
        found = [fit(places, usual) for _ in range(2)]
        assert mean_loss(found[0], places) == pytest.approx(mean_loss(usual, places), abs=0.5)
    for name in SHAPES:
        ours, again = (getattr(each, name) for each in found)
        assert np.abs(ours - getattr(usual, name)).max() < 1.0
        assert np.array_equal(ours, again)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_was_learned_survives_the_disk_and_damage_is_refused(tmp_path):
    table = Table.of([([1, 2], [3, 3, 1, 2]), ([], [5])])
    table.save(tmp_path / TABLE_FILE)
    SCORER.save(tmp_path / SCORER_FILE)
    drafters = StatisticsDrafter.load(tmp_path, StatisticsOptions()), StatisticsDrafter(SCORER, table)
    for kept, anew in zip(*(grown(drafter, [1, 2]).tensors()[:6] for drafter in drafters), strict=True):
        assert torch.equal(kept, anew)
    (tmp_path / TABLE_FILE).write_bytes((tmp_path / TABLE_FILE).read_bytes()[:-9])
    with pytest.raises(ArtifactError, match=TABLE_FILE):
        StatisticsDrafter.load(tmp_path, StatisticsOptions())
    assert StatisticsDrafter.load(tmp_path, StatisticsOptions(table=False)).name == "text"
    Table.of([]).save(tmp_path / SCORER_FILE)
    with pytest.raises(ArtifactError, match=SCORER_FILE):
        StatisticsDrafter.load(tmp_path, StatisticsOptions(table=False))


@pytest.mark.parametrize(
    ("totals", "counts"), [([0], [1]), ([-1], [1]), ([2], [3]), ([2], [0])], ids=["never", "less", "more", "not"]
)
def test_a_table_of_counts_that_cannot_be_is_refused(totals, counts):
    one, starts = np.array([1]), np.array([0, 1])
    with pytest.raises(ValueError, match="that cannot be"):
        Table.of_columns(one, np.array(totals), starts, one, np.array(counts))


def test_keys_tell_contexts_apart():
    tokens = [0, 1, 2, 262_143, MOST_TOKEN]
    contexts = [context for length in (1, 2, 3) for context in product(tokens, repeat=length)]
    keys = np.array([table_key(context) for context in contexts])
    assert len(set(keys.tolist())) == len(contexts)
    assert has_one_token(keys).tolist() == [len(context) == 1 for context in contexts]
    assert is_longest(keys).tolist() == [len(context) == TABLE_LENGTH for context in contexts]
    with pytest.raises(ValueError, match=f"tokens up to {MOST_TOKEN}"):
        Table.of([([], [MOST_TOKEN + 1])])


def test_of_the_longest_contexts_rare_ones_go_and_nothing_else():
    documents = [([], [1, 2, 3, 4, 1, 2, 3, 5, 6])]
    whole = Table.of(documents)
    kept = whole.without_rare()
    gone = [key for key, total in zip(whole.keys, whole.totals, strict=True) if key not in kept.keys]
    assert set(gone) == {table_key(context) for context in ((2, 3, 4), (3, 4, 1), (4, 1, 2), (2, 3, 5))}
    place = kept.keys.tolist().index(table_key((1, 2, 3)))
    assert sorted(kept.tokens[kept.starts[place] : kept.starts[place + 1]].tolist()) == [4, 5]
    assert kept.totals[place] == 2
    assert kept.num_tokens == whole.num_tokens


def drafted_tree(text, guesses, num_nodes=17, offers=()):
    """A tree of ``guesses``: (parent, token, log-probability), and ``offers`` of the like that were not attached."""
    tree = TokenTree.on_host(num_nodes, candidates=8)
    tree.plant(text[-1])
    for parent, token, log_probability in guesses:
        siblings = [
            int(tree.tokens[node]) for node in range(1, tree.size) if int(tree.parents[node]) == parent % tree.size
        ]
        if tree.size < num_nodes and token not in siblings:
            tree.attach(parent % tree.size, token, log_probability)
    tree.pool_scores.fill_(NO_SCORE)
    for node, token, log_probability in offers:
        place = 8 * (node % tree.size) + token % 3
        tree.pool_tokens[place] = 10 + token % 3  # never one that is attached
        tree.pool_scores[place] = tree.scores[node % tree.size] + log_probability
    return tree


GUESSES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.floats(-4.0, -0.1)), max_size=9)


def filled(drafter, text, tree, depth):
    drafter.begin(text)
    drafter.propose(tree, Budget(depth, is_first=False))
    check_tree(tree)
    return tree


@given(text=TEXT, guesses=GUESSES)
@examples(40)
def test_filling_keeps_every_node_and_the_higher_estimate(text, guesses):
    before = drafted_tree(text, guesses)
    drafter = StatisticsDrafter(SCORER)
    after = filled(drafter, text, drafted_tree(text, guesses), depth=5)
    size = before.size
    assert after.size >= size
    assert torch.equal(after.tokens[:size], before.tokens[:size])
    assert torch.equal(after.parents[:size], before.parents[:size])
    alone = grown(StatisticsDrafter(SCORER), text, num_nodes=200, depth=1)
    said = {int(alone.tokens[node]): float(alone.scores[node]) for node in range(1, alone.size)}
    for node in range(1, size):
        parent = int(before.parents[node])
        fall, was = (float(tree.scores[node] - tree.scores[parent]) for tree in (after, before))
        assert fall >= was - 1e-5
        if parent == 0 and int(before.tokens[node]) in said:
            assert fall >= said[int(before.tokens[node])] - 1e-5


@pytest.mark.parametrize("attached", [False, True], ids=["offered", "attached"])
def test_estimates_of_a_drafter_and_of_counts_are_weighted_by_their_sums(attached):
    """The drafter says 2 (.3, attached), 12 (.1) and 3 (.2, maybe attached); the counts say 3 and 4."""
    text = [1, 3, 1, 4, 1]
    alone = grown(StatisticsDrafter(SCORER), text, depth=1)
    counted = {int(alone.tokens[node]): float(alone.scores[node].exp()) for node in range(1, alone.size)}
    assert set(counted) == {3, 4}
    tree = drafted_tree(text, [(0, 2, log(0.3)), *([(0, 3, log(0.2))] if attached else [])])
    for place, (token, likely) in enumerate([(12, 0.1), (3, 0.2)]):
        tree.pool_tokens[place], tree.pool_scores[place] = token, log(likely)
    filled(StatisticsDrafter(SCORER), text, tree, depth=1)
    assert sorted(tree.tokens[1 : tree.size].tolist()) == [2, 3, 4, 12]

    share = 0.6 / (0.6 + sum(counted.values()))
    found = {int(tree.tokens[node]): float(tree.scores[node].exp()) for node in range(1, tree.size)}
    wanted = {2: 0.3 * share, 12: 0.1 * share, 3: 0.2 * share + counted[3] * (1 - share), 4: counted[4] * (1 - share)}
    assert found == pytest.approx(wanted, rel=1e-4)


def test_a_node_all_of_whose_candidates_are_attached_has_been_read():
    """Eight tokens, of which the counts say one: it is believed by both, and one that only they say by half."""
    text = [1, 3, 1, 14, 1]
    guesses = [(0, token, log(0.1)) for token in range(2, 10)]
    tree = filled(StatisticsDrafter(SCORER), text, drafted_tree(text, guesses), depth=1)
    alone = grown(StatisticsDrafter(SCORER), text, depth=1)
    counted = {int(alone.tokens[node]): float(alone.scores[node].exp()) for node in range(1, alone.size)}
    share = 0.8 / (0.8 + sum(counted.values()))
    found = {int(tree.tokens[node]): float(tree.scores[node].exp()) for node in range(1, tree.size)}
    assert found[2] == pytest.approx(0.1 * share, rel=1e-4)
    assert found[3] == pytest.approx(0.1 * share + counted[3] * (1 - share), rel=1e-4)
    assert found[14] == pytest.approx(counted[14] * (1 - share), rel=1e-4)


def test_what_follows_a_guess_of_another_drafter_is_counted_too():
    text = [1, 2, 3, 4, 5, 9]
    tree = drafted_tree(text, [(0, 2, -0.5)])  # nothing has followed the 9: only the guess has been seen before
    filled(StatisticsDrafter(NGramScorer.default(with_table=False)), text, tree, depth=3)
    assert tree.tokens[2:4].tolist() == [3, 4]
    assert tree.parents[2:4].tolist() == [1, 2]


def test_a_public_pool_counts_what_earlier_requests_said(monkeypatch):
    own, pooled = StatisticsDrafter(SCORER), StatisticsDrafter(SCORER)
    pooled.is_public_pool = True
    for drafter in (own, pooled):
        for text in ([7, 1, 2, 3, 4], [9, 1]):
            drafter.begin(text)
            tree = TokenTree.on_host(8)
            drafter.propose(tree, Budget(3))
    assert own.features(()).numel() == 0
    assert pooled.features(())[:, 0].tolist() == [2]

    monkeypatch.setattr("yggdrasil.drafters.statistics.drafter.POOL_TOKENS", 6)
    pooled.begin([5, 1])  # seven tokens of others
    pooled.propose(TokenTree.on_host(8), Budget(3))
    assert pooled.features(()).numel() == 0


def test_few_tokens_are_passed_in_a_buffer_and_many_at_once():
    """A long prompt, then a few at a time, into trees of two buffers in turns: as if all had been there at first."""
    text = np.random.default_rng(1).integers(0, 5, 400).tolist()
    drafter, pair = StatisticsDrafter(SCORER), (new_tree(), new_tree())
    drafter.begin(text[:300])
    for turn, end in enumerate((301, 304, 400)):
        drafter.extend(text[(300, 301, 304)[turn] : end], {})
        drafter.propose(pair[turn % 2], Budget(4))
        anew, size = grown(StatisticsDrafter(SCORER), text[:end], depth=4), pair[turn % 2].size
        assert size == anew.size > 3
        assert torch.equal(pair[turn % 2].tokens[:size], anew.tokens[:size])
        assert int(pair[turn % 2].tokens[0]) == text[end - 1]


def test_without_a_text_counts_grow_nothing():
    with pytest.raises(RuntimeError, match="no text to grow"):
        StatisticsDrafter(SCORER).propose(new_tree(), Budget(4))


def test_without_the_native_library_lookup_takes_the_place_of_counts(monkeypatch):
    monkeypatch.setattr("yggdrasil.native.is_native", lambda: False)
    monkeypatch.setattr("yggdrasil.drafters.statistics.drafter.is_native", lambda: False)

    assert named_drafters(["text", "table"]).model_free == (NGramOptions(),)
    assert named_drafters(["ngram", "text"], "max_draft_len=3").model_free == (NGramOptions(max_draft_len=3),)
    with pytest.raises(YggdrasilError, match="n-gram statistics need the native library"):
        StatisticsDrafter(SCORER)
