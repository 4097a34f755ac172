"""Top-p without sorting the vocabulary keeps the tokens that transformers keeps."""

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from yggdrasil.acceptance.processors import TopPLogitsProcessor


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("size", [1, 40, 5000])
def test_the_same_tokens_are_kept_as_by_transformers(spread, top_p, size):
    theirs = TopPLogitsWarper(top_p)
    for seed in range(5):
        scores = spread * torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
        if seed > 2:
            scores[0, size // 2 :] = -float("inf") if size > 1 else 0.0
        assert torch.equal(TopPLogitsProcessor(top_p, theirs)(None, scores), theirs(None, scores))


@pytest.mark.parametrize(("spread", "calls"), [(4.0, 0), (0.01, 1)])
def test_all_tokens_are_sorted_only_if_many_are_kept(spread, calls):
    called = []

    def in_full(_, scores):
        called.append(scores)
        return scores

    TopPLogitsProcessor(0.9, in_full)(None, spread * torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)))
    assert len(called) == calls


def test_equal_scores_are_kept_together():
    kept = TopPLogitsProcessor(0.5, None)(None, torch.tensor([[1.0, 0.0, 1.0, 1.0, -9.0]]))
    assert kept.isfinite().tolist() == [[True, False, True, True, False]]
