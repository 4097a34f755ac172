"""Graph rewrite: packed linears that read the same tensor run as one operator, with what stands around them.

Query, key and value are one operator, gate and up another; the norm or the gating that only they read is computed
where they read it, a residual is added where their output is written, and where only the best token is read no logits
are written. A norm of what they give is an operator too, which adds the residual behind it. Works on the exported
graph, so it knows no model's source: what has another form stays as it is, for TorchInductor. Each layer's arithmetic
is unchanged; what is saved is passes over the rows by one thread, and calls.
"""

import operator
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from yggdrasil.compiler.matching import argument_of, factors, is_call, tensor_of

_aten = torch.ops.aten
# An operator and the one for several of its kind, where all arguments between input and threads are lists.
_FUSED: dict[object, OpOverload] = {
    torch.ops.yggdrasil.packed_linear.default: torch.ops.yggdrasil.packed_linears.default,
    torch.ops.yggdrasil.quantised_linear.default: torch.ops.yggdrasil.quantised_linears.default,
}
# An operator and the one that gives no more of its output than the best of each row.
_BEST: dict[object, OpOverload] = {
    torch.ops.yggdrasil.packed_linear.default: torch.ops.yggdrasil.packed_best.default,
    torch.ops.yggdrasil.quantised_linear.default: torch.ops.yggdrasil.quantised_best.default,
    torch.ops.yggdrasil.screened_linear.default: torch.ops.yggdrasil.screened_best.default,
}
_NORM = torch.ops.yggdrasil.norm_rows.default


class Reading(NamedTuple):
    """How linears come to their rows, as the operators take it."""

    input: Node
    gate: Node | None = None
    is_gelu: bool = False  # else silu
    norm: Node | None = None
    plus_one: bool = False  # the norm multiplies by one more than its weight, before it rounds
    eps: float = 0.0


def fuse_linears(exported: ExportedProgram) -> int:
    """Rewrite ``exported`` in place; returns how many operators came in the place of others."""
    graph = exported.graph_module.graph
    _drop_casts(graph)
    count = sum(_seek_best(graph, node) for node in list(graph.nodes))
    graph.eliminate_dead_code()
    _drop_copies(graph)
    count += sum(_norm_behind(graph, node) for node in list(graph.nodes))
    graph.eliminate_dead_code()
    groups: dict[tuple[Node, object], list[Node]] = {}
    for node in graph.nodes:
        if node.target in _FUSED:
            groups.setdefault((node.args[0], node.target), []).append(node)
    count += sum(_fuse(graph, group) for group in groups.values() if _can_fuse(group))
    graph.eliminate_dead_code()
    graph.lint()
    exported.graph_module.recompile()
    return count


def _drop_casts(graph: Graph) -> None:
    """Remove casts to the dtype that a tensor has: in float32 they hide who reads what."""
    for node in list(graph.nodes):
        source = _uncast(node)
        is_plain = source is not node and len(node.args) == 2 and not node.kwargs
        if is_plain and tensor_of(source).dtype == tensor_of(node).dtype:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _can_fuse(group: list[Node]) -> bool:
    """Weights and biases are inputs of the graph, so they exist wherever the first layer of the group runs."""
    operands = [operand for node in group for operand in node.args[1:3] if isinstance(operand, Node)]
    return all(operand.op == "placeholder" for operand in operands)


def _fuse(graph: Graph, group: list[Node]) -> bool:
    """Whether the group became one operator: there is no use where nothing comes together."""
    first = group[0]
    source, *_, num_threads = first.args
    assert isinstance(source, Node)
    reads_alone = set(source.users) == set(group)
    reading = (reads_alone and (normed(source) or _gated(source))) or Reading(source)
    addition = _addition(first) if len(group) == 1 else None
    if len(group) == 1 and addition is None and reading.input is source and not _is_normed(first):
        return False
    last = addition[0] if addition else first
    own = map(list, zip(*(node.args[1:-1] for node in group), strict=True))  # weights, biases, sizes, formats
    residual = addition[1] if addition else None
    with graph.inserting_before(last):
        together = graph.call_function(_FUSED[first.target], (*reading, residual, *own, num_threads))
        together.meta["val"] = [node.meta["val"] for node in group]
        outputs = [last] if addition else group
        parts = [graph.call_function(operator.getitem, (together, i)) for i in range(len(outputs))]
    for node, part in zip(outputs, parts, strict=True):
        part.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    return True


def _is_normed(linear: Node) -> bool:
    """Whether an operator norms what ``linear`` gives: the two may then run as one program."""
    reader = _only_user(linear)
    return reader is not None and is_call(reader, _NORM)


def _norm_behind(graph: Graph, product: Node) -> bool:
    """Whether ``product`` was a layer's output, normed not for layers alone, and now is an operator's."""
    reading = normed(product)
    if reading is None or reading.input.target not in _FUSED or all(user.target in _FUSED for user in product.users):
        return False
    addition = _addition(product)
    last, residual = addition or (product, None)
    num_threads = reading.input.args[-1]
    with graph.inserting_before(last):
        arguments = (reading.input, reading.norm, reading.plus_one, reading.eps, residual, num_threads)
        together = graph.call_function(_NORM, arguments)
    together.meta["val"] = last.meta["val"]
    last.replace_all_uses_with(together)
    graph.erase_node(last)
    return True


