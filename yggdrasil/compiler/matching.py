"""What graph rewrites ask of nodes: which operator one calls, on what, and what it holds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def is_call(node: Any, target: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is target


def argument_of(node: Any, target: object) -> Node | None:
    """The first argument of ``node`` where it calls ``target`` on a tensor."""
    return node.args[0] if is_call(node, target) and isinstance(node.args[0], Node) else None


def factors(product: Any) -> Sequence[tuple[Node, Node]]:
    """The two tensors that ``product`` multiplies, either first; none where it is something else."""
    if not is_call(product, torch.ops.aten.mul.Tensor):
        return ()
    first, second = product.args
    return ((first, second), (second, first)) if isinstance(first, Node) and isinstance(second, Node) else ()


def tensor_of(node: Node) -> Tensor:
    value: Any = node.meta["val"]
    assert isinstance(value, Tensor)
    return value
