"""Portable implementations of the operators in PyTorch: the reference for the native library, and used without it.

Dims: W rows of the step, Hq query heads, Hkv key heads, D head size, S cache capacity, T tree slots, K inputs, N
outputs; for experts: E experts, K experts per row, H hidden size, I intermediate size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from yggdrasil.native.portable_recurrence import commit_states, tree_convolution, tree_recurrence
from yggdrasil.native.random_numbers import gumbel_noise

_LEAST_REST = 1e-3  # least probability of all tokens that are no candidates
_LEAST_EDGE = -12.0  # lower log-probabilities count as this one
_MOST = -1e-4  # largest log-probability of a candidate, so that a child's score is below its parent's


def packed_shape(weight: Tensor) -> list[int]:
    """Return the shape of a linear layer's packed form: without the native library, the shape of ``weight``."""
    return list(weight.shape)


def pack_linear(weight: Tensor, packed: Tensor) -> None:
    """Write the packed form of a linear layer's ``weight`` [N, K] to ``packed``: without the native library a copy."""
    packed.copy_(weight)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, num_threads: int) -> Tensor:
    """Return ``x`` [..., K] times the transposed packed weight plus ``bias``, [..., N], in the dtype of ``x``.

    Args:
        packed: the weight as ``pack_linear`` writes it; here, without the native library, it is the weight [N, K].
        bias: [N] or None.
        out_features: N, which native packed weights pad.
        num_threads: threads of the native operator; not used here, as in all functions below.
    """
    return torch.nn.functional.linear(x, packed, bias)


def gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """Return ``activation(gate) * up``, same shape; ``activation``: 0 SiLU, 1 tanh-approximated GELU, 2 ReLU."""
    functions = (torch.nn.functional.silu, partial(torch.nn.functional.gelu, approximate="tanh"), torch.relu)
    return functions[activation](gate) * up


def clamped_gate(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return gpt-oss's clamped SwiGLU, ``(up + 1) * gate * sigmoid(alpha * gate)``, same shape.

    Before this, ``gate`` is clamped to at most ``limit``, and ``up`` to between ``-limit`` and ``limit``.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def activated(gate: Tensor, up: Tensor, activation: int, clamp: Sequence[float]) -> Tensor:
    """Return ``clamped_gate(gate, up, *clamp)``, or ``gated(gate, up, activation)`` if ``clamp`` is empty."""
    return clamped_gate(gate, up, *clamp) if clamp else gated(gate, up, activation)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, num_threads: int) -> Tensor:
    """Return ``x`` [..., K] times the transposed, unpacked ``weight`` [N, K] plus ``bias`` [N] (or None), [..., N]."""
    return torch.nn.functional.linear(x, weight, bias)


def packed_experts(  # noqa: PLR0913  (an operator's schema)
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: list[Tensor],
    inner_features: int,
    activation: int,
    clamp: list[float],
    num_threads: int,
) -> Tensor:
    """Return the weighted sums [W, H] of the outputs of each row's experts, added in the order of expert ids.

    Args:
        x: [W, H].
        chosen: [W, K] int64, expert ids; the id E stands for no expert.
        shares: [W, K], weights of the experts' outputs.
        gate_up: [E, 2, I, H], without a gate [E, 1, I, H]; down: [E, 1, H, I].
        biases: empty, or float32 of gate [E, I], up [E, I] and down [E, H]. ``inner_features`` is I.
        activation: 0 for SiLU, 1 for tanh-approximated GELU, 2 for squared ReLU without a gate.
        clamp: empty, or limit and alpha of gpt-oss's clamped SwiGLU.
    """
    output = torch.zeros_like(x)
    for expert, (first, (last,)) in enumerate(zip(gate_up, down, strict=True)):
        places, rows = torch.where(chosen.t() == expert)
        gates, ups = x[rows] @ first[0].t(), x[rows] @ first[-1].t()
        if biases:
            gates, ups = ((each + bias[expert]).to(x.dtype) for each, bias in zip((gates, ups), biases, strict=False))
        given = activated(gates, ups, activation, clamp) @ last.t()
        if biases:
            given = (given + biases[2][expert]).to(x.dtype)
        output.index_add_(0, rows, (given * shares[rows, places, None]).to(x.dtype))
    return output


