"""The target's runners-up as guesses: read off the passes that run anyway, exact by every rule, and what they hold."""

from dataclasses import replace

import pytest
import torch
from tiny_pair import SHAPES, TEXT

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.drafters.statistics.drafter import default_statistics
from yggdrasil.policy.fixed import FixedPolicy, ModelFreePolicy
from yggdrasil.runtime.forward import NUM_RUNNERS_UP, likeliest_tokens
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.shape import TreeShape

PROMPT, COUNT = TEXT[:24], 40
SCHEDULES = {"device": {}, "host": {"accept": "host"}, "ahead": {"head_draft": "ahead", "tail_draft": "ahead"}}


class Noting:
    """Counts that recycle, and a note of all they are told."""

    def __init__(self):
        self.counts, self.told = default_statistics(recycles=True), []
        self.name, self.capabilities = self.counts.name, replace(self.counts.capabilities, read_runners_up=self._note)

    def _note(self, tokens, continuations):
        assert len(tokens) == len(continuations)
        self.told.append((list(tokens), continuations.clone()))
        self.counts.capabilities.read_runners_up(tokens, continuations)

    def __getattr__(self, name):
        return getattr(self.counts, name)


@pytest.mark.parametrize("size", [5, 96, 512, 513, 1000, 4097])
def test_the_likeliest_are_those_of_a_sort(size):
    logits = torch.randn(7, size, generator=torch.Generator().manual_seed(size))
    expected = logits.sort(descending=True).indices[:, :NUM_RUNNERS_UP]
    assert torch.equal(likeliest_tokens(logits), expected)


@pytest.mark.parametrize("variants", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a drafter"])
def test_what_is_told_is_what_the_target_found_likeliest(pair, variants, beside):
    """Of every row that was verified, refused ones too: each behind its own path."""
    free, seen = Noting(), []
    policy = FixedPolicy(TreeShape(2, 3, 8)) if beside else ModelFreePolicy(8)
    made = {"model_free": free, "stages": Schedule.of(variants).labels, "drafter": pair.drafter if beside else None}
    decoder = pair.decoder(policy, **made)
    generation = decoder.generate(PROMPT, max_new_tokens=COUNT, watch=seen.append)
    assert generation.tokens == pair.reference(PROMPT, COUNT)

    (last,), first = free.told[0]
    assert last == PROMPT[-1]
    text, rows = [*PROMPT, generation.tokens[0]], 0
    assert torch.equal(first[0], _likeliest(pair, PROMPT))
    for tree, (tokens, continuations) in zip(seen, free.told[1:], strict=True):
        assert tokens[0] == text[-1]
        for row, node in enumerate(sorted(tree.verified) if len(tokens) > 1 else [0]):
            path = []
            while node:
                path.insert(0, tree.tokens[node])
                node = tree.parents[node]
            assert tokens[row] == [text[-1], *path][-1]
            assert torch.equal(continuations[row], _likeliest(pair, [*text, *path]))
            rows += 1
        text += [*(tree.tokens[node] for node in tree.accepted[1:]), tree.bonus]
    assert rows > 2 * len(seen)
    assert generation.metrics.accepted > 0


@torch.no_grad()
def _likeliest(pair, text):
    return pair.plain_target(torch.tensor([list(text)])).logits[0, -1].topk(NUM_RUNNERS_UP).indices


RULES = {
    "greedy": (SamplingParams(), Speculation()),
    "strict": (SamplingParams(), Speculation(exactness="strict", tolerance=0.5)),
    "drawn": (SamplingParams(temperature=0.9, seed=3), Speculation()),
}


@pytest.mark.parametrize(("sampling", "speculation"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("width", [2, 16])
def test_recycling_moves_no_token(pair, sampling, speculation, width):
    free = Noting()
    decoder = pair.decoder(ModelFreePolicy(width), drafter=None, model_free=free)
    alone = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, speculation=False)
    generation = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, speculation=speculation)

    assert generation.tokens == alone.tokens
    assert generation.metrics.model_free_trees > COUNT // 4
    assert len(free.told) > COUNT // 4


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a draft model"])
def test_captured_steps_bring_the_same_runners_up(pair, beside):
    """They come with the pass's result, in the one transfer of an iteration."""
    told = []
    for backend in ("eager", "cudagraph"):
        free, policy = Noting(), FixedPolicy(TreeShape(2, 3, 8)) if beside else ModelFreePolicy(8)
        options = {} if beside else {"drafter": None}
        decoder = pair.decoder(policy, SHAPES, model_free=free, backend=backend, **options)
        assert decoder.generate(PROMPT, max_new_tokens=COUNT).tokens == pair.reference(PROMPT, COUNT)
        pairs = [pair for tokens, rows in free.told for pair in zip(tokens, rows.tolist(), strict=True)]
        told.append({(token, tuple(row)) for token, row in pairs})
    assert len(told[0]) > 10
    assert told[1] if beside else told[1] >= told[0]
