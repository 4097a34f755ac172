"""Probabilities of counted candidates by the scorer's formula, and given the noise of the target's draws."""

import math

import numpy as np
import torch

from yggdrasil.drafters.statistics.contexts import NUM_CONTEXTS
from yggdrasil.native.random_numbers import gumbel_noise


def likelihoods(scorer, rows):
    """Return token -> probability of the candidates whose features are ``rows``."""
    features = rows.numpy().astype(np.float64)
    counts, totals = features[:, 1 : 1 + NUM_CONTEXTS], features[:, 1 + NUM_CONTEXTS :]
    hidden = scorer.bias + np.log1p(totals) @ scorer.totals
    hidden += np.log1p(counts) @ scorer.counts[:, 0] + counts / np.maximum(totals, 1.0) @ scorer.counts[:, 1]
    numbers = np.exp(np.maximum(hidden, 0.0) @ scorer.out)
    shares = numbers / (numbers.sum() + np.exp(scorer.nothing[0]))
    return dict(zip(features[:, 0].astype(int).tolist(), shares.tolist(), strict=True))


def reweigh(draws, likely, position):
    """Return the probabilities ``likely`` (token -> probability) given the noise of ``draws`` at ``position``."""
    noise = gumbel_noise(torch.tensor([draws.key]), torch.tensor([position]), torch.tensor(list(likely)))
    weights = np.array(list(likely.values())) * np.exp(draws.noise * noise.double().numpy())
    total = weights.sum() + max(1.0 - sum(likely.values()), 1e-3) * math.exp(draws.others)
    return dict(zip(likely, (weights / total).tolist(), strict=True))
