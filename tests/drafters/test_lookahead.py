"""Lookahead decoding: n-grams that the target itself made ahead of the text are guessed, and nothing else changes."""

import math

import numpy as np
import pytest
import torch
from tiny_pair import TEXT, make_pair

from yggdrasil import SamplingParams
from yggdrasil.drafters import LookaheadDrafter, LookaheadOptions
from yggdrasil.drafters.protocol import Budget, DrafterGroup
from yggdrasil.drafters.registry import named_drafters, names_of
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.policy.fixed import ModelFreePolicy
from yggdrasil.policy.objective import UNBOUNDED, stopping_bound
from yggdrasil.tree.token_tree import Ranking, TokenTree

PROMPT = TEXT[:21]
COUNT = 40
DEAR = stopping_bound([2, 4, 16], [1.0, 0.5, 0.1])  # a row costs what half a token does
CHEAP = stopping_bound([2, 4, 16], [1.0, 0.99, 0.9])
OPTIONS = LookaheadOptions(max_window_size=3, max_ngram_size=4, max_verification_set_size=2)


def said(text):
    """A made-up target that goes through all of 96 tokens: columns that begin elsewhere are ahead of the text."""
    return (5 * text[-1] + 3) % 97


def paths_of(tree):
    paths = {0: ()}
    for node in range(1, tree.size):
        paths[node] = (*paths[int(tree.parents[node])], int(tree.tokens[node]))
    return paths


def draft(drafter, tree, depth):
    tree.plant(drafter._text[-1])
    drafter.propose(tree, Budget(depth))


class Run:
    """Decodes as an engine that verifies every node would, and remembers what was seen of the drafter."""

    def __init__(self, drafter, prompt):
        self.drafter, self.text = drafter, list(prompt)
        drafter.begin(prompt[:1])
        drafter.extend(prompt[1:], {})
        self.tree = TokenTree.on_host(64)

    def iterate(self, depth=8):
        """Returns the window that was verified, what the target said behind each path, and the tokens it gave."""
        draft(self.drafter, self.tree, depth)
        window = [list(level) for level in self.drafter._window]
        paths = paths_of(self.tree)
        choices = {path: said([*self.text, *path]) for path in paths.values()}
        self.drafter.capabilities.read_choices(self.tree, list(paths), [choices[path] for path in paths.values()])
        accepted = ()
        while (*accepted, choices[accepted]) in choices:
            accepted = (*accepted, choices[accepted])
        tokens = [*accepted, choices[accepted]]
        self.drafter.extend(tokens, {})
        self.text += tokens
        return window, choices, tokens


def test_the_window_is_a_chain_with_each_columns_later_levels_below_it():
    drafter = LookaheadDrafter(OPTIONS)
    run = Run(drafter, [1, 2, 3, 4, 5])
    (oldest, second, third), choices, _ = run.iterate()

    for column in range(3):
        chain = tuple(oldest[: column + 1])
        for path in (chain, (*chain, second[column]), (*chain, second[column], third[column])):
            assert path in choices


def test_a_column_becomes_an_n_gram_of_the_targets_and_the_window_moves_with_the_text():
    """Whatever became certain, a token of the window stays a guess at the same place of the text."""
    drafter = LookaheadDrafter(OPTIONS)
    run = Run(drafter, [1, 2, 3, 4, 5])
    advances = set()
    for _ in range(60):
        window, choices, tokens = run.iterate()
        newest = []
        for column in range(3):
            path = (*window[0][: column + 1], window[1][column], window[2][column])
            newest.append(choices[path])
            made = (window[1][column], window[2][column], choices[path])
            assert made in drafter._pool[window[0][column]]
        advance = len(tokens)
        advances.add(min(advance, 3))
        levels = [window[1], window[2], newest]
        for level, kept in zip(levels, drafter._window, strict=True):
            assert kept[: max(3 - (advance - 1), 0)] == level[advance - 1 :]
            assert len(kept) == 3
    assert len(advances) > 1


def test_guesses_are_the_newest_n_grams_that_begin_with_the_root():
    drafter = LookaheadDrafter(LookaheadOptions(1, 3, 2))
    drafter.begin([5])
    drafter.extend([1, 2, 5, 3, 4, 5, 6, 7, 5], {})
    tree = TokenTree.on_host(16)
    draft(drafter, tree, 8)
    paths = paths_of(tree).values()

    assert {(6,), (6, 7), (3,), (3, 4)} <= set(paths)
    assert (1,) not in paths
    first, second = (next(n for n, p in paths_of(tree).items() if p == path) for path in ((6,), (3,)))
    assert tree.scores[first] > tree.scores[second]


