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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    inputs: Tensor,
    offsets: Tensor,
    parents: Tensor,
    num_threads: int,
) -> Tensor:
    """Compute a causal convolution along each row's path in the tree, and return [W, C].

    Args:
        x: [W, C], inputs of the pass's rows.
        weight: [C, K]; bias: [C] or None.
        window: [K - 1, C], the committed text's last inputs, oldest first.
        inputs: [M, C], written: receives ``x``, in the slots from ``offsets[1]`` on, modulo M.
        offsets: [2] int64, the context length and the first slot written.
        parents: [W] int64, each row's parent row; -1 for a row that follows the text.
    """
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    keys: Tensor,
    updates: Tensor,
    decays: Tensor,
    offsets: Tensor,
    parents: Tensor,
    num_threads: int,
) -> Tensor:
    """Compute a gated delta rule, or Mamba-2, along each row's path in the tree, and return [W, Hv, Dv] float32.

    The output of a row is read from the state after its ancestors and itself. ``state`` is not changed: the factors of
    each row's update are stored, for a later commit.

    Args:
        query, key: [W, Hk, Dk] float32.
        value: [W, Hv, Dv] float32.
        decay: [W, Hv] float32, logarithm of each row's decay of the state.
        beta: [W, Hv] float32, strength of the delta rule; None: no delta rule (Mamba-2).
        state: [Hv, Dk, Dv] float32, after the committed text.
        keys, updates, decays: [M, Hk, Dk], [M, Hv, Dv] and [M, Hv], written: receive the rows' factors, in the slots
            from ``offsets[1]`` on, modulo M.
        offsets: [2] int64, the context length and the first slot written.
        parents: [W] int64, each row's parent row; -1 for a row that follows the text.
    """
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
    windows: Sequence[Tensor],
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    keys: Sequence[Tensor],
    updates: Sequence[Tensor],
    decays: Sequence[Tensor],
    slots: Sequence[int],
    num_threads: int,
) -> None:
    """Update the recurrent states of all layers, in place, by the accepted rows of a pass, from their stored factors.

    Args:
        windows: [K - 1, C] each, the text's last inputs of the convolutions, oldest first; updated.
        inputs: [M, C] each, inputs of the pass's rows.
        states: [Hv, Dk, Dv] float32 each; updated. Empty, as are the three after it, without such states.
        keys, updates, decays: [M, Hk, Dk], [M, Hv, Dv] and [M, Hv] each, factors of the pass's rows.
        slots: slots of the accepted rows, in the order of their path.
    """
    if not slots:
        return
    for window, kept in zip(windows, inputs, strict=True):
        window.copy_(torch.cat([window, kept[list(slots)]])[-window.shape[0] :])
    for state, *factors in zip(states, keys, updates, decays, strict=True):
        key, update, decay = (each[list(slots)] for each in factors)
        apply_updates(state, key, update, decay, decay.new_ones(len(slots), dtype=torch.bool))


def apply_updates(state: Tensor, key: Tensor, update: Tensor, decay: Tensor, is_accepted: Tensor) -> None:
    """Apply the updates of the accepted rows of a path to the recurrent ``state`` [Hv, Dk, Dv] float32, in place.

    Row after row, each value head h becomes exp(decay[h]) state[h] + outer(key[h // (Hv / Hk)], update[h]).

    Args:
        key: [W, Hk, Dk] float32; Hk divides Hv.
        update: [W, Hv, Dv] float32, the values, or what the delta rule of ``tree_recurrence`` has made of them.
        decay: [W, Hv] float32, natural logarithms.
        is_accepted: [W] bool, true for the first rows, in path order. A mask and not a number, so that a CUDA graph can
            compute it.
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
