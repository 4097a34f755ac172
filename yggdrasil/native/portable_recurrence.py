"""Portable implementations, in PyTorch, of the operators of recurrent layers.

All rows of a tree are computed at once from the text's state and the factors of each row, in the WY form of chunked
linear attention with the tree's ancestor mask instead of a triangular one. The last bits of a row therefore depend on
the tree; the native operators compute every path token by token.

Dims: W rows, C channels, K taps, M slots, Hk key heads, Hv value heads, Dk and Dv their sizes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def tree_convolution(  # noqa: PLR0913  (an operator's schema)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    inputs: Tensor,
    offsets: Tensor,
    parents: Tensor,
    silu: bool,
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
        silu: apply SiLU to the sums.
    """
    inputs[_slots(offsets, x.shape[0], inputs.shape[0])] = x
    sums = _convolved(torch.cat([window, x]), weight.t(), bias, parents)
    return nn.functional.silu(sums) if silu else sums


def _convolved(seen: Tensor, taps: Tensor, bias: Tensor | None, parents: Tensor) -> Tensor:
    """Convolve the last W rows of ``seen`` [K - 1 + W, C], which follow the text's inputs, with ``taps`` [K, C]."""
    width, past = parents.shape[0], seen.shape[0] - parents.shape[0]
    numbers = torch.arange(past, device=seen.device)
    above = torch.cat([(numbers - 1).clamp(min=0), torch.where(parents < 0, past - 1, past + parents)])
    place = past + torch.arange(width, device=seen.device)
    wide, factors = seen.float(), taps.float()
    total = wide[place] * factors[past]
    for tap in reversed(range(past)):
        place = above[place]
        total = total + wide[place] * factors[tap]
    return (total if bias is None else total + bias.float()).to(seen.dtype)


def tree_recurrence(  # noqa: PLR0913  (an operator's schema)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    delta: bool,
    state: Tensor,
    decays: Tensor,
    strengths: Tensor,
    offsets: Tensor,
    parents: Tensor,
    num_threads: int,
) -> Tensor:
    """Compute a gated delta rule, or Mamba-2, along each row's path in the tree, and return [W, Hv, Dv] float32.

    The output of a row is read from the state after the row's ancestors and the row itself. ``state`` is not changed.
    The decay and the strength of each row are stored for a later commit.

    Args:
        query, key: [W, Hk, Dk] float32; with the delta rule they are normalised here, and queries divided by sqrt(Dk).
        value: [W, Hv, Dv] float32.
        decay: [W, Hv] float32, logarithm of each row's decay of the state.
        strength: [W, Hv] float32, factor of each row's update; of Mamba-2 the time step.
        delta: whether the delta rule is applied, else Mamba-2.
        state: [Hv, Dk, Dv] float32, after the committed tokens.
        decays, strengths: [M, Hv], written: receive ``decay`` and ``strength`` in the slots from ``offsets[1]`` on,
            modulo M.
        offsets: [2] int64, the context length and the first slot written.
        parents: [W] int64, each row's parent row; -1 for a row that follows the committed tokens.
    """
    slots, group = _slots(offsets, key.shape[0], decays.shape[0]), value.shape[1] // key.shape[1]
    if delta:
        query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    query, own = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (query, key))  # [Hv, W, Dk]
    path = _paths(parents)  # [W, W], itself included
    update, faded, factor = _updates(own, value, decay, strength, state, path, is_delta=delta)
    decays[slots], strengths[slots] = decay, strength
    output = faded * (query @ state) + (factor * (query @ own.mT)) @ update
    return output.transpose(0, 1).contiguous()


