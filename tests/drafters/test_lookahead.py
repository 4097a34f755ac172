"""Lookahead decoding: n-grams that the target itself made ahead of the text are guessed, and nothing else changes."""

import pytest
import torch
from tiny_pair import TEXT, make_pair

from yggdrasil import SamplingParams
from yggdrasil.drafters import LookaheadDrafter, LookaheadOptions
from yggdrasil.drafters.counts import usual_counts
from yggdrasil.drafters.named import named_drafters, names_of
from yggdrasil.drafters.protocol import ReadingDrafter, together
from yggdrasil.engine.policy import FreeTreePolicy
from yggdrasil.tree.token_tree import TokenTree

PROMPT = TEXT[:21]
COUNT = 40
OPTIONS = LookaheadOptions(max_window_size=3, max_ngram_size=4, max_verification_set_size=2)


def said(text):
    """A made-up target that goes through all of 96 tokens: columns that begin elsewhere are ahead of the text."""
    return (5 * text[-1] + 3) % 97


def paths_of(tree):
    paths = {0: ()}
    for node in range(1, tree.size):
        paths[node] = (*paths[int(tree.parents[node])], int(tree.tokens[node]))
    return paths


class Run:
    """Decodes as an engine that verifies every node would, and remembers what was seen of the drafter."""

    def __init__(self, drafter, prompt):
        self.drafter, self.text = drafter, list(prompt)
        drafter.begin(prompt[:1])
        drafter.extend(prompt[1:], {})
        self.tree = TokenTree.on_host(64)

    def iterate(self, depth=8):
        """Returns the window that was verified, what the target said behind each path, and the tokens it gave."""
        self.drafter.plant(self.tree, depth)
        window = [list(level) for level in self.drafter._window]
        paths = paths_of(self.tree)
        choices = {path: said([*self.text, *path]) for path in paths.values()}
        self.drafter.read(self.tree, list(paths), [choices[path] for path in paths.values()])
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
    drafter.plant(tree, 8)
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
    drafter.read(tree, [0, 1, 2], [4, 5, 6])

    assert drafter._pool[3] == {(4, 5, 6): False}  # the target said it, behind no column of a window
    drafter.extend([4, 5, 6], {})
    drafter.plant(tree, 8)
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
        fails.plant(tree, 8)
        nodes = list(range(tree.size))
        fails.read(tree, nodes, torch.randint(0, 10**6, (len(nodes),), generator=noise).tolist())
        fails.extend([10**6 + step], {})

    assert len(run.text) > 130  # it decodes faster than a token a pass
    assert fails._credit.value < 0.2 * before < brings._credit.value


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside counts"])
@pytest.mark.parametrize("stages", ["as they are", "books late"])
def test_no_output_shows_it(pair, beside, stages):
    drafters = [LookaheadDrafter(), *([usual_counts()] if beside else [])]
    assert isinstance(drafters[0], ReadingDrafter)
    options = {}
    if stages == "books late":
        from yggdrasil.scheduling.stages import DEFAULT_ORDER

        options["stages"] = [stage.replace("bookkeeping=inline", "bookkeeping=overlapped") for stage in DEFAULT_ORDER]
    decoder = pair.decoder(FreeTreePolicy(16), drafter=None, free=together(drafters), **options)
    result = decoder.generate(PROMPT, max_new_tokens=COUNT)

    assert result.tokens == pair.reference(PROMPT, COUNT)
    assert drafters[0]._credit.tried > 100  # the window was read
    again = decoder.generate(TEXT[5:30], max_new_tokens=COUNT)
    assert again.tokens == pair.reference(TEXT[5:30], COUNT)


def test_sampling_with_a_seed_is_what_the_target_alone_samples(pair):
    decoder = pair.decoder(FreeTreePolicy(16), drafter=None, free=LookaheadDrafter())
    sampling = SamplingParams(temperature=40.0, seed=1)

    ours = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling)
    alone = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, speculation=False)

    assert ours.tokens == alone.tokens


def test_it_is_named_like_other_drafters():
    named = named_drafters(["lookahead"])

    assert named.drafter is None
    assert named.free == (LookaheadOptions(),)
    assert names_of(named.free) == {"lookahead"}
    assert names_of(named_drafters(["lookahead", "text"]).free) == {"lookahead", "text"}
    with pytest.raises(ValueError, match="max_ngram_size must be at least 2, got 1"):
        LookaheadOptions(max_ngram_size=1)
