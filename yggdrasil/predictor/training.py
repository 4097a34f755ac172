"""Training of the depth predictor on recorded features and accepted lengths. Imports torch lazily.

The loss is the negative log-likelihood of a position's accepted length. Output d contributes only if length >= d - 1,
so its class balance is the true conditional rate.

Dims: n positions, F features, D depths.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from yggdrasil.predictor.depth import DepthPredictor, Float32Array
from yggdrasil.predictor.features import FeatureSizes
from yggdrasil.predictor.platt import IntArray, calibrate_outputs

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

ENCODER_SIZE = 64
HIDDEN_WEIGHT = 0.1  # initial scale of the standardised hidden state relative to the other features
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
DROPOUT = 0.1
MAX_EPOCHS = 80
PATIENCE = 8
EPOCHS_WITHOUT_VALIDATION = 5
_SEED = 0
_HELD_OUT, _VALIDATION = 0.25, 0.2  # share of all documents; share of the documents that are not held out


class DocumentSplit(NamedTuple):
    """Three disjoint sets of document numbers. The last two may be empty if there are few documents."""

    training: tuple[int, ...]
    validation: tuple[int, ...]  # early stopping and calibration
    held_out: tuple[int, ...]  # to choose between predictors


def split_documents(documents: IntArray, seed: int) -> DocumentSplit:
    """Split document numbers at random into training, validation and held-out sets, each ascending.

    Each set gets at least one document if there are enough: first training, then held out, then validation.

    Args:
        documents: document number of each position; repeated numbers count once.
        seed: seed of the random order.
    """
    order = np.random.default_rng(seed).permutation(np.unique(documents)).tolist()
    num_held_out = min(max(1, round(_HELD_OUT * len(order))), max(len(order) - 1, 0))
    rest = order[num_held_out:]
    num_validation = min(max(1, round(_VALIDATION * len(rest))), max(len(rest) - 1, 0))
    return DocumentSplit(
        training=tuple(sorted(rest[num_validation:])),
        validation=tuple(sorted(rest[:num_validation])),
        held_out=tuple(sorted(order[:num_held_out])),
    )


def train_depth_predictor(
    features: Float32Array,
    lengths: IntArray,
    documents: IntArray,
    max_depth: int,
    sizes: FeatureSizes | None = None,
) -> tuple[DepthPredictor, DocumentSplit]:
    """Train a depth predictor without the held-out documents, and return it with the split of the documents.

    Args:
        features: [n, F] float32 input features of n positions.
        lengths: [n] accepted length at each position.
        documents: [n] document number of each position; documents are split whole.
        max_depth: D, the number of depths to predict.
        sizes: sizes of the parts of ``features``. The hidden state is scaled down by ``HIDDEN_WEIGHT``: otherwise its
            many values overfit before the other features are used. With None, all features have the same scale.
    """
    split = split_documents(documents, _SEED)
    training, validation = (np.flatnonzero(np.isin(documents, part)) for part in (split.training, split.validation))
    predictor = _fit(features, lengths, training, validation, max_depth, sizes)
    if len(validation):
        predictor = calibrate_outputs(predictor, features[validation], lengths[validation])
    return predictor, split


class _Data(NamedTuple):
    inputs: Tensor  # [n, F] normalised
    lengths: Tensor  # [n]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The best weights so far, with epoch and validation loss. Epoch 0 is the initial network, with constant rates."""

    state: dict[str, Any]
    epoch: int
    loss: float