def test_a_tree_to_which_it_added_nothing_is_read_all_the_same():
    """A calibration times the trees of the drafter that it stands beside before any is filled."""
    drafter, tree = LookaheadDrafter(OPTIONS), TokenTree.on_host(64)
    drafter.begin([1])
    drafter.extend([2, 3], {})
    tree.plant(3)
    tree.graft([0, 1], [4, 5], [-0.1, -0.1])
    drafter.capabilities.read_choices(tree, [0, 1, 2], [4, 5, 6])

    assert drafter._pool[3] == {(4, 5, 6): False}  # the target said it, behind no column of a window
    drafter.extend([4, 5, 6], {})
    draft(drafter, tree, 8)
    assert len(drafter._window) == OPTIONS.max_ngram_size - 1


def test_a_window_that_brings_nothing_gets_cheaper_and_one_that_brings_gets_dearer():
    """What its rows are worth is what their n-grams brought."""
    brings, fails = LookaheadDrafter(OPTIONS), LookaheadDrafter(OPTIONS)
    before = brings._credit.value
    run = Run(brings, [1, 2, 3, 4, 5])
    for _ in range(100):
        run.iterate()
    noise = torch.Generator().manual_seed(0)
    fails.begin([1])
    tree = TokenTree.on_host(64)
    for step in range(60):
        draft(fails, tree, 8)
        nodes = list(range(tree.size))
        fails.capabilities.read_choices(tree, nodes, torch.randint(0, 10**6, (len(nodes),), generator=noise).tolist())
        fails.extend([10**6 + step], {})

    assert len(run.text) > 130  # it decodes faster than a token a pass
    assert fails._credit.value < 0.2 * before < brings._credit.value


def other_guesses():
    """A drafter and a tree in which others have guessed already: 3, and behind it 4, and 7."""
    drafter, tree = LookaheadDrafter(LookaheadOptions(2, 3, 2)), TokenTree.on_host(32)
    drafter.begin([5])
    drafter.extend([8, 2, 5, 3, 4, 5, 3, 9, 5], {})
    tree.plant(5)
    tree.graft([0, 1, 0], [3, 4, 7], [math.log(0.5), math.log(0.4), math.log(0.1)])
    return drafter, tree


def test_what_others_have_guessed_is_theirs():
    """Only new nodes are added, and they share what is left where they hang."""
    drafter, tree = other_guesses()
    before = tree.scores[:4].clone()
    drafter.propose(tree, Budget(8))
    added = {path: float(tree.scores[node].exp()) for node, path in paths_of(tree).items() if node > 3}

    assert torch.equal(tree.scores[:4], before)
    assert added[3, 9] == pytest.approx(0.5 * 0.6 * 0.25, rel=1e-3)
    assert (8,) not in added  # it began with another token
    tree.check_integrity()


def test_guesses_are_judged_whether_they_were_verified_or_not_and_those_of_others_never():
    drafter, tree = other_guesses()
    drafter.propose(tree, Budget(8, bound=DEAR))
    first, second = ((rate.came, rate.tried) for rate in drafter._rates)
    drafter.extend([3, 9], {})

    assert (drafter._rates[0].came, drafter._rates[0].tried) == first  # 3 was there
    assert (drafter._rates[1].came, drafter._rates[1].tried) == (second[0] + 1, pytest.approx(second[1] + 0.6))


def test_what_is_worth_no_row_is_not_put_into_the_tree(monkeypatch):
    """Whatever is left out costs no write: neither guesses nor a window."""
    grafts = []
    whole = TokenTree.graft
    monkeypatch.setattr(TokenTree, "graft", lambda tree, *guesses: grafts.append(1) or whole(tree, *guesses))
    left_out, carried = other_guesses(), other_guesses()
    grafts.clear()
    left_out[0].propose(left_out[1], Budget(8, bound=DEAR))
    assert (grafts, left_out[1].size, left_out[0]._window) == ([], 4, [])

    carried[0].propose(carried[1], Budget(8, bound=CHEAP))
    assert len(grafts) == 1  # for all that is added
    assert carried[1].size > 4 + 2
    assert carried[0]._window


def test_a_window_that_has_brought_nothing_is_not_put_into_rows_that_cost_nothing_either():
    drafter, tree = other_guesses()
    drafter._credit.add(0.0, tried=1e4)
    drafter.propose(tree, Budget(8))

    assert drafter._window == []
    assert tree.size == 5


