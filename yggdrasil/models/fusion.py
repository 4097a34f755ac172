"""Graph rewrite: packed linears that read the same tensor run as one operator (query, key and value; gate and up).

Works on the exported graph, so it knows no model's source. Each layer's arithmetic is unchanged; what is saved is the
start of a parallel region a layer.
"""

import operator

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

# An operator and the one for several of its kind, where all arguments between input and threads are lists.
_FUSED: dict[object, OpOverload] = {
    torch.ops.yggdrasil.packed_linear.default: torch.ops.yggdrasil.packed_linears.default,
    torch.ops.yggdrasil.quantised_linear.default: torch.ops.yggdrasil.quantised_linears.default,
}


def fuse_shared_inputs(exported: ExportedProgram) -> int:
    """Rewrite ``exported`` in place; returns how many groups were fused."""
    graph_module = exported.graph_module
    groups: dict[tuple[Node, object], list[Node]] = {}
    for node in graph_module.graph.nodes:
        if node.target in _FUSED:
            groups.setdefault((node.args[0], node.target), []).append(node)
    fused = [_fuse(graph_module, group) for group in groups.values() if _can_fuse(group)]
    graph_module.graph.lint()
    graph_module.recompile()
    return len(fused)


def _can_fuse(group: list[Node]) -> bool:
    """Weights and biases are inputs of the graph, so they exist wherever the first layer of the group runs."""
    operands = [operand for node in group for operand in node.args[1:3] if isinstance(operand, Node)]
    return len(group) > 1 and all(operand.op == "placeholder" for operand in operands)


def _fuse(graph_module: GraphModule, group: list[Node]) -> Node:
    first = group[0]
    shared, *_, num_threads = first.args
    own = zip(*(node.args[1:-1] for node in group), strict=True)  # weights, biases, sizes, formats
    with graph_module.graph.inserting_before(first):
        together = graph_module.graph.call_function(_FUSED[first.target], (shared, *map(list, own), num_threads))
        together.meta["val"] = [node.meta["val"] for node in group]
        for i, node in enumerate(group):
            part = graph_module.graph.call_function(operator.getitem, (together, i))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
    for node in group:
        graph_module.graph.erase_node(node)
    return together