def _fit(
    features: Float32Array,
    lengths: IntArray,
    training: npt.NDArray[np.intp],
    validation: npt.NDArray[np.intp],
    max_depth: int,
    sizes: FeatureSizes | None,
) -> DepthPredictor:
    """Train with early stopping on the validation rows, or for a fixed number of epochs if there are none."""
    import torch

    from yggdrasil.native.one_thread import one_thread

    mean, scale = _normalisation(features[training])
    if sizes is not None and sizes.hidden < sizes.total:
        scale[: sizes.hidden] /= HIDDEN_WEIGHT

    def tensors(rows: npt.NDArray[np.intp]) -> _Data:
        inputs = torch.from_numpy((features[rows] - mean) / scale)
        return _Data(inputs, torch.from_numpy(lengths[rows].astype(np.int64)))

    data, held_back = tensors(training), tensors(validation)
    max_epochs = MAX_EPOCHS if len(validation) else EPOCHS_WITHOUT_VALIDATION
    # Steps this small lose more time to thread synchronisation than they gain.
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(_SEED)
        model = _new_model(features.shape[1], lengths[training], max_depth)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        best, epoch = _Snapshot(copy.deepcopy(model.state_dict()), 0, _loss(model, held_back)), 0
        while epoch < max_epochs and epoch - best.epoch < PATIENCE:
            epoch += 1
            _train_epoch(model, optimizer, data)
            loss = _loss(model, held_back)
            if loss < best.loss or not len(validation):
                best = _Snapshot(copy.deepcopy(model.state_dict()), epoch, loss)
    model.load_state_dict(best.state)
    return _to_predictor(model, mean, scale)


def _normalisation(features: Float32Array) -> tuple[Float32Array, Float32Array]:
    mean = features.mean(axis=0, dtype=np.float64)
    scale = features.std(axis=0, dtype=np.float64)
    constant = scale < 1e-6 * (1.0 + np.abs(mean))
    return mean.astype(np.float32), np.where(constant, 1.0, scale).astype(np.float32)


def _new_model(num_features: int, lengths: IntArray, max_depth: int) -> nn.Sequential:
    """Return the initial network, which predicts the smoothed constant rates of ``lengths``."""
    import torch
    from torch import nn

    head = nn.Linear(ENCODER_SIZE, max_depth)
    model = nn.Sequential(
        nn.Linear(num_features, ENCODER_SIZE),
        nn.ReLU(),
        nn.Dropout(DROPOUT),
        nn.Linear(ENCODER_SIZE, ENCODER_SIZE),
        nn.ReLU(),
        nn.Dropout(DROPOUT),
        head,
    )
    reached = np.array([(lengths >= depth).sum() for depth in range(max_depth + 1)])
    rates = (reached[1:] + 0.5) / (reached[:-1] + 1.0)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.from_numpy(np.log(rates / (1.0 - rates))))
    return model


def _length_loss(logits: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the lengths [n] under conditional logits [n, D]."""
    import torch
    from torch.nn import functional

    depths = torch.arange(1, logits.shape[1] + 1)
    has_parent = lengths[:, None] >= depths - 1  # [n, D]
    reached = (lengths[:, None] >= depths).to(logits.dtype)
    return functional.binary_cross_entropy_with_logits(logits, reached, weight=has_parent, reduction="sum") / len(
        lengths
    )


def _train_epoch(model: nn.Sequential, optimizer: Optimizer, data: _Data) -> None:
    """Train ``model`` for one epoch over ``data`` in shuffled batches."""
    import torch

    model.train()
    order = torch.randperm(len(data.inputs))
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        loss = _length_loss(model(data.inputs[rows]), data.lengths[rows])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def _loss(model: nn.Sequential, data: _Data) -> float:
    """Return the mean loss over ``data`` without dropout; infinity if ``data`` is empty."""
    import torch

    if not len(data.inputs):
        return float("inf")
    model.eval()
    with torch.no_grad():
        return _length_loss(model(data.inputs), data.lengths).item()


def _to_predictor(model: nn.Sequential, mean: Float32Array, scale: Float32Array) -> DepthPredictor:
    state = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    first, second, head = sorted({int(name.partition(".")[0]) for name in state})
    return DepthPredictor(
        mean=mean,
        scale=scale,
        first_weight=np.ascontiguousarray(state[f"{first}.weight"].T),
        first_bias=state[f"{first}.bias"],
        second_weight=np.ascontiguousarray(state[f"{second}.weight"].T),
        second_bias=state[f"{second}.bias"],
        head_weight=np.ascontiguousarray(state[f"{head}.weight"].T),
        head_bias=state[f"{head}.bias"],
    )
