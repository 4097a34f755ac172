"""Graph rewrite: linear layers that are no module of a model's become an operator that sums each row in one order.

A router, which chooses a mixture's experts, multiplies by a weight of its own. PyTorch's product for one row differs in
its last bits from that for several, and where two experts are nearly equal a row would go another way.
"""

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from yggdrasil.checkpoints.packable import is_packable
from yggdrasil.compiler.matching import is_call, tensor_of

# Linears that are packed; whoever runs them runs the plain ones.
_PACKED = (torch.ops.yggdrasil.packed_linear.default, torch.ops.yggdrasil.quantised_linear.default)


def keep_sums(exported: ExportedProgram) -> int:
    """Rewrite ``exported``, where its linears are packed, in place; returns how many were not."""
    graph = exported.graph_module.graph
    num_threads = next((node.args[-1] for node in graph.nodes if node.target in _PACKED), None)
    plain = [node for node in graph.nodes if is_call(node, torch.ops.aten.linear.default) and _is_served(node)]
    if num_threads is None:
        return 0
    for node in plain:
        rows, weight, *bias = node.args
        node.target = torch.ops.yggdrasil.plain_linear.default
        node.args = (rows, weight, bias[0] if bias else None, num_threads)
    graph.lint()
    exported.graph_module.recompile()
    return len(plain)


def _is_served(linear: Node) -> bool:
    rows, weight = map(tensor_of, linear.all_input_nodes[:2])
    return weight.dim() == 2 and rows.dtype == weight.dtype and is_packable(weight) and not linear.kwargs
