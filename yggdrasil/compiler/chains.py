"""Graph rewrite: linears that read what linears before them gave run as one program, between two calls of a graph.

What a layer does behind its attention is such a chain: the output layer, gate and up, down, and norms behind them. It
works on what ``fusion`` leaves, where gates and residuals are the linears' own, and changes no arithmetic.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from yggdrasil.native.program import Program, outputs_of


class _Stage(NamedTuple):
    """One call of linears or a norm, and the nodes that hold its outputs."""

    call: Node
    outputs: list[Node]


def chain_linears(exported: ExportedProgram) -> int:
    """Rewrite ``exported`` in place; returns how many programs came in the place of several calls."""
    graph = exported.graph_module.graph
    places = {node: place for place, node in enumerate(graph.nodes)}
    stages = [_Stage(node, outputs) for node in graph.nodes if (outputs := outputs_of(node)) is not None]
    chains = []
    while stages:
        chain = _chain_from(stages, places)
        stages = [stage for stage in stages if stage not in chain]
        if len(chain) > 1:
            chains.append(chain)
    for chain in chains:  # when all are found: what reads another chain has no place any more behind this
        _replace(graph, chain)
    graph.eliminate_dead_code()
    graph.lint()
    exported.graph_module.recompile()
    return len(chains)


def _chain_from(stages: Sequence[_Stage], places: dict[Node, int]) -> list[_Stage]:
    """The first stage, and those behind it that read nothing but its chain and what is there before it."""
    first, *others = stages
    chain, given = [first], set(first.outputs)
    for stage in others:
        reads = stage.call.all_input_nodes
        outside = [node for node in reads if node not in given]
        is_there = all(places[node] < places[first.call] for node in outside)
        if is_there and len(outside) < len(reads) and stage.call.args[-1] == first.call.args[-1]:
            chain.append(stage)
            given.update(stage.outputs)
    return chain


def _replace(graph: Graph, chain: Sequence[_Stage]) -> None:
    """Let one program stand where the first stage does."""
    inside = [node for stage in chain for node in stage.outputs]
    calls = [stage.call for stage in chain]  # in order: a graph is the same in every process
    tensors = list(dict.fromkeys(node for call in calls for node in call.all_input_nodes if node not in inside))
    program = Program(tensors)
    for stage in chain:
        program.add(*stage)
    wanted = [node for node in inside if any(user not in calls for user in node.users)]
    first = chain[0].call
    with graph.inserting_before(first):
        arguments = (tensors, program.code, program.numbers, [program.output(node) for node in wanted], first.args[-1])
        together = graph.call_function(torch.ops.yggdrasil.run_program.default, arguments)
        together.meta["val"] = [node.meta["val"] for node in wanted]
        for place, node in enumerate(wanted):
            part = graph.call_function(operator.getitem, (together, place))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part, lambda user: user not in calls)
    for stage in reversed(chain):
        for node in dict.fromkeys([*stage.outputs, stage.call]):  # a norm is its own output
            graph.erase_node(node)
