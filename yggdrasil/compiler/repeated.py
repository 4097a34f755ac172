"""Layers that repeat in an exported graph: units that differ in nothing but what they read.

Works on the exported graph, so it knows no model's source: what repeats is found from the attention operators, one a
layer. A unit may span several layers, where they alternate between kinds. What does not repeat stays as it is.

Dims: U units of a run, P nodes of a unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

_MOST_LAYERS = 8  # in one unit: no family alternates between more kinds
_ANCHOR = torch.ops.yggdrasil.tree_attention.default


class Slots(NamedTuple):
    """Where a unit reads from outside itself: for each slot the node that every unit reads, [U] each."""

    carried: list[Node]  # what the unit before hands over
    shared: list[list[Node]]  # the same for all units
    own: list[list[Node]]  # inputs of the graph that nobody else reads

    @property
    def shared_tensors(self) -> list[list[Node]]:
        """What is shared, sizes aside: a unit knows those from its tensors."""
        return [slot for slot in self.shared if isinstance(slot[-1].meta["val"], Tensor)]

    def tensors(self) -> list[list[Node]]:
        """All slots that hold tensors, in the order in which a unit takes them."""
        return [self.carried, *self.shared_tensors, *self.own]


@dataclass(frozen=True)
class Repetition:
    """Units of one graph that differ in nothing but what they read."""

    units: list[list[Node]]  # [U][P]
    slots: Slots
    output: int  # the node of a unit that the next one reads

    def read_elsewhere(self) -> list[int]:
        """Units whose output others read than the one behind them; the last one's among them."""
        last = len(self.units) - 1
        following = [set(unit) for unit in self.units[1:]]
        return [
            number
            for number, unit in enumerate(self.units)
            if number == last
            or any(user not in following[number] and user not in unit for user in unit[self.output].users)
        ]


def find_repetition(graph: Graph) -> Repetition | None:
    """The longest repetition of whole layers; None where there are not at least two."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    anchors = [place for place, node in enumerate(nodes) if node.target is _ANCHOR]
    for layers in range(1, min(_MOST_LAYERS, len(anchors) // 2) + 1):
        distances = [after - before for before, after in zip(anchors, anchors[layers:], strict=False)]
        longest: list[int] = []
        for _, group in groupby(range(len(distances)), key=lambda place: distances[place]):
            longest = max(longest, list(group), key=len)
        period = distances[longest[0]]
        found = _best_cut(nodes, anchors[longest[0]], period, len(longest) // layers + 1)
        if found is not None:
            return found
    return None


def _best_cut(nodes: list[Node], anchor: int, period: int, count: int) -> Repetition | None:
    """Units of ``period`` nodes around ``anchor``, cut where they hand over the fewest values."""
    cuts = []
    for begin in range(max(0, anchor - period + 1), anchor + 1):
        end = begin + period
        places = {node: place for place, node in enumerate(nodes[end : end + period])}
        crossing = sum(any(user in places for user in node.users) for node in nodes[begin:end])
        cuts.append((crossing, begin))
    for _, begin in sorted(cuts):
        units = [nodes[at : at + period] for at in range(begin, len(nodes) - period + 1, period)][:count]
        found = _matched(units) if len(units) > 1 else None
        if found is not None:
            return found
    return None


def _matched(units: list[list[Node]]) -> Repetition | None:
    """The units as a repetition; None where one differs from another."""
    template = units[-1]
    readings = [_readings(unit, template) for unit in units]
    if any(reading is None for reading in readings):
        return None
    shared, own, carried = [], [], {}
    for slot in readings[-1] or {}:
        values = [reading[slot] for reading in readings if reading is not None]
        before = units[-2].index(slot) if slot in units[-2] else None
        if before is not None:
            follows = all(value is unit[before] for value, unit in zip(values[1:], units, strict=False))
            if not follows or not _is_alike([*values, template[before]]):
                return None
            carried[before] = values
        elif all(value is slot for value in values):
            shared.append(values)
        elif all(value.op == "placeholder" for value in values) and _is_alike(values):
            own.append(values)
        else:
            return None
    if len(carried) != 1 or not all(_is_bare(values[-1]) for values in (*carried.values(), *shared, *own)):
        return None
    ((output, values),) = carried.items()
    found = Repetition(units, Slots(values, shared, own), output)
    return found if _hands_over_nothing_else(found) else None


def _readings(unit: Sequence[Node], template: Sequence[Node]) -> dict[Node, Node] | None:
    """What ``unit`` reads from outside where the template reads a node; None where it does something else."""
    places = {node: place for place, node in enumerate(template)}
    outside: dict[Node, Node] = {}
    for node, like in zip(unit, template, strict=True):
        values, spec = pytree.tree_flatten((node.target, node.args, node.kwargs))
        wanted, wanted_spec = pytree.tree_flatten((like.target, like.args, like.kwargs))
        if spec != wanted_spec:
            return None
        for value, want in zip(values, wanted, strict=True):
            if not isinstance(want, Node):
                if type(value) is not type(want) or value != want:
                    return None
            elif not isinstance(value, Node):
                return None
            elif want in places:
                if value is not unit[places[want]]:
                    return None
            elif outside.setdefault(want, value) is not value:
                return None
    return outside


def _is_alike(values: Sequence[Node]) -> bool:
    """Whether all are tensors of one size, layout and dtype."""
    tensors = [value.meta["val"] for value in values]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return False
    return len({(str(t.shape), str(t.stride()), t.dtype, t.device) for t in tensors}) == 1


def symbol(size: Any) -> Any:
    """What a symbolic size is called; None for a number and for what is computed from one."""
    return size.node.expr if isinstance(size, torch.SymInt) and size.node.expr.is_symbol else None


def _is_bare(node: Node) -> bool:
    """Whether every size is a number or one symbol: what the unit's own export can be told."""
    value = node.meta["val"]
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return all(isinstance(size, int) or symbol(size) is not None for size in sizes)


def _hands_over_nothing_else(found: Repetition) -> bool:
    """Whether others read nothing of a unit but what it carries on, and use nothing that is the unit's own."""
    for number, unit in enumerate(found.units):
        inside = set(unit)
        own = {slot[number] for slot in found.slots.own}
        if any(user not in inside for node in (inside | own) - {unit[found.output]} for user in node.users):
            return False
    return True
