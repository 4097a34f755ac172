"""Decoder layers as calls inside a traced step: each distinct layer is traced once, and called for all like it.

A step is traced with ``torch.ops.yggdrasil.run_layer`` in the place of every decoder layer, so tracing and compiling it
take the same time at any depth. The layers themselves are traced over tensors that are inputs: weights, cache and
whatever the model hands to them. Layers that trace to the same graph share one compiled graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import yggdrasil.native  # noqa: F401  (defines the operators' namespace)

Graph = Callable[..., Sequence[Tensor]]  # a graph over flat tensors, compiled or not
LayerRun = Callable[[Sequence[Tensor]], Tensor]  # one layer over the tensors that the model hands to it
_running: ContextVar[Sequence[LayerRun]] = ContextVar("_running")


@runtime_checkable
class LayerCache(Protocol):
    """The cache object that a model hands to its layers."""

    def own_tensors(self, layer: int) -> list[Tensor]:
        """Inputs of the step that this layer alone reads and writes: its keys and values."""

    def shared_tensors(self) -> list[Tensor]:
        """What the step computes for all layers."""

    def of_layer(self, layer: int, own: Sequence[Tensor], shared: Sequence[Tensor]) -> Any:
        """A cache of the same kind that holds the tensors of this one layer."""

    def note_call(self, layer: int) -> None:
        """The layer is called with it."""


class Shape(NamedTuple):
    """A tensor as far as a graph depends on it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int  # of its memory, in elements, as far as alignment goes

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        offset = int(tensor.storage_offset()) % max(1, 16 // tensor.element_size())
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, offset)

    def fake(self) -> Tensor:
        """A tensor like it, under a fake mode."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        memory = torch.empty(self.offset + max(extent, 1), dtype=self.dtype, device=self.device)
        return memory.as_strided(self.size, self.stride, self.offset)


class Call(NamedTuple):
    """How a model calls one of its layers."""

    layer: int
    spec: pytree.TreeSpec  # of (args, kwargs)
    leaves: tuple[object, ...]  # a ``Shape`` in the place of each tensor
    cache: LayerCache | None
    own: list[Tensor]  # the cache's tensors of this layer, as the trace saw them
    shared: list[Shape]  # the cache's tensors of all layers, which follow those of the leaves

    @property
    def alike(self) -> object:
        """What has to be equal for two layers to share a graph, their own structure aside."""
        others = tuple(leaf for leaf in self.leaves if not isinstance(leaf, LayerCache))
        return str(self.spec), others, tuple(self.shared)


class Traced(NamedTuple):
    """A graph over flat tensors, of which it takes those numbered ``used``."""

    graph: GraphModule
    shapes: list[Shape]  # of the inputs that it takes
    used: list[int]


def trace(function: Callable[..., Sequence[Tensor]], shapes: Sequence[Shape]) -> Traced:
    """``function`` over tensors of ``shapes`` as a graph of ATen operators, without inputs that it does not read."""
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        graph = make_fx(lambda *inputs: list(function(*inputs)))(*(shape.fake() for shape in shapes))
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    used = [number for number, node in enumerate(inputs) if node.users]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return Traced(graph, [shapes[number] for number in used], used)


class LayeredStep(NamedTuple):
    """A step's graph, and the graph of each layer that it calls."""

    traced: Traced
    calls: list[Call]  # one a layer, in the model's order; empty where the step runs no layers
    caches: list[list[int]]  # by layer: the step's inputs that are its keys and values
    graphs: list[Traced]  # of distinct layers
    graph_of: list[int]  # by layer


def trace_step(module: nn.Module, inputs: Sequence[Tensor | list[Tensor]]) -> LayeredStep:
    """Trace ``module(*inputs)`` with its decoder layers as calls."""
    flat, spec = pytree.tree_flatten(list(inputs))
    shapes = [Shape.of(tensor) for tensor in flat]
    layers: Sequence[nn.Module] = getattr(module, "decoder_layers", list)()
    calls: dict[int, Call] = {}
    seen: list[Tensor] = []

    def run(*given: Tensor) -> Sequence[Tensor]:
        seen.extend(given)
        outputs: Sequence[Tensor] = module(*pytree.tree_unflatten(list(given), spec))
        return outputs

    with _called(layers, calls):
        traced = trace(run, shapes)
    numbers = {id(tensor): number for number, tensor in enumerate(seen)}
    found = [calls[number] for number in range(len(layers))]
    caches = [[numbers[id(tensor)] for tensor in call.own] for call in found]
    graphs: list[Traced] = []
    graph_of, known = [], dict[object, int]()
    structures = _structures(layers, found)
    for call, structure in zip(found, structures, strict=True):
        key = structure, call.alike
        if key not in known:
            known[key] = len(graphs)
            graphs.append(trace_layer(layers[call.layer], call))
        graph_of.append(known[key])
    return LayeredStep(traced, found, caches, graphs, graph_of)


