"""Look-ups of other engines, played: they draft what the engines draft."""

import json
from pathlib import Path

import pytest

from yggdrasil.calibration.own_text import Document
from yggdrasil.export.lookups import NGramMod, NGramSimple
from yggdrasil.export.lookups_elsewhere import PromptLookUp, SuffixDecoding, TrieChain
from yggdrasil.export.playing import Drafts, play, predict
from yggdrasil.policy.costs import StepCosts

# What llama-server (llama.cpp 0.5.0-dev, 0c1e570) said it drafted, and how much of it stood: three requests in turn of
# SmolLM2-135M-Instruct, greedily, 64 tokens each.
RECORDED = json.loads(Path(__file__).with_name("llama_server_drafts.json").read_text())
KINDS = {"ngram-simple": NGramSimple, "ngram-mod": NGramMod}
STEPS = StepCosts(10.0, {1: 10.0}, {1: 10.0, 2: 11.0, 3: 13.0, 4: 16.0, 5: 20.0}, 0.0, 10.0)


@pytest.mark.parametrize("setting", sorted(RECORDED["drafted"]))
def test_llama_servers_look_ups_draft_what_it_said(setting):
    kind, *sizes = setting.split()
    look_up = KINDS[kind](*map(int, sizes))

    played = []
    for prompt, answer in zip(RECORDED["prompts"], RECORDED["answers"], strict=True):
        counts = play(look_up, [Document(prompt, answer)]).counts
        drafted = sum(drafted * passes for (drafted, _), passes in counts.items())
        played.append([drafted, sum(accepted * passes for (_, accepted), passes in counts.items())])

    assert played == RECORDED["drafted"][setting]


def drafted(look_up, text, prompt=()):
    look_up.begin(list(prompt))
    return list(look_up.draft(list(text)))


def test_vllms_ngram_takes_the_first_place_of_the_longest_match():
    """The example of its own documents; then the earlier of two places, and the longer of two matches."""
    assert drafted(PromptLookUp(2, 3, 4), [1, 2, 3, 4, 2, 3]) == [4, 2, 3]
    assert drafted(PromptLookUp(1, 2, 1), [7, 5, 7, 6, 7]) == [5]
    assert drafted(PromptLookUp(1, 2, 1), [1, 7, 5, 2, 7, 6, 2, 7]) == [6]
    assert drafted(PromptLookUp(2, 3, 4), [1, 2, 3, 4, 5]) == []


def test_vllms_suffix_takes_the_commonest_path_and_stops_where_shares_are_small():
    text = [9, 1, 2, 8, 9, 1, 3, 7, 9, 1, 2, 6, 9]

    assert drafted(SuffixDecoding(4, 2.0, 0.1, 24), text) == [1, 2]
    assert drafted(SuffixDecoding(4, 2.0, 0.7, 24), text) == [1]
    assert drafted(SuffixDecoding(4, 1.0, 0.1, 24), text) == [1]
    assert drafted(SuffixDecoding(4, 1.0, 0.1, 24), [1, 2, 3]) == []


def test_vllms_suffix_prefers_what_a_longer_match_makes_sure():
    text = [1, 5, 8, 2, 5, 9, 3, 5, 9, 1, 5]

    assert drafted(SuffixDecoding(2, 1.0, 0.1, 24), text) == [8, 2]


def test_sglangs_trie_takes_the_last_place_of_the_longest_suffix_within_its_depth():
    assert drafted(TrieChain(2, 18), [1, 2, 3, 1, 2, 4, 1, 2]) == [4, 1]
    assert drafted(TrieChain(2, 18), [5, 2, 3, 6, 2, 4, 5, 2]) == [3, 6]
    assert drafted(TrieChain(4, 3), [1, 2, 3, 4, 1, 2]) == [3]
    assert drafted(TrieChain(4, 18), [1, 2, 3]) == []


@pytest.mark.parametrize("make", [lambda: NGramSimple(1, 2), lambda: NGramMod(1, 1, 2), lambda: PromptLookUp(1, 1, 2)])
def test_every_token_of_an_answer_is_counted_once(make):
    """Whatever is drafted, passes and what they keep add up to the answer behind its first token."""
    document = Document([1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 4, 2, 3, 1])

    drafts = play(make(), [document, document])

    assert drafts.tokens == 16
    assert sum((accepted + 1) * passes for (_, accepted), passes in drafts.counts.items()) == 16
    assert any(accepted for _, accepted in drafts.counts)


def test_the_objective_over_a_play():
    """Five plain passes, two of which draft two and keep one: by hand."""
    drafts = Drafts(9, {(0, 0): 5, (2, 1): 2})

    predicted = predict(drafts, STEPS)

    assert predicted.aal == pytest.approx(9 / 7)
    assert predicted.ms_per_token == pytest.approx((5 * 10.0 + 2 * 13.0) / 9)
    assert predicted.speedup == pytest.approx(10.0 / predicted.ms_per_token)


def test_an_engine_that_always_verifies_the_same_pays_for_it():
    drafts = Drafts(9, {(0, 0): 5, (2, 1): 2})

    assert predict(drafts, STEPS, verified=3).ms_per_token == pytest.approx(7 * 13.0 / 9)