def test_what_is_left_out_is_worth_no_pass():
    """Over all widths, a tree with everything in it is worth no more."""
    generator, left_out, worse, widths = np.random.default_rng(5), 0, 0, (1, 2, 4, 8, 16, 32)
    for _ in range(100):
        weights = np.cumprod(generator.uniform(0.6, 1.0, len(widths) - 1))
        correction = generator.uniform(0.3, 1.2)
        bound = stopping_bound(widths[1:], weights.tolist(), correction)
        text, guesses = generator.integers(0, 6, 40).tolist(), generator.integers(1, 12)
        parents = [int(generator.integers(0, node + 1)) for node in range(guesses)]
        edges = np.log(generator.uniform(0.05, 0.3, guesses)).tolist()
        best = []
        for each in (UNBOUNDED, bound):
            drafter, tree = LookaheadDrafter(LookaheadOptions(4, 2, 4)), TokenTree.on_host(64)
            drafter.begin(text)
            tree.plant(text[-1])
            tree.graft(parents, list(range(guesses)), edges)
            drafter.propose(tree, Budget(8, bound=each))
            promised = Ranking(tree, widths).rank()[1:]
            best.append(max((1 + (p - 1) * correction) * w for p, w in zip(promised, weights, strict=True)))
            left_out += tree.size if each is UNBOUNDED else -tree.size
        worse += best[1] < best[0] * (1 - 1e-5)
    assert worse <= 2  # a row of the window may be a guess too, and was counted twice
    assert left_out > 300


def test_beside_counts_it_comes_last_and_both_know_what_is_at_stake():
    lookahead, counts = LookaheadDrafter(), default_statistics()
    both, tree, alone = DrafterGroup([lookahead, counts]), TokenTree.on_host(64), TokenTree.on_host(64)
    assert both.drafters == [counts, lookahead]
    prompt = [1, 2, 3, 1, 2, 4, 1, 2]
    both.begin(prompt)
    both.propose(tree, Budget(8, bound=DEAR))
    other = default_statistics()
    other.begin(prompt)
    other.propose(alone, Budget(8, bound=DEAR))

    assert paths_of(tree) == paths_of(alone)
    assert torch.equal(tree.scores, alone.scores)
    other.propose(alone, Budget(8))
    assert alone.size > tree.size


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside counts"])
@pytest.mark.parametrize("stages", ["as they are", "books late", "captured"])
def test_no_output_shows_it(pair, beside, stages):
    drafters = [LookaheadDrafter(), *([default_statistics()] if beside else [])]
    assert drafters[0].capabilities.read_choices is not None
    options = {"backend": "cudagraph"} if stages == "captured" else {}
    if stages == "books late":
        from yggdrasil.scheduling.stages import DEFAULT_ORDER

        options["stages"] = [stage.replace("bookkeeping=inline", "bookkeeping=overlapped") for stage in DEFAULT_ORDER]
    decoder = pair.decoder(ModelFreePolicy(16), drafter=None, model_free=DrafterGroup(drafters), **options)
    result = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert result.tokens == pair.reference(PROMPT, COUNT)
    assert drafters[0]._credit.tried > 100  # the window was read
    again = decoder.generate(TEXT[5:30], max_new_tokens=COUNT)
    assert again.tokens == pair.reference(TEXT[5:30], COUNT)


class DearRows(ModelFreePolicy):
    """Verifies four nodes, since further ones are worth less than they cost."""

    def __init__(self):
        super().__init__(4)

    def bound(self, context, shape=None):
        return DEAR


def test_beside_counts_that_guess_it_adds_nothing_that_the_objective_leaves_out(pair):
    lookahead, sizes = LookaheadDrafter(), []
    for rate in lookahead._rates:
        rate.add(0.0, tried=1e4)
    whole = lookahead.propose

    def propose(tree, budget):
        before = tree.size
        whole(tree, budget)
        sizes.append((before, tree.size))

    lookahead.propose = propose
    decoder = pair.decoder(DearRows(), drafter=None, model_free=DrafterGroup([lookahead, default_statistics()]))
    result = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert result.tokens == pair.reference(PROMPT, COUNT)
    assert sum(before > 1 for before, _ in sizes) > 5
    assert all(after == before for before, after in sizes if before > 1)


def test_sampling_with_a_seed_is_what_the_target_alone_samples(pair):
    decoder = pair.decoder(ModelFreePolicy(16), drafter=None, model_free=DrafterGroup([LookaheadDrafter()]))
    sampling = SamplingParams(temperature=40.0, seed=1)

    ours = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling)
    alone = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, speculation=False)

    assert ours.tokens == alone.tokens


def test_it_is_named_like_other_drafters():
    named = named_drafters(["lookahead"])

    assert named.drafter is None
    assert named.model_free == (LookaheadOptions(),)
    assert names_of(named.model_free) == {"lookahead"}
    assert names_of(named_drafters(["lookahead", "text"]).model_free) == {"lookahead", "text"}
    with pytest.raises(ValueError, match="max_ngram_size must be at least 2, got 1"):
        LookaheadOptions(max_ngram_size=1)
