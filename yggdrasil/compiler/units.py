"""Graph rewrite: a unit of layers that repeat is compiled by itself, and one operator runs it for each of them."""

from collections.abc import Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from yggdrasil.compiler.repeated import Repetition, symbol

WIDEST = 1 << 20  # rows of a step, whatever its width


class UnitProgram(NamedTuple):
    """A unit ready to be compiled, and what its code depends on."""

    exported: ExportedProgram
    text: str


def unit_program(found: Repetition, hint: int) -> UnitProgram:
    """Export the unit; sizes that are symbols stay so, with ``hint`` as the example."""
    slots = [slot[-1] for slot in found.slots.tensors()]
    module = _unit_module(found, slots)
    tensors = [slot.meta["val"] for slot in slots]
    sizes = [([None if symbol(size) else size for size in tensor.shape], tensor.dtype) for tensor in tensors]
    return UnitProgram(_exported(module, slots, hint), f"{module.code}\n{sizes}")


def _exported(module: GraphModule, inputs: Sequence[Node], hint: int) -> ExportedProgram:
    """Export ``module``, which takes what ``inputs`` hold; their symbols become one."""
    examples = tuple(_example(node.meta["val"], hint) for node in inputs)
    width = Dim("width", min=2, max=WIDEST)
    shapes = tuple(
        {axis: width for axis, size in enumerate(node.meta["val"].shape) if symbol(size) is not None} for node in inputs
    )
    return torch.export.export(module, examples, strict=False, dynamic_shapes=shapes if any(shapes) else None)


def _unit_module(found: Repetition, slots: Sequence[Node]) -> GraphModule:
    template, graph = found.units[-1], Graph()
    copies: dict[Node, Node] = {slot: graph.placeholder(f"x{i}") for i, slot in enumerate(slots)}
    for number in found.slots.shared:
        if number[-1] not in copies:
            copies[number[-1]] = _size_of(graph, number[-1], slots, copies)
    for node in template:
        copies[node] = graph.node_copy(node, lambda read: copies[read])
    graph.output([copies[template[found.output]]])
    for i, node in enumerate(graph.nodes):  # names follow the place in the graph: equal units have equal text
        if node.op == "call_function":
            node.name, node.meta = f"v{i}", {}
    return GraphModule(torch.nn.Module(), graph)


def _size_of(graph: Graph, number: Node, slots: Sequence[Node], copies: dict[Node, Node]) -> Node:
    """A size that the unit reads, taken from one of its own inputs."""
    for slot in slots:
        for axis, size in enumerate(slot.meta["val"].shape):
            if symbol(size) is not None and symbol(size) == symbol(number.meta["val"]):
                return graph.call_function(torch.ops.aten.sym_size.int, (copies[slot], axis))
    raise AssertionError(f"no input has the size {number.meta['val']}")


def _example(value: Tensor, hint: int) -> Tensor:
    """A tensor of zeros laid out as ``value``, ``hint`` in the place of its symbol."""

    def known(sizes: Sequence[Any]) -> list[int]:
        return [
            size
            if isinstance(size, int)
            else int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, hint)))
            for size in sizes
        ]

    example = torch.empty_strided(known(value.shape), known(value.stride()), dtype=value.dtype, device=value.device)
    return example.zero_()


# ==== the graph that runs it ====


def replace_units(
    exported: ExportedProgram,
    found: Repetition,
    table: int,
    target: OpOverload,
    before: Sequence[Any],
    behind: Sequence[Any],
) -> None:
    """Let ``exported`` run all units by one call of ``target`` in the place of the layers.

    ``before`` and ``behind`` are its arguments beside what units read and give. ``table`` is the place of the input
    that holds the number of the table; an own tensor lies there at the place that it has among the inputs.
    """
    graph, inputs, units = exported.graph_module.graph, _inputs(exported), found.units
    places = {node: place for place, node in enumerate(inputs)}
    shared = [slot[-1] for slot in found.slots.shared_tensors]
    own = [places[slot[number]] for number in range(len(units)) for slot in found.slots.own]
    kept = found.read_elsewhere()
    with graph.inserting_before(units[0][0]):
        arguments = (*before, inputs[table], found.slots.carried[0], shared, own, len(units), kept, *behind)
        together = graph.call_function(target, arguments)
        together.meta["val"] = [units[number][found.output].meta["val"] for number in kept]
        for place, number in enumerate(kept):
            output = units[number][found.output]
            result = graph.call_function(getitem, (together, place))
            result.meta["val"] = output.meta["val"]
            output.replace_all_uses_with(result)
    for node in (node for unit in reversed(units) for node in reversed(unit)):
        graph.erase_node(node)
    graph.lint()


class Traced(NamedTuple):
    """A graph ready to be compiled, with examples of its inputs."""

    module: GraphModule
    examples: list[Tensor]

    @classmethod
    def of(cls, exported: ExportedProgram) -> "Traced":
        module = exported.module(check_guards=False)
        assert isinstance(module, GraphModule)
        return cls(module, pytree.tree_leaves(exported.example_inputs))


def without_unused_inputs(exported: ExportedProgram, hint: int) -> tuple[Traced, list[int]]:
    """``exported`` over those of its inputs that it reads, and their places among all.

    A graph with symbols is exported anew, which simplifies it. Without any it would come out the same, after half the
    time that exporting the model takes.
    """
    graph, root, inputs = exported.graph_module.graph, torch.nn.Module(), _inputs(exported)
    assert exported.example_inputs is not None
    examples = pytree.tree_leaves(exported.example_inputs)
    used = [place for place, node in enumerate(inputs) if node.users]
    kept = [inputs[place] for place in used]
    constants = exported.graph_signature.inputs_to_lifted_tensor_constants
    for node in [node for node in graph.nodes if node.op == "placeholder" and node not in kept]:
        if node.users:  # a number that the step holds
            root.register_buffer(node.name, exported.constants[constants[node.name]])
            with graph.inserting_after(kept[-1]):
                node.replace_all_uses_with(graph.create_node("get_attr", node.name))
        graph.erase_node(node)
    module = GraphModule(root, graph)
    if not any(symbol(size) is not None for node in kept for size in node.meta["val"].shape):
        return Traced(module, [examples[place] for place in used]), used
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta = {}  # of the first export
    return Traced.of(_exported(module, kept, hint)), used


def _inputs(exported: ExportedProgram) -> list[Node]:
    """The inputs that a caller gives, in order; constants that tracing met stand among them in the graph."""
    given = set(exported.graph_signature.user_inputs)
    return [node for node in exported.graph_module.graph.nodes if node.op == "placeholder" and node.name in given]


def drop_assertions(exported: ExportedProgram) -> None:
    """Remove checks of what tracing fixed: they compute nothing, and tell layers apart that are alike."""
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