def tree_attention(  # noqa: PLR0913  (an operator's schema)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    offsets: Tensor,
    tree_mask: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    num_threads: int,
) -> Tensor:
    """Write a pass's keys and values to the cache, and attend to the committed tokens and the tree's allowed slots.

    Args:
        query: [1, Hq, R, D] of the R rows whose outputs are computed: all W rows of the pass, or some of them.
        key, value: [1, Hkv, W, D] of all rows.
        key_cache, value_cache: [Hkv, S, D], written in place.
        offsets: [2] int64, the context length and the first slot written.
        tree_mask: [R, T] bool; entry (r, t) says whether row r sees slot context length + t. All rows see all earlier
            slots.
        scale: factor of the scores.
        window: if > 0, a row sees only the last ``window`` keys of its path, itself included; if < 0, attention is
            chunked, with chunks of ``-window`` positions; if 0, a row sees all keys.
        softcap: bound of the scores by tanh as in Gemma 2; 0 means no bound.
        sinks: [Hq], an extra score per head without a value; None means no sinks.

    Returns:
        Outputs [1, R, Hq, D].
    """
    context, start = offsets.unbind()
    width, num_key_heads, capacity = query.shape[2], key_cache.shape[0], key_cache.shape[1]
    rows = start + torch.arange(key.shape[2], device=query.device)
    key_cache.index_copy_(1, rows, key[0])
    value_cache.index_copy_(1, rows, value[0])
    slots = torch.arange(capacity, device=query.device)
    tree_slots = slots - context  # [S]
    inside = (tree_slots >= 0) & (tree_slots < tree_mask.shape[1])
    visible = (slots < context) | (inside & tree_mask[:, tree_slots.clamp(0, tree_mask.shape[1] - 1)])  # [W, S]
    if window > 0:
        later = visible.flip(1).cumsum(1).flip(1)  # visible keys from this one on; a path's keys ascend in position
        visible = visible & (later <= window)
    elif window < 0:
        count = visible.sum(1, keepdim=True)  # a row's last key is at its position
        visible = visible & (visible.cumsum(1) > (count - 1) // -window * -window)
    grouped = query[0].reshape(num_key_heads, -1, query.shape[-1]).float()  # [Hkv, G*W, D]
    scores = grouped @ key_cache.float().transpose(1, 2) * scale  # [Hkv, G*W, S]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(num_key_heads, -1, width, capacity).masked_fill(~visible, float("-inf"))
    if sinks is not None:
        more = sinks.float().view(num_key_heads, -1, 1, 1).expand(-1, -1, width, 1)
        scores = torch.cat([scores, more], dim=-1)
    weights = scores.softmax(-1)[..., :capacity]
    mixed = weights.reshape(num_key_heads, -1, capacity) @ value_cache.float()
    heads = mixed.view(-1, width, query.shape[-1])  # [Hq, W, D]
    return heads.transpose(0, 1).to(query.dtype).unsqueeze(0).contiguous()


def rows_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    num_threads: int,
) -> Tensor:
    """Attend, for each token of a batch of texts, to the first keys of its own text, and return [N, Hq, D].

    Args:
        query: [N, Hq, D].
        keys, values: [N, Hkv, S, D], or [1, Hkv, S, D] if all tokens are of one text.
        lengths: [N] int64, number of keys that each token sees, its own included.
        scale: factor of the scores.
        window: if > 0, a token sees only the last ``window`` of these keys; if 0, all.
        softcap: bound of the scores by tanh as in Gemma 2; 0 means no bound.
    """
    longest = int(lengths.max())
    slots = torch.arange(longest, device=query.device)
    hidden = slots >= lengths[:, None]
    if window > 0:
        hidden |= slots < lengths[:, None] - window
    grouped = query.unflatten(1, (keys.shape[1], -1)).float()  # [N, Hkv, G, D]
    scores = torch.einsum("nhgd,nhsd->nhgs", grouped, keys[:, :, :longest].float()) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("nhgs,nhsd->nhgd", weights, values[:, :, :longest].float()).flatten(1, 2).to(query.dtype)


def best_tokens(logits: Tensor, num_threads: int) -> tuple[Tensor, Tensor]:
    """Return (largest logit [R], its token id [R] int64) of each row of ``logits`` [R, V]."""
    best, place = logits.max(-1)
    return best, place


