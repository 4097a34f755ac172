"""The operators of recurrent layers in PyTorch, for any device.

All rows of a tree are solved together from the text's state S and factors of each row: the WY form of a chunk, with the
tree's ancestor mask instead of a triangular one. The last bits of a row therefore depend on the tree. The native
operators compute every path token by token.

Dims: W rows, C channels, K taps, M slots, Hk heads of keys, Hv heads of values, Dk and Dv their sizes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_convolution(
    x: Tensor,  # [W, C]
    weight: Tensor,  # [C, K]
    bias: Tensor | None,  # [C]
    window: Tensor,  # [K - 1, C]: the text's last inputs, oldest first
    inputs: Tensor,  # [M, C]: keeps those of this pass
    offsets: Tensor,  # [2] int64: context length, first slot written
    parents: Tensor,  # [W] int64, -1 behind the text
    num_threads: int,
) -> Tensor:
    """A causal convolution along each row's path, [W, C]."""
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
    decay: Tensor,  # [W, Hv] float32, a logarithm
    beta: Tensor | None,  # [W, Hv] float32: by the delta rule
    state: Tensor,  # [Hv, Dk, Dv] float32
    keys: Tensor,  # [M, Hk, Dk]: keep the factors of the rows
    updates: Tensor,  # [M, Hv, Dv]
    decays: Tensor,  # [M, Hv]
    offsets: Tensor,  # [2] int64
    parents: Tensor,  # [W] int64
    num_threads: int,
) -> Tensor:
    """What each row reads of the state behind its path, [W, Hv, Dv]."""
    width, group = key.shape[0], value.shape[1] // key.shape[1]
    slots = _slots(offsets, width, keys.shape[0])
    query, own = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (query, key))  # [Hv, W, Dk]
    path = _paths(parents)  # [W, W], itself included
    total = path @ decay  # [W, Hv]: decay from the text on
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
    slots: Sequence[int],  # of a path's rows, in order
    num_threads: int,
) -> None:
    """Add what the rows in ``slots`` have added to the text's states, in place."""
    if not slots:
        return
    for window, kept in zip(windows, inputs, strict=True):
        window.copy_(torch.cat([window, kept[list(slots)]])[-window.shape[0] :])
    for state, *factors in zip(states, keys, updates, decays, strict=True):
        key, update, decay = (each[list(slots)] for each in factors)
        total = decay.cumsum(0)
        own = key.repeat_interleave(update.shape[1] // key.shape[1], 1) * (total[-1] - total).exp()[..., None]
        state.mul_(total[-1].exp()[:, None, None]).add_(torch.einsum("whk,whv->hkv", own, update))


def _slots(offsets: Tensor, width: int, count: int) -> Tensor:
    return (offsets[1] + torch.arange(width, device=offsets.device)) % count


def _paths(parents: Tensor) -> Tensor:
    """Which rows lie on the path to each, itself included: [W, W] float32."""
    width = parents.shape[0]
    above = (parents[:, None] == torch.arange(width, device=parents.device)).float()
    path = torch.eye(width, device=parents.device) + above
    reached = 1
    while reached < width:
        above = above @ above
        path = (path + above @ path).clamp(max=1)
        reached *= 2
    return path
