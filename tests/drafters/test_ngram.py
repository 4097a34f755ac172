"""The n-gram drafter against a search that scans the whole text."""

import math

import pytest
import torch
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from integrity import check_tree
from toy_target import decode, paths, plain_decode, wandering_target

from yggdrasil.drafters.model_free_options import NGramOptions
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.protocol import Budget, DrafterGroup, is_model_free
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.tree.token_tree import TokenTree

OPTIONS = st.builds(
    NGramOptions,
    max_draft_len=st.integers(1, 6),
    max_matching_ngram_size=st.integers(1, 4),
    is_keep_all=st.booleans(),
    is_use_oldest=st.booleans(),
    is_public_pool=st.booleans(),
)
TEXT = st.one_of(*(st.lists(st.integers(0, 2), min_size=size, max_size=30) for size in (1, 8, 20)))


def new_tree(num_nodes=64):
    return TokenTree.allocate(num_nodes, candidates=1, device=torch.device("cpu"))


def slow_candidates(earlier, text, options, size, length):
    """Continuations of every place where the last ``size`` tokens occurred before, the preferred one first."""
    found = []  # (length that counts, continuation)
    for other in earlier if options.is_public_pool else []:
        for end in range(size, len(other)):
            if other[end - size : end] == text[len(text) - size :]:
                found.append((min(len(other) - end, options.max_draft_len), other[end : end + length]))
    for end in range(size, len(text)):
        if text[end - size : end] == text[len(text) - size :]:
            copy = list(text)
            while len(copy) < end + length:
                copy.append(copy[end + len(copy) - len(text)])
            found.append((options.max_draft_len, copy[end : end + length]))
    if not options.is_keep_all:
        longest = max((counts for counts, _ in found), default=0)
        found = [(counts, tokens) for counts, tokens in found if counts == longest][:1]
    elif not options.is_use_oldest:
        found.reverse()
    return [tokens for _, tokens in found]


def slow_paths(earlier, text, options, width, depth):
    """Root-to-node token paths of the tree that the drafter should grow."""
    tree, num_chains = [], 0
    length = min(depth, options.max_draft_len)
    for size in range(min(options.max_matching_ngram_size, len(text)), 0, -1):
        for tokens in slow_candidates(earlier, text, options, size, length):
            new = [tuple(tokens[:end]) for end in range(1, len(tokens) + 1) if tuple(tokens[:end]) not in tree]
            if num_chains < width:
                tree += new
                num_chains += bool(new)
    return tree


def split(text, sizes):
    """``text`` cut into a prompt and pieces of the given sizes, cycled."""
    pieces, start = [], 0
    while start < len(text):
        pieces.append(text[start : start + sizes[len(pieces) % len(sizes)]])
        start += len(pieces[-1])
    return pieces


@examples(500)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=3),
    options=OPTIONS,
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    width=st.integers(1, 4),
    depth=st.integers(1, 7),
)
@example(  # the one different candidate is the 33rd place from the end
    texts=[[0, 1] + [0] * 8, [0] * 26],
    options=NGramOptions(1, 1, is_keep_all=True, is_use_oldest=False, is_public_pool=True),
    sizes=[1],
    width=2,
    depth=1,
)
def test_tree_is_what_a_scan_of_the_text_finds(texts, options, sizes, width, depth):
    drafter, tree = NGramDrafter(options), new_tree()
    closed = []
    for number, text in enumerate(texts):
        prompt, *pieces = split(text, sizes)
        if number and prompt[: len(texts[number - 1])] != texts[number - 1]:  # else it goes on with that text
            closed.append(texts[number - 1])
        drafter.begin(prompt)
        for piece in pieces:
            drafter.extend(piece, {})
        draft(drafter, tree, width, depth)

        check_tree(tree)
        assert paths(tree) == slow_paths(closed, text, options, width, depth)
        assert torch.bincount(tree.depths[1 : tree.size], minlength=1).max() <= width


@pytest.mark.parametrize(
    ("is_keep_all", "texts", "expected"),
    [
        (False, [[5, 7, 8], [4, 5, 6], [5]], (7, 8)),  # the longest of two that the ends of their texts cut short
        (False, [[4, 5, 6], [5, 7, 8], [5]], (7, 8)),
        (False, [[5, 7], [5, 8], [5]], (7,)),  # the first of two equals
        (False, [[5, 7, 8], [5, 1, 2, 5]], (1, 2, 5)),  # a text that goes on leaves nothing short
        (True, [[3, 5, 7], [5, 8], [5]], (7,)),  # a text's beginning is no n-gram of its own
    ],
)
def test_a_public_pool_reads_closed_texts_to_their_end(is_keep_all, texts, expected):
    options = NGramOptions(max_draft_len=3, is_keep_all=is_keep_all, is_public_pool=True)
    drafter, tree = NGramDrafter(options), new_tree()
    for text in texts:
        drafter.begin(text)
    draft(drafter, tree, 1, 3)

    assert paths(tree)[-1] == expected
    assert paths(tree) == slow_paths(texts[:-1], texts[-1], options, 1, 3)