def top_candidates(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest of each row of ``values`` [R, V], descending, and their int64 indices, [R, k] each."""
    best, index = values.topk(k, dim=-1)
    return best, index


def likely_draws(scores: Tensor, key: int, position: int, tokens: Tensor) -> int:
    """Write the tokens that may have one of the two highest sums of score and Gumbel noise; return their number.

    This implementation writes all tokens whose score is above -inf. The native implementation writes few tokens.

    Args:
        scores: [V] float32.
        key: key of the request's draws (``gumbel_noise``).
        position: index in the text of the token that is drawn.
        tokens: [V] int64, written in ascending order from the first element on.
    """
    possible = (scores > float("-inf")).nonzero()[:, 0]
    tokens[: len(possible)] = possible
    return len(possible)


def drawn_token(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: int,
    position: int,
    margin: Tensor,
) -> int:
    """Return the token that a sampling target draws, or -1 if the caller must compute scores and noise itself.

    This implementation always returns -1. The native implementation returns -1 if rounding might decide the token, and
    if the largest logit is not finite.

    Args:
        logits: [V], bfloat16 or float32.
        temperature, top_k, top_p, min_p: the fields of ``SamplingParams``.
        key: key of the request's draws (``gumbel_noise``).
        position: index in the text of the token that is drawn.
        margin: [1] float64; the native implementation writes the difference of the two highest sums of score and noise.
    """
    return -1


def reweigh(likely: Tensor, edges: Tensor, tokens: Tensor, levels: Tensor, draws: Tensor, weights: Tensor) -> Tensor:
    """Return log-probabilities of candidates as ``reweighed`` does; for a greedy target on a CPU, copy ``likely``."""
    if likely.is_cpu and not float(weights[0]):
        return likely.clone()
    return reweighed(likely, edges, tokens, levels, draws, weights)


def reweighed(likely: Tensor, edges: Tensor, tokens: Tensor, levels: Tensor, draws: Tensor, weights: Tensor) -> Tensor:
    """Return log-probabilities [W, K] of drafted candidates, given the noise with which the target draws its tokens.

    For a greedy target, ``likely`` is returned.

    Args:
        likely: [W, K] log-probabilities for a greedy target.
        edges: [W, K], the drafter's own log-probabilities.
        tokens: [W, K] int64 ids of the candidates.
        levels: [W] int64, depths in the tree of the nodes that the candidates follow; the root has depth 0.
        draws: [2] int64: key of the random numbers, the root's index in the request (from its first prompt token).
        weights: [3] float32: the factor of ``edges``, the factor of the noise, and the log-weight of all other tokens;
            zeros if the target is greedy.
    """
    noise = gumbel_noise(draws[:1], (draws[1] + 1 + levels)[:, None], tokens)
    others = (1.0 - edges.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST).log() + weights[2]
    found = weights[0] * edges.clamp(min=_LEAST_EDGE) + weights[1] * noise
    found = found - torch.cat([found, others], dim=-1).logsumexp(-1, keepdim=True)
    return torch.where(weights[0] > 0, found.clamp(max=_MOST), likely)


def move_rows(caches: list[Tensor], sources: list[int], destination: int) -> None:
    """Move the KV entries in slots ``sources`` of all ``caches`` [Hkv, S, D] to the slots from ``destination`` on.

    ``sources`` must ascend, and every source slot must be equal to its new slot or after it.
    """
    for cache in caches:
        cache[:, destination : destination + len(sources)] = cache[:, sources]


def rank_nodes(scores: Tensor, order: Tensor, expected: Tensor) -> None:
    """Write a tree's node indices by descending score to ``order`` [N] int64, and expected tokens to ``expected`` [N].

    ``scores`` [N] float32 are log-probabilities of acceptance, 0 for the root and -inf for absent nodes. Entry i of
    ``expected`` (float32) is the expected number of tokens of a pass over the first i + 1 nodes of ``order``, bonus
    token included: the sum of their probabilities.
    """
    best, nodes = scores.sort(descending=True, stable=True)
    order.copy_(nodes)
    expected.copy_(best.exp().cumsum(0))


def read_words(buffer: Tensor, num_threads: int) -> int:
    """Return the sum of the 8-byte words of ``buffer``; the caller times this call to measure the memory bandwidth."""
    return int(buffer.view(torch.int64).sum())


def keep_rows(
    caches: list[Tensor],
    start: Tensor,
    rows: Tensor,
    count: Tensor,
) -> None:
    """Move the KV entries of a pass's accepted rows to consecutive slots from ``start`` on, in all ``caches``.

    The number of rows is read on the device, so that the host need not wait for it.

    Args:
        caches: [Hkv, S, D] each.
        start: [1] int64, the slot of the pass's first row; row r is in slot ``start`` + r.
        rows: [W] int64 row indices of the pass, ascending. Only the first ``count`` are accepted and moved.
        count: [1] int64, number of accepted rows.
    """
    places = torch.arange(rows.numel(), device=rows.device)
    sources = start + torch.where(places < count, rows, places)
    for cache in caches:
        cache.index_copy_(1, start + places, cache.index_select(1, sources))


# By operator name, without ``keep_rows``, which has this implementation on CPUs in any case.
PORTABLE: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        packed_shape,
        pack_linear,
        packed_linear,
        plain_linear,
        packed_experts,
        tree_attention,
        rows_attention,
        best_tokens,
        top_candidates,
        likely_draws,
        drawn_token,
        reweigh,
        move_rows,
        rank_nodes,
        read_words,
        tree_convolution,
        tree_recurrence,
        commit_states,
    )
}
