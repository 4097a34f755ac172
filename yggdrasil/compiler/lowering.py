"""Graph rewrite: layers that repeat become one program, where all that they do is linears, norms and attention.

A layer is then no compiled graph any more, but stages that threads go through (``kernels/program.h``). Rotary
embedding, halves against each other, is the attention's own. Layers that do anything else stay graphs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from yggdrasil.compiler.fusion import normed
from yggdrasil.compiler.matching import argument_of, factors, is_call, tensor_of
from yggdrasil.compiler.repeated import Repetition
from yggdrasil.native.program import Program, outputs_of

_aten = torch.ops.aten
_ATTENTION = torch.ops.yggdrasil.tree_attention.default
_SAME_NUMBERS = (_aten.view.default, _aten.reshape.default)


class Lowered(NamedTuple):
    """A unit of layers as a program over its slots."""

    program: Program
    num_threads: int


class _Heads(NamedTuple):
    """Heads that are normed and turned by their positions: the rows that they are, and what does that."""

    rows: Node
    norm: Node | None = None
    plus_one: bool = False
    eps: float = 0.0
    cos: Node | None = None
    sin: Node | None = None


def lower_unit(found: Repetition) -> Lowered | None:
    """The unit as a program; None where it does something that no program does."""
    unit = found.units[-1]
    program, threads, done = Program([slot[-1] for slot in found.slots.tensors()]), set[Any](), set[Node]()
    for node in unit:
        if (outputs := outputs_of(node)) is not None and program.has(*node.all_input_nodes):
            program.add(node, outputs)
            threads.add(node.args[-1])
            done |= {node, *outputs}
        elif node.target is _ATTENTION:
            done |= _add_attention(program, node, set(unit))
            threads.add(node.args[-1])
    output = unit[found.output]
    is_whole = done == set(unit) and len(threads) == 1 and program.has(output) and program.is_last(output)
    return Lowered(program, threads.pop()) if is_whole else None


def _add_attention(program: Program, call: Node, unit: set[Node]) -> set[Node]:
    """Add the attention and what makes its heads out of rows; the nodes that these are, none of something else."""
    query, key, value, keys, values, offsets, mask, scale, window, softcap, sinks, _ = call.args
    turned, turned_key, plain, mask_rows = _turned(query), _turned(key), _rows_of(value), _selected(mask)
    output = next(iter(call.users), None)
    if sinks is not None:  # no program adds them
        return set()
    if turned is None or turned_key is None or output is None or len(call.users) != 1 or turned[2:] != turned_key[2:]:
        return set()
    turns = [turned.norm, turned_key.norm, turned.cos, turned.sin]
    reads = [turned.rows, turned_key.rows, plain, *turns, keys, values, offsets, mask_rows]
    inside = {call, output, *_behind([query, key, value, mask], set(reads), unit)}
    is_read_alone = all(user in inside for node in (inside | {turned.rows}) - {output} for user in node.users)
    is_flat = output.target in _SAME_NUMBERS and _row_size(output) == _row_size(turned.rows)
    if plain is None or mask_rows is None or not is_flat or not is_read_alone or not program.has(*reads):
        return set()
    numbers = (turned.eps, float(scale), float(softcap))  # type: ignore[arg-type]
    program.add_attention(reads, int(window), turned.plus_one, numbers, output)  # type: ignore[arg-type]
    return inside


def _behind(ends: Sequence[Any], begins: set[Any], unit: set[Node]) -> set[Node]:
    """Nodes of the unit on the way from ``begins`` to ``ends``, these included."""
    found: set[Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node in unit and node not in begins and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _rows_of(heads: Any) -> Node | None:
    """The rows [1, W, H * D] that ``heads`` [1, H, W, D] are."""
    found = _normed_heads(heads)
    return found.rows if found is not None and found.norm is None else None


def _normed_heads(heads: Any) -> _Heads | None:
    """``heads`` [1, H, W, D] as rows whose heads may be normed, before or behind their transposition."""
    reading = normed(heads) if isinstance(heads, Node) else None
    turned = heads if reading is None else reading.input
    parted = argument_of(turned, _aten.transpose.int)
    if parted is None or tuple(turned.args[1:]) not in ((1, 2), (2, 1)):
        return None
    if reading is None and (reading := normed(parted)) is not None:
        parted = reading.input
    rows = parted.args[0] if parted.target in _SAME_NUMBERS else None
    if not isinstance(rows, Node) or tensor_of(rows).dim() != 3 or tensor_of(parted).dim() != 4:
        return None
    return _Heads(rows) if reading is None else _Heads(rows, reading.norm, reading.plus_one, reading.eps)


def _turned(heads: Any) -> _Heads | None:
    """``heads`` as h * cos + (minus their second half, their first) * sin of such heads h, or as they are."""
    if (found := _normed_heads(heads)) is not None:
        return found
    if not is_call(heads, _aten.add.Tensor) or len(heads.args) != 2 or heads.kwargs:
        return None
    straight, crossed = heads.args
    for own, cos in factors(straight):
        for other, sin in factors(crossed):
            found, turns = _normed_heads(own), [_turn_of(factor, own) for factor in (cos, sin)]
            if found is not None and None not in turns and _is_crossed(other, own):
                return found._replace(cos=turns[0], sin=turns[1])
    return None


def _turn_of(factor: Node, heads: Node) -> Node | None:
    """The cosines or sines [1, W, D] that ``factor`` [1, 1, W, D] of ``heads`` is."""
    rows = argument_of(factor, _aten.unsqueeze.default)
    if rows is None or factor.args[1] != 1 or tensor_of(rows).dim() != 3:
        return None
    return rows if tensor_of(rows).shape[-1] == tensor_of(heads).shape[-1] else None


def _is_crossed(other: Node, own: Node) -> bool:
    """Whether ``other`` is minus the second half of ``own``, then its first half."""
    if not is_call(other, _aten.cat.default) or len(other.args) != 2 or other.args[1] not in (-1, 3):
        return False
    parts, size = other.args[0], tensor_of(own).shape[-1]
    if not isinstance(parts, Sequence) or len(parts) != 2 or size % 2 != 0:
        return False
    second, first = argument_of(parts[0], _aten.neg.default), parts[1]
    ends = [argument_of(half, _aten.slice.Tensor) for half in (second, first)]
    places = [half.args[1:3] for half in (second, first) if isinstance(half, Node)]
    sizes = [tensor_of(half).shape[-1] for half in (second, first) if isinstance(half, Node)]
    return ends == [own, own] and places == [(3, size // 2), (3, 0)] and sizes == [size // 2] * 2


def _selected(mask: Any) -> Node | None:
    """The mask [1, 1, W, T] that ``mask`` [W, T] is."""
    first = argument_of(mask, _aten.select.int)
    whole = argument_of(first, _aten.select.int)
    if first is None or whole is None or mask.args[1:] != (0, 0) or first.args[1:] != (0, 0):
        return None
    return whole if tensor_of(whole).shape[:2] == (1, 1) else None


def _row_size(node: Node) -> Any:
    return tensor_of(node).shape[2:].numel() if tensor_of(node).dim() == 3 else None