def _updates(
    own: Tensor,  # [Hv, W, Dk]
    value: Tensor,  # [W, Hv, Dv]
    decay: Tensor,  # [W, Hv]
    strength: Tensor,  # [W, Hv]
    state: Tensor,
    path: Tensor,  # [W, W]
    *,
    is_delta: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows' updates [Hv, W, Dv], and their decays since the text [Hv, W, 1] and ancestors [Hv, W, W]."""
    total = path @ decay  # [W, Hv]: cumulative decay since the text
    log_decay = (total[:, None] - total[None]).permute(2, 0, 1)  # [Hv, W, W]
    factor = torch.where(path.bool(), log_decay, -torch.inf).exp()
    faded, strong = total.t()[:, :, None].exp(), strength.t()[:, :, None]  # [Hv, W, 1]
    update = strong * value.transpose(0, 1)  # [Hv, W, Dv]
    if is_delta:
        between = (strong * factor * (own @ own.mT)).tril(-1)
        right = update - strong * faded * (own @ state)
        unit = between + torch.eye(own.shape[1], device=own.device)
        update = torch.linalg.solve_triangular(unit, right, upper=False, unitriangular=True)
    return update, faded, factor


def commit_states(  # noqa: PLR0913  (an operator's schema)
    windows: Sequence[Tensor],
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    decays: Sequence[Tensor],
    strengths: Sequence[Tensor],
    taps: Sequence[Tensor],
    biases: Sequence[Tensor],
    delta: bool,
    slots: Sequence[int],
    num_threads: int,
) -> None:
    """Apply the updates of a pass's accepted rows to the recurrent states of all layers, in place, from stored factors.

    Args:
        windows: [K - 1, C] each, the text's last inputs of the convolutions, oldest first; updated.
        inputs: [M, C] each, inputs of the convolutions of the pass's rows.
        states: [Hv, Dk, Dv] float32 each; updated. This and the next four are empty for layers with only a convolution.
        decays, strengths: [M, Hv] each, decays and strengths of the pass's rows.
        taps, biases: [K, C] and [C] float32 each, of the convolutions.
        delta: whether the layers are gated delta networks, else Mamba-2.
        slots: slots of the accepted rows, in the order of their path.
    """
    if not slots:
        return
    places = torch.tensor(list(slots), device=windows[0].device)
    for number, (window, given) in enumerate(zip(windows, inputs, strict=True)):
        seen = torch.cat([window, given[places]])
        if states:
            own = [each[number] for each in (states, decays, strengths, taps, biases)]
            apply_path(seen, own, places, is_delta=delta, is_accepted=torch.ones_like(places, dtype=torch.bool))
        window.copy_(seen[-window.shape[0] :])


def apply_path(seen: Tensor, own: Sequence[Tensor], slots: Tensor, *, is_delta: bool, is_accepted: Tensor) -> None:
    """Apply the updates of the accepted rows of a path to one layer's recurrent state, in place.

    Args:
        seen: [K - 1 + P, C], inputs of the convolution: the text's last ones, then those of the path's P rows.
        own: the layer's state [Hv, Dk, Dv] float32, the decays and strengths [M, Hv] of the pass's rows, and the weight
            [K, C] and bias [C] of the convolution.
        slots: [P] int64, slots of the path's rows.
        is_delta: whether the layer is a gated delta network, else Mamba-2.
        is_accepted: [P] bool, true for the accepted rows, the first of the path. The number of these rows is given as a
            mask so that a CUDA graph can compute it.
    """
    state, decays, strengths, taps, bias = own
    heads, key_size, value_size = state.shape
    rows = slots.shape[0]
    chain = torch.arange(rows, device=slots.device) - 1
    mixed = nn.functional.silu(_convolved(seen, taps, bias, chain)).float()
    values, keys = heads * value_size, (mixed.shape[1] - heads * value_size) // 2
    sizes = (keys, keys, values) if is_delta else (values, keys, keys)
    parts = mixed.split(sizes, dim=1)
    key, value = parts[1].view(rows, -1, key_size), parts[2 if is_delta else 0].view(rows, heads, value_size)
    key = (_unit(key) if is_delta else key).repeat_interleave(heads // key.shape[1], 1).transpose(0, 1)
    decay, strength = (torch.where(is_accepted[:, None], each[slots], 0.0) for each in (decays, strengths))
    path = (chain[:, None] >= chain).float()
    update, faded, factor = _updates(key, value, decay, strength, state, path, is_delta=is_delta)
    state.mul_(faded[:, -1:]).add_((key * factor[:, -1, :, None]).mT @ update)


def _unit(rows: Tensor) -> Tensor:
    """Normalise rows to length 1 along the last dimension."""
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)


def _slots(offsets: Tensor, width: int, count: int) -> Tensor:
    return (offsets[1] + torch.arange(width, device=offsets.device)) % count


def _paths(parents: Tensor) -> Tensor:
    """Return the ancestor mask [W, W] float32: entry (i, j) is 1 if row j is an ancestor of row i, or i itself."""
    width = parents.shape[0]
    above = (parents[:, None] == torch.arange(width, device=parents.device)).float()
    path = torch.eye(width, device=parents.device) + above
    reached = 1
    while reached < width:
        above = above @ above
        path = (path + above @ path).clamp(max=1)
        reached *= 2
    return path