@examples(50)
@given(text=TEXT, options=OPTIONS, num_nodes=st.integers(1, 6))
def test_a_small_tree_holds_the_first_nodes(text, options, num_nodes):
    drafter = NGramDrafter(options)
    small, large = new_tree(num_nodes), new_tree()
    drafter.begin(text)
    for tree in (small, large):
        draft(drafter, tree, 3, 4)

    check_tree(small)
    assert paths(small) == paths(large)[: num_nodes - 1]


@examples(50)
@given(text=TEXT, options=OPTIONS)
def test_children_share_at_most_the_whole_probability(text, options):
    drafter, tree = NGramDrafter(options), new_tree()
    drafter.begin(text)
    draft(drafter, tree, 4, 4)

    shares = [0.0] * tree.size
    for parent, edge in zip(tree.parents[1 : tree.size].tolist(), tree.edges[1 : tree.size].tolist(), strict=True):
        shares[parent] += math.exp(edge)
    assert max(shares) < 1.0


def draft(drafter, tree, width, depth):
    tree.plant(0)  # whoever proposes does not look at it
    drafter.propose(tree, Budget(depth, width))


def grown_edges(drafter, width=1, depth=3):
    tree = new_tree()
    draft(drafter, tree, width, depth)
    return tree.edges[1 : tree.size].exp().tolist()


def test_a_longer_match_is_trusted_more():
    drafter = NGramDrafter(NGramOptions(max_matching_ngram_size=3))
    drafter.begin([1, 2, 3, 4, 5, 9, 3])  # only a 1-gram matches, and nothing was graded before

    assert grown_edges(drafter) == pytest.approx([1 / 2, 2 / 3, 3 / 4])


def test_trust_follows_what_was_accepted():
    drafter = NGramDrafter(NGramOptions(max_matching_ngram_size=1))
    drafter.begin([1, 2, 1])
    [before] = grown_edges(drafter, depth=1)
    drafter.extend([2, 1], {})
    [after_hits] = grown_edges(drafter, depth=1)
    for token in (3, 4, 5, 6):
        drafter.extend([token, 1], {})  # 2 was the guess each time
    [after_misses] = grown_edges(drafter, depth=1)

    assert after_misses < before < after_hits
    drafter.begin([1, 2, 1])
    assert grown_edges(drafter, depth=1) == [before]  # a private pool forgets with its request


def test_options_name_every_fault():
    with pytest.raises(ValueError, match=r"max_draft_len must be at least 1, got 0; max_matching_ngram_size .* got -2"):
        NGramOptions(max_draft_len=0, max_matching_ngram_size=-2)


@pytest.mark.parametrize("is_keep_all", [True, False])
@pytest.mark.parametrize("is_use_oldest", [True, False])
@pytest.mark.parametrize("is_public_pool", [True, False])
def test_output_equals_plain_decoding(is_keep_all, is_use_oldest, is_public_pool):
    drafter = NGramDrafter(NGramOptions(5, 3, is_keep_all, is_use_oldest, is_public_pool))
    expected = plain_decode(wandering_target, [1, 4], 120)
    for _ in range(2):
        decoded = decode(drafter, wandering_target, [1, 4], 120, new_tree(9))
        assert decoded.tokens == expected
        assert decoded.num_iterations < 120
    if is_public_pool:  # the second request reads what the first one wrote
        assert decoded.num_iterations < 60


def test_a_look_up_drafts_alone_and_beside_another():
    prompt = [1, 2, 3]
    plain = plain_decode(wandering_target, prompt, 60)
    alone = decode(NGramDrafter(), wandering_target, prompt, 60, new_tree())

    assert is_model_free(NGramDrafter())
    assert alone.tokens == plain
    assert alone.num_iterations < 55
    for parts in ([NGramDrafter(), default_statistics()], [default_statistics(), NGramDrafter()]):
        several = decode(DrafterGroup(parts), wandering_target, prompt, 60, new_tree())
        assert several.tokens == plain
        assert several.num_iterations < alone.num_iterations
