"""After every commit the caches hold what a fresh pass over the text would put there, in buffers that never move."""

import pytest
import torch
from tiny_pair import SHAPES, TEXT, addresses, cache_rows

from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

PROMPT = TEXT[:21]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


class Mixed(FixedPolicy):
    """Plain steps between trees of every shape: the drafter has to catch up by one token and by many."""

    def __init__(self):
        super().__init__(PLAIN_STEP)
        self._shapes = [TreeShape(4, 4, 16), TreeShape(1, 3, 4), PLAIN_STEP, TreeShape(2, 4, 8), *[PLAIN_STEP] * 9]
        self._asked = 0

    def choose(self, context, model_free=None, features=None):
        shape = self._shapes[self._asked % len(self._shapes)]
        self._asked += 1
        return Decision(shape, is_drafting=shape.depth > 0)

    def prune(self, decision, expected, context):
        return decision


POLICIES = [PLAIN_POLICY, *map(FixedPolicy, (TreeShape(1, 4, 4), TreeShape(4, 4, 16), TreeShape(2, 3, 8))), Mixed()]
policies = pytest.mark.parametrize("policy", POLICIES, ids=["plain", "chain", "wide", "tree", "mixed"])


def assert_rows_equal(cache, expected, length):
    for ours, theirs in zip(cache.tensors(), expected, strict=True):
        torch.testing.assert_close(ours[:, :length], theirs[:, :length], **TOLERANCE)


@policies
def test_rows_equal_a_fresh_pass_after_every_commit(pair, policy, monkeypatch):
    decoder = pair.decoder(policy)
    decoder.generate(TEXT[40:60], max_new_tokens=30)  # whatever another request leaves behind must not matter
    text = [*PROMPT, *pair.reference(PROMPT, 60)]
    target_rows, drafter_rows = cache_rows(pair.plain_target, text), cache_rows(pair.plain_drafter, text)
    target, drafter = decoder.assembly.engine.target, decoder.assembly.engine.drafter
    committed, commit, grow = [], target.commit, drafter.grow

    def commit_and_check(rows):
        before = target.length
        commit(rows)
        committed.append(rows)
        assert target.length == before + len(rows)
        assert_rows_equal(target.runner.cache, target_rows, target.length)

    def grow_and_check(width, depth):
        grow(width, depth)  # its nodes lie behind the rows of the text
        assert_rows_equal(drafter.runner.cache, drafter_rows, target.length + 1)

    monkeypatch.setattr(target, "commit", commit_and_check)
    monkeypatch.setattr(drafter, "grow", grow_and_check)
    generation = decoder.generate(PROMPT, max_new_tokens=50)

    assert [*PROMPT, *generation.tokens] == text[: len(PROMPT) + 50]
    assert target.length >= len(PROMPT) + 49
    if SHAPES.verify_widths[-1] in generation.metrics.verify_widths:
        assert any(rows != list(range(len(rows))) for rows in committed)  # some rows really had to move


@policies
def test_no_buffer_moves_during_a_request(pair, policy):
    decoder = pair.decoder(policy)
    before = addresses(decoder)
    for _ in decoder.start(PROMPT, max_new_tokens=40):
        assert addresses(decoder) == before
    decoder.generate(TEXT[40:47], max_new_tokens=10)

    assert addresses(decoder) == before
