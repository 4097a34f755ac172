"""Fits the n-gram scorer: the probability that each counted candidate, or none of them, is the target's next token."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import relu

from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.statistics.base_table import BaseTable, count_documents
from yggdrasil.drafters.statistics.contexts import NUM_CONTEXTS
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.native.one_thread import one_thread

_EVERY = 5  # one document in so many fits the scorer; the others fill the table it is fitted with
_MOST_CANDIDATES = 1_000_000
_LEAST_TOKENS = 2_000  # of answers, to fit a scorer at all
_HELD_OUT = 0.2  # last share of the positions, on which fitted and default scorer are compared
_EPOCHS, _POSITIONS, _RATE, _DECAY = 40, 1000, 3e-3, 1e-4  # AdamW: epochs, positions per batch, peak rate, weight decay
_LEAST_DEVIATION = 0.05  # minimum standard deviation by which a feature is divided


class Candidates(NamedTuple):
    """Candidates at positions of a text, flattened.

    Dims: P positions, C candidates of all positions, K contexts.
    """

    features: npt.NDArray[np.int64]  # [C, 1 + 2 K], see ``StatisticsDrafter.features``
    position: npt.NDArray[np.int64]  # [C] ascending, every one of 0 .. P - 1
    is_right: npt.NDArray[np.bool_]  # [C], at most one per position

    @classmethod
    def joined(cls, parts: "Sequence[Candidates]") -> "Candidates":
        """Return the candidates of all ``parts``, whose positions follow each other."""
        ends = np.cumsum([0, *(int(part.position[-1]) + 1 if len(part.position) else 0 for part in parts)])
        return cls(
            np.concatenate([part.features for part in parts]),
            np.concatenate([part.position + start for part, start in zip(parts, ends, strict=False)]),
            np.concatenate([part.is_right for part in parts]),
        )

    def split(self, share: float) -> "tuple[Candidates, Candidates]":
        """Split into the candidates of the first positions and of the last ``share`` (0 to 1) of the positions."""
        first = int((1.0 - share) * (self.position[-1] + 1)) if len(self.position) else 0
        cut = int(np.searchsorted(self.position, first))
        return (
            Candidates(self.features[:cut], self.position[:cut], self.is_right[:cut]),
            Candidates(self.features[cut:], self.position[cut:] - first, self.is_right[cut:]),
        )


def fit_scorer(documents: Sequence[Document], *, with_table: bool, base: BaseTable | None = None) -> NGramScorer:
    """Return a scorer fitted to every fifth document, with a temporary table counted from the others.

    The last fifth of the positions is held out. The scorer that the fit starts from is returned unchanged if
    ``documents`` have fewer than 2,000 answer tokens, or if the fitted scorer is no better on the held-out positions.

    Args:
        documents: prompts with the target's answers.
        with_table: whether the weights of contexts in the table are fitted, too, or only those of contexts in the text.
        base: table to which the documents' counts are added, with the scorer to start from; None: a table of the
            documents alone, and the default scorer (``NGramScorer.default``).
    """
    usual = NGramScorer.default(with_table=with_table) if base is None else base.scorer
    if sum(len(document.answer) for document in documents) < _LEAST_TOKENS:
        return usual
    training, held_out = gather_candidates(documents, with_table=with_table, base=base).split(_HELD_OUT)
    if not len(training.position) or not len(held_out.position):
        return usual
    fitted = fit(training, usual)
    return fitted if mean_loss(fitted, held_out) < mean_loss(usual, held_out) else usual


def gather_candidates(documents: Sequence[Document], *, with_table: bool, base: BaseTable | None = None) -> Candidates:
    """Return the n-gram candidates for each answer token of every fifth document (the first, the sixth, ...).

    A candidate is a token that followed the same last tokens earlier in the document, or in the n-gram table. Its
    features are counts; ``is_right`` tells whether it is the answer's next token. Positions without candidates are left
    out, and no further document is read after a million candidates.

    Args:
        documents: prompts with the target's answers.
        with_table: whether candidates are also taken from an n-gram table, which is counted from the other four fifths
            of the documents; if False, these documents are unused.
        base: table of other text, to which the counts of the documents are added; None: no other text.
    """
    known = [document for i, document in enumerate(documents) if i % _EVERY]
    return candidates_of(documents[::_EVERY], count_documents(known, base) if with_table else None)


def candidates_of(documents: Sequence[Document], table: Table | None) -> Candidates:
    """Return the n-gram candidates for each answer token of ``documents``, see ``gather_candidates``.

    Args:
        documents: prompts with the target's answers.
        table: n-gram table whose candidates are also taken; None: candidates of the text alone.
    """
    drafter = StatisticsDrafter(NGramScorer.none(), table)
    found: list[npt.NDArray[np.int64]] = []
    right: list[npt.NDArray[np.bool_]] = []
    num_candidates = 0
    for document in documents:
        drafter.begin(document.prompt)
        for token in document.answer:
            rows = drafter.features(()).numpy()
            if len(rows):  # positions without candidates are left out
                found.append(rows)
                right.append(rows[:, 0] == token)
                num_candidates += len(rows)
            drafter.extend([token], {})
        if num_candidates > _MOST_CANDIDATES:
            break
    empty = np.zeros((0, 1 + 2 * NUM_CONTEXTS), dtype=np.int64)
    return Candidates(
        np.concatenate([empty, *found]),
        np.repeat(np.arange(len(found)), [len(rows) for rows in found]),
        np.concatenate([np.zeros(0, dtype=np.bool_), *right]),
    )


def fit(candidates: Candidates, start: NGramScorer) -> NGramScorer:
    """Return an n-gram scorer fitted by maximum likelihood to ``candidates`` (at least one).

    Training begins with the weights of ``start``, which is not changed.
    """
    # A calibration may run under a caller's inference mode.
    with one_thread(), torch.inference_mode(False), torch.enable_grad():
        return _learn(_Network(start, candidates.features), candidates)


@torch.no_grad()
def mean_loss(scorer: NGramScorer, candidates: Candidates) -> float:
    """Return the mean negative log-likelihood of the true next tokens under ``scorer``, in nats per position.

    At a position where no candidate is right, the likelihood is the probability of all other tokens together. The
    result is NaN if a weight of the scorer is NaN.
    """
    rows = torch.arange(len(candidates.position))
    network = _Network(scorer, candidates.features)
    return float(network.mean_loss(rows, torch.from_numpy(candidates.position), torch.from_numpy(candidates.is_right)))


def _learn(network: "_Network", candidates: Candidates) -> NGramScorer:
    right, of = torch.from_numpy(candidates.is_right), torch.from_numpy(candidates.position)
    begins = torch.searchsorted(of, torch.arange(int(of[-1]) + 2))
    num_positions = len(begins) - 1
    groups = [
        {"params": [each.requires_grad_() for each in network.weights()], "lr": _RATE, "weight_decay": _DECAY},
        {"params": [network.bias.requires_grad_()], "lr": 2 * _RATE, "weight_decay": _DECAY / 2},
    ]
    optimizer = torch.optim.AdamW(groups)
    steps = _EPOCHS * -(-num_positions // _POSITIONS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [_RATE, 2 * _RATE], total_steps=steps)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(_EPOCHS):
        for chosen in torch.randperm(num_positions, generator=drawn).split(_POSITIONS):
            sizes = begins[chosen + 1] - begins[chosen]
            shifts = begins[chosen] - (sizes.cumsum(0) - sizes)
            rows = torch.arange(int(sizes.sum())) + torch.repeat_interleave(shifts, sizes)
            loss = network.mean_loss(rows, torch.repeat_interleave(torch.arange(len(chosen)), sizes), right[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.scorer()


class _Network:
    """The n-gram scorer during training, with standardised features. A constant feature has no effect.

    Dims: F = 3 K features: log counts, log totals and shares; H hidden units.
    """

    def __init__(self, start: NGramScorer, rows: npt.NDArray[np.int64]) -> None:
        features = _features(rows)
        least, most = features.aminmax(dim=0)
        self._mean = torch.where(least == most, least, features.mean(0))  # avoids a rounding error of constant features
        self._deviation = features.std(0, correction=0).clamp(min=_LEAST_DEVIATION)
        self._features = (features - self._mean) / self._deviation
        by_count, by_share = torch.from_numpy(start.counts).float().unbind(1)
        layer = torch.cat([by_count, torch.from_numpy(start.totals).float(), by_share])  # [F, H]
        self.layer = layer * self._deviation[:, None]
        self.bias = torch.from_numpy(start.bias).float() + self._mean @ layer
        self.out = torch.from_numpy(start.out).float()
        self.nothing = torch.from_numpy(start.nothing).float()

    def weights(self) -> list[Tensor]:
        """Return the trained tensors except ``bias``: the hidden layer's weights [F, H], ``out`` and ``nothing``."""
        return [self.layer, self.out, self.nothing]

    def mean_loss(self, rows: Tensor, of: Tensor, is_right: Tensor) -> Tensor:
        """Return the mean negative log-likelihood, in nats, of the target's next tokens over P positions (a scalar).

        At a position where no candidate is right, the likelihood is the probability of all other tokens together.

        Args:
            rows: [C] int64, the positions' candidates as indices of the features given to the constructor.
            of: [C] int64, position of each candidate, ascending, every one of 0 .. P - 1.
            is_right: [C] bool, whether the candidate is the target's next token; at most one per position.
        """
        hidden = relu(self._features[rows] @ self.layer + self.bias)
        numbers = hidden @ self.out
        num_positions = int(of[-1]) + 1
        nothing = self.nothing.expand(num_positions)
        most = nothing.detach().scatter_reduce(0, of, numbers.detach(), "amax")
        whole = torch.exp(nothing - most).index_add(0, of, torch.exp(numbers - most[of]))
        chosen = torch.zeros(num_positions).index_add(0, of, torch.where(is_right, numbers, 0.0))
        hit = torch.zeros(num_positions).index_add(0, of, is_right.float())
        return (most + torch.log(whole) - chosen - (1.0 - hit) * nothing).mean()

    def scorer(self) -> NGramScorer:
        """Return the trained weights as an n-gram scorer, which reads raw features.

        The mean and deviation by which training standardised the features are folded into the hidden layer's weights.
        """
        layer = (self.layer / self._deviation[:, None]).detach()
        by_count, totals, by_share = layer.split(NUM_CONTEXTS)
        weights = {
            "counts": torch.stack([by_count, by_share], dim=1),
            "totals": totals,
            "bias": self.bias - self._mean @ layer,
            "out": self.out,
            "nothing": self.nothing,
        }
        return NGramScorer(**{name: weight.detach().double().numpy() for name, weight in weights.items()})


def _features(features: npt.NDArray[np.int64]) -> Tensor:
    counts, totals = np.split(features[:, 1:].astype(np.float32), 2, axis=1)
    return torch.from_numpy(np.concatenate([np.log1p(counts), np.log1p(totals), counts / np.maximum(totals, 1.0)], 1))
