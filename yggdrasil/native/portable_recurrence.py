"""Portable implementations, in PyTorch, of the operators of recurrent layers.

All rows of a tree are computed at once from the text's state and the factors of each row, in the WY form of chunked
linear attention with the tree's ancestor mask instead of a triangular one. The last bits of a row therefore depend on
the tree; the native operators compute every path token by token.

Dims: W rows, C channels, K taps, M slots, Hk key heads, Hv value heads, Dk and Dv their sizes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_convolution(
    x: Tensor,  # [W, C]
    weight: Tensor,  # [C, K]
    bias: Tensor | None,  # [C]
    window: Tensor,  # [K - 1, C]: the text's last inputs, oldest first
    inputs: Tensor,  # [M, C]: receives the inputs of this pass
    offsets: Tensor,  # [2] int64: context length, first slot written
    parents: Tensor,  # [W] int64, -1 for a row that follows the text
    num_threads: int,
) -> Tensor:
    """Compute a causal convolution along each row's path, [W, C]."""
    inputs[_slots(offsets, x.shape[0], inputs.shape[0])] = x
    past = window.shape[0]
    seen = torch.cat([window, x]).float()
    numbers = torch.arange(past, device=x.device)
    above = torch.cat([(numbers - 1).clamp(min=0), torch.where(parents < 0, past - 1, past + parents)])
    place = past + torch.arange(x.shape[0], device=x.device)
    total = seen[place] * weight[:, past].float()
    for tap in reversed(range(past)):
        place = above[place]
        total = total + seen[place] * weight[:, tap].float()
    return (total if bias is None else total + bias.float()).to(x.dtype)


def tree_recurrence(  # noqa: PLR0913  (an operator's schema)
    query: Tensor,  # [W, Hk, Dk] float32
    key: Tensor,
    value: Tensor,  # [W, Hv, Dv] float32
    decay: Tensor,  # [W, Hv] float32, logarithms
    beta: Tensor | None,  # [W, Hv] float32, strength of the delta rule; None: without delta rule (Mamba-2)
    state: Tensor,  # [Hv, Dk, Dv] float32
    keys: Tensor,  # [M, Hk, Dk]: these three receive the factors of the rows
    updates: Tensor,  # [M, Hv, Dv]
    decays: Tensor,  # [M, Hv]
    offsets: Tensor,  # [2] int64
    parents: Tensor,  # [W] int64
    num_threads: int,
) -> Tensor:
    """Compute the output of each row, [W, Hv, Dv] float32, from the state after its path; ``state`` is unchanged."""
    width, group = key.shape[0], value.shape[1] // key.shape[1]
    slots = _slots(offsets, width, keys.shape[0])
    query, own = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (query, key))  # [Hv, W, Dk]
    path = _paths(parents)  # [W, W], itself included
    total = path @ decay  # [W, Hv]: cumulative decay since the text
    apart = (total[:, None] - total[None]).permute(2, 0, 1)  # [Hv, W, W]
    factor = torch.where(path.bool(), apart, -torch.inf).exp()
    faded = total.t()[:, :, None].exp()  # [Hv, W, 1]
    update = value.transpose(0, 1)  # [Hv, W, Dv]
    if beta is not None:
        strength = beta.t()[:, :, None]
        between = (strength * factor * (own @ own.mT)).tril(-1)
        right = strength * (update - faded * (own @ state))
        unit = between + torch.eye(width, device=key.device)
        update = torch.linalg.solve_triangular(unit, right, upper=False, unitriangular=True)
    keys[slots], updates[slots], decays[slots] = key, update.transpose(0, 1), decay
    output = faded * (query @ state) + (factor * (query @ own.mT)) @ update
    return output.transpose(0, 1).contiguous()


def commit_states(
    windows: Sequence[Tensor],  # each [K - 1, C]
    inputs: Sequence[Tensor],  # each [M, C]
    states: Sequence[Tensor],  # each [Hv, Dk, Dv]
    keys: Sequence[Tensor],  # each [M, Hk, Dk]
    updates: Sequence[Tensor],  # each [M, Hv, Dv]
    decays: Sequence[Tensor],  # each [M, Hv]
    slots: Sequence[int],  # slots of a path's rows, in order
    num_threads: int,
) -> None:
    """Apply the updates of the rows in ``slots`` to the text's windows and states, in place."""
    if not slots:
        return
    for window, kept in zip(windows, inputs, strict=True):
        window.copy_(torch.cat([window, kept[list(slots)]])[-window.shape[0] :])
    for state, *factors in zip(states, keys, updates, decays, strict=True):
        key, update, decay = (each[list(slots)] for each in factors)
        apply_updates(state, key, update, decay, decay.new_ones(len(slots), dtype=torch.bool))


def apply_updates(state: Tensor, key: Tensor, update: Tensor, decay: Tensor, is_accepted: Tensor) -> None:
    """Apply to ``state`` [Hv, Dk, Dv], in place, the updates of the accepted rows of a path.

    ``key`` [W, Hk, Dk], ``update`` [W, Hv, Dv], ``decay`` [W, Hv], ``is_accepted`` [W] bool; accepted rows come first.
    """
    total = torch.where(is_accepted[:, None], decay, 0.0).cumsum(0)
    share = torch.where(is_accepted[:, None], (total[-1] - total).exp(), 0.0)
    own = key.repeat_interleave(update.shape[1] // key.shape[1], 1) * share[..., None]
    state.mul_(total[-1].exp()[:, None, None]).add_(torch.einsum("whk,whv->hkv", own, update))


def _slots(offsets: Tensor, width: int, count: int) -> Tensor:
    return (offsets[1] + torch.arange(width, device=offsets.device)) % count


def _paths(parents: Tensor) -> Tensor:
    """Return the ancestor mask [W, W] float32: 1 if a row is on the path to another, itself included."""
    width = parents.shape[0]
    above = (parents[:, None] == torch.arange(width, device=parents.device)).float()
    path = torch.eye(width, device=parents.device) + above
    reached = 1
    while reached < width:
        above = above @ above
        path = (path + above @ path).clamp(max=1)
        reached *= 2
    return path