def trace_layer(layer: nn.Module, call: Call) -> Traced:
    """One layer over the tensors that it is called with, the cache's of all layers, its own keys and values, and its
    weights."""
    names, weights = _weights(layer)
    given = [leaf for leaf in call.leaves if isinstance(leaf, Shape)]
    cached = [Shape.of(tensor) for tensor in call.own]

    def run(*tensors: Tensor) -> list[Tensor]:
        rest = list(tensors)
        handed, rest = rest[: len(given)], rest[len(given) :]
        shared, rest = rest[: len(call.shared)], rest[len(call.shared) :]
        own, rest = rest[: len(cached)], rest[len(cached) :]
        cache = None if call.cache is None else call.cache.of_layer(call.layer, own, shared)
        leaves = [
            handed.pop(0) if isinstance(leaf, Shape) else cache if isinstance(leaf, LayerCache) else leaf
            for leaf in call.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        parameters = dict(zip(names, rest, strict=True))
        return [_only_tensor(torch.func.functional_call(layer, parameters, args, kwargs))]

    return trace(run, [*given, *call.shared, *cached, *(Shape.of(weight) for weight in weights)])


def layer_runs(
    step: LayeredStep, layers: Sequence[nn.Module], inputs: Sequence[Tensor], graphs: Sequence[Graph]
) -> list[LayerRun]:
    """What ``run_layer`` runs, by layer: its graph over the layer's own weights, and its cache among ``inputs``."""
    runs = []
    for call, number, cached in zip(step.calls, step.graph_of, step.caches, strict=True):
        own = [*(inputs[place] for place in cached), *_weights(layers[call.layer])[1]]
        num_handed = sum(isinstance(leaf, Shape) for leaf in call.leaves) + len(call.shared)
        runs.append(_bound(graphs[number], step.graphs[number], own, num_handed))
    return runs


@contextmanager
def running(runs: Sequence[LayerRun]) -> Iterator[None]:
    """Let ``run_layer`` mean these layers."""
    before = _running.set(runs)
    try:
        yield
    finally:
        _running.reset(before)


def _bound(graph: Graph, traced: Traced, own: Sequence[Tensor], num_handed: int) -> LayerRun:
    handed = [(number, shape) for number, shape in zip(traced.used, traced.shapes, strict=True) if number < num_handed]
    kept = [own[number - num_handed] for number in traced.used[len(handed) :]]  # numbers ascend

    def run(tensors: Sequence[Tensor]) -> Tensor:
        return graph(*(_laid_out(tensors[number], shape) for number, shape in handed), *kept)[0]

    return run


def _laid_out(tensor: Tensor, shape: Shape) -> Tensor:
    if tensor.stride() == shape.stride:
        return tensor
    laid_out = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=shape.device)
    return laid_out.copy_(tensor)


def _weights(layer: nn.Module) -> tuple[list[str], list[Tensor]]:
    named = dict(layer.named_parameters()) | dict(layer.named_buffers())
    return list(named), list(named.values())


def _only_tensor(output: Any) -> Tensor:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if leaf is not None]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor):
        raise TypeError(f"a layer gives {type(output).__name__}, not one tensor")
    return tensors[0]


_known_structures: "WeakKeyDictionary[nn.Module, object]" = WeakKeyDictionary()


def _structures(layers: Sequence[nn.Module], calls: Sequence[Call]) -> list[object]:
    """What each layer computes, as text: layers of equal text differ in nothing but their tensors.

    Every layer is traced for this once a process, whatever the number of its steps.
    """
    for layer, call in zip(layers, calls, strict=True):
        if layer not in _known_structures:
            traced = trace_layer(layer, call)
            _known_structures[layer] = traced.graph.code, tuple(traced.used), len(_weights(layer)[0])
    return [_known_structures[layer] for layer in layers]


@contextmanager
def _called(layers: Sequence[nn.Module], calls: dict[int, Call]) -> Iterator[None]:
    """Let every layer be one operator while the block runs, and note how it is called."""
    for number, layer in enumerate(layers):
        layer.forward = _Stand(number, calls)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own again


class _Stand:
    """The forward of a layer while its step is traced."""

    def __init__(self, layer: int, calls: dict[int, Call]) -> None:
        self._layer, self._calls = layer, calls

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        cache = next((leaf for leaf in leaves if isinstance(leaf, LayerCache)), None)
        own, shared = ([], []) if cache is None else (cache.own_tensors(self._layer), cache.shared_tensors())
        if cache is not None:
            cache.note_call(self._layer)
        noted = tuple(Shape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self._calls[self._layer] = Call(self._layer, spec, noted, cache, own, [Shape.of(tensor) for tensor in shared])
        output: Tensor = torch.ops.yggdrasil.run_layer(self._layer, [*tensors, *shared])
        return output


def _run_layer(layer: int, tensors: list[Tensor]) -> Tensor:
    return _running.get()[layer](tensors)


_library = torch.library.Library("yggdrasil", "FRAGMENT")
_library.define("run_layer(int layer, Tensor[] tensors) -> Tensor")
for _key in ("CPU", "CUDA", "PrivateUse1"):
    _library.impl("run_layer", _run_layer, _key)
torch.library.register_fake("yggdrasil::run_layer", lambda layer, tensors: torch.empty_like(tensors[0]), lib=_library)
