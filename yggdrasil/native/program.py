"""Programs: what a step does to its rows, made of a graph's nodes as numbers for ``kernels/program_code.h``."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

_LINEARS, _ATTENTION, _NORM = 0, 1, 2
_NORM_ROWS = torch.ops.yggdrasil.norm_rows.default
# Linears that a program runs, and whether each of their layers has a format.
HAS_FORMATS: dict[object, bool] = {
    torch.ops.yggdrasil.packed_linears.default: False,
    torch.ops.yggdrasil.quantised_linears.default: True,
}


class Program:
    """Stages over tensors that are known by nodes; what a stage gives is known by the node that holds it."""

    def __init__(self, tensors: Sequence[Node]) -> None:
        self.code: list[int] = []
        self.numbers: list[float] = []
        self._values: dict[Node, int] = {node: number for number, node in enumerate(tensors)}
        self._next = self._num_tensors = len(tensors)

    def has(self, *nodes: Any) -> bool:
        """Whether a stage can read all these; nothing can always be read."""
        return all(node is None or node in self._values for node in nodes)

    def is_last(self, node: Node) -> bool:
        """Whether ``node`` is what the last stage gives."""
        return self._values[node] == self._next - 1

    def output(self, node: Node) -> int:
        """The number of a stage's output, among outputs."""
        return self._values[node] - self._num_tensors

    def add(self, call: Node, outputs: Sequence[Node]) -> None:
        """Add linears or a norm that ``outputs_of`` knows."""
        if call.target is _NORM_ROWS:
            self._add_norm(call)
        else:
            self._add_linears(call)
        for node in outputs:
            self._give(node)

    def _add_norm(self, call: Node) -> None:
        source, norm, plus_one, eps, residual, _ = call.args
        self.code += [_NORM, self._number(source), self._number(norm), int(plus_one), self._number(residual)]  # type: ignore[arg-type]
        self.numbers += [float(eps), 0.0, 0.0]  # type: ignore[arg-type]

    def _add_linears(self, call: Node) -> None:
        source, gate, is_gelu, norm, plus_one, eps, residual, packed, biases, sizes, *rest = call.args
        assert isinstance(packed, Sequence)
        formats = rest[0] if HAS_FORMATS[call.target] else [-1] * len(packed)
        layers = zip(packed, biases, sizes, formats, strict=True)  # type: ignore[arg-type]
        self.code += [_LINEARS, self._number(source), self._number(gate), int(is_gelu)]  # type: ignore[arg-type]
        self.code += [self._number(norm), int(plus_one), self._number(residual), len(packed)]  # type: ignore[arg-type]
        for weight, bias, size, form in layers:
            self.code += [self._number(weight), self._number(bias), size, form]
        self.numbers += [float(eps), 1.0, 0.0]  # type: ignore[arg-type]

    def add_attention(
        self, reads: Sequence[Node | None], window: int, plus_one: bool, numbers: Sequence[float], output: Node
    ) -> None:
        """``reads``: query, key and value in rows, norms of heads, cos, sin, caches, offsets, mask; ``plus_one`` as
        linears take it, of both norms; ``numbers``: eps of the norms, scale and softcap."""
        self.code += [_ATTENTION, *map(self._number, reads), window, int(plus_one), 0]
        self.numbers += numbers
        self._give(output)

    def _number(self, node: Any) -> int:
        return -1 if node is None else self._values[node]

    def _give(self, node: Node) -> None:
        self._values[node] = self._next
        self._next += 1


def outputs_of(call: Node) -> list[Node] | None:
    """The nodes that hold what ``call`` of linears or a norm gives; None of another call, or where some is not read."""
    if call.target is _NORM_ROWS:
        return [call]
    if call.target not in HAS_FORMATS or any(user.target is not operator.getitem for user in call.users):
        return None
    taken = {user.args[1]: user for user in call.users}
    count = len(call.args[7])  # type: ignore[arg-type]
    return [taken[i] for i in range(count)] if len(taken) == len(call.users) == count else None


def row_sizes(code: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:
    """How many numbers a row of each output of the program has."""
    sizes = [tensor.shape[-1] if tensor.dim() else 0 for tensor in tensors]
    at = 0
    while at < len(code):
        if code[at] == _LINEARS:
            count = code[at + 7]
            sizes += code[at + 10 : at + 8 + 4 * count : 4]
            at += 8 + 4 * count
        else:
            sizes.append(sizes[code[at + 1]])
            at += 15 if code[at] == _ATTENTION else 5
    return sizes[len(tensors) :]