def _seek_best(graph: Graph, best: Node) -> bool:
    """Whether ``best`` was a search through a layer's output, of which nothing else is read, and now is the layer."""
    output = argument_of(best, torch.ops.yggdrasil.best_tokens.default)
    while output is not None and output.target not in _BEST and len(output.users) == 1:
        output = _whole_of(output)
    if output is None or output.target not in _BEST or len(output.users) != 1:
        return False
    with graph.inserting_before(best):
        found = graph.call_function(_BEST[output.target], output.args)
    found.meta["val"] = best.meta["val"]
    best.replace_all_uses_with(found)
    graph.erase_node(best)
    return True


def _drop_copies(graph: Graph) -> None:
    """Where all outputs of a layer are wanted, a copy of its weights is of no use."""
    for layer in [node for node in graph.nodes if node.target is torch.ops.yggdrasil.screened_linear.default]:
        x, packed, bias, _, _, *others = layer.args
        layer.target, layer.args = torch.ops.yggdrasil.packed_linear.default, (x, packed, bias, *others)


def _whole_of(part: Node) -> Node | None:
    """What ``part`` is the same numbers of, as rows: the one matrix of several, or a cut that leaves all."""
    whole = argument_of(part, _aten.select.int) or argument_of(part, _aten.slice.Tensor)
    return whole if whole is not None and tensor_of(whole).numel() == tensor_of(part).numel() else None


def _addition(linear: Node) -> tuple[Node, Node] | None:
    """The sum of what the layer or norm gives, which nothing else reads, and a tensor like it; and that tensor."""
    reader = _only_user(linear)
    if reader is None or not is_call(reader, _aten.add.Tensor) or len(reader.args) != 2 or reader.kwargs:
        return None
    others = [read for read in reader.args if read is not linear]
    if len(others) != 1 or not isinstance(others[0], Node) or not _is_like(others[0], linear):
        return None
    return reader, others[0]


def _gated(product: Node) -> Reading | None:
    """``product`` as silu(gate) * input or gelu(gate) * input, where nothing else reads the gate's."""
    for gated, other in factors(product):
        is_gelu = is_call(gated, _aten.gelu.default) and gated.kwargs == {"approximate": "tanh"}
        is_gate = is_gelu or is_call(gated, _aten.silu.default)
        if is_gate and _only_user(gated) is product and _is_like(gated, other):
            (gate,) = gated.args
            assert isinstance(gate, Node)
            return Reading(other, gate=gate, is_gelu=is_gelu)
    return None


def normed(product: Node) -> Reading | None:
    """``product`` as weight * (x * rsqrt(mean(x squared) + eps)), the sum in float32, where it has this form; or as
    (1 + weight) times that, cast from float32."""
    for factor, other in factors(_uncast(product)):
        less = _one_less(factor)
        weight, scaled = (factor, _uncast(other)) if less is None else (less, other)
        is_weight = weight.op == "placeholder" and tensor_of(weight).dim() == 1
        is_weight = is_weight and tensor_of(weight).dtype == tensor_of(product).dtype
        is_cast_last = not is_call(product, _aten.mul.Tensor)
        is_norm = is_weight and tensor_of(scaled).dtype == torch.float32 and not (is_cast_last and less is None)
        for whole, inverse in factors(scaled) if is_norm else ():
            eps = _eps_of(inverse, whole)
            source = _uncast(whole)
            if eps is not None and _is_like(source, product):
                return Reading(source, norm=weight, plus_one=less is not None, eps=eps)
    return None


def _one_less(factor: Node) -> Node | None:
    """What ``factor`` is one more than, in float32."""
    less = argument_of(factor, _aten.add.Tensor)
    if less is None or factor.args[1:] != (1.0,) or factor.kwargs or tensor_of(factor).dtype != torch.float32:
        return None
    return _uncast(less)


def _eps_of(inverse: Node, whole: Node) -> float | None:
    """What is added where ``inverse`` is rsqrt(mean(whole squared) + eps) over the last dimension."""
    total = argument_of(inverse, _aten.rsqrt.default)
    mean = argument_of(total, _aten.add.Tensor)
    square = argument_of(mean, _aten.mean.dim)
    if square is None or mean is None or total is None or mean.args[1:] != ([-1], True):
        return None
    is_square = is_call(square, _aten.pow.Tensor_Scalar) and square.args == (whole, 2)
    eps = total.args[1]
    return eps if is_square and isinstance(eps, float) else None


def _uncast(node: Node) -> Node:
    """What ``node`` is another dtype of, or itself."""
    found = argument_of(node, _aten.to.dtype)
    found = argument_of(node, _aten.type_as.default) if found is None else found
    return node if found is None else found


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_like(node: Node, other: Node) -> bool:
    one, two = tensor_of(node), tensor_of(other)
    return one.shape == two.shape and one.dtype == two.dtype
