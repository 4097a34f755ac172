"""Traces steps with decoder layers as calls, so that each distinct layer is traced and compiled once.

A step is traced with the operator ``torch.ops.yggdrasil.run_layer`` in place of every decoder layer, so tracing and
compiling take the same time for any number of layers. Layers are traced with weights, caches and arguments as inputs;
layers with equal traces share one compiled graph.
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

Graph = Callable[..., Sequence[Tensor]]  # a graph over a flat list of tensors, compiled or not
LayerRun = Callable[[Sequence[Tensor]], Tensor]  # one layer as a function of the tensors that the model passes to it
_running: ContextVar[Sequence[LayerRun]] = ContextVar("_running")


@runtime_checkable
class LayerCache(Protocol):
    """Protocol of the cache object that a model passes to its layers."""

    def own_tensors(self, layer: int) -> list[Tensor]:
        """Return the cache tensors that only this decoder layer reads and writes: keys, values, recurrent states."""

    def shared_tensors(self) -> list[Tensor]:
        """Return the cache tensors that all layers have in common, such as the offsets of a pass."""

    def of_layer(self, layer: int, own: Sequence[Tensor], shared: Sequence[Tensor]) -> Any:
        """Return a new cache object of the same class for one layer, over other tensors.

        Args:
            own: tensors in place of ``own_tensors(layer)``, in the same order.
            shared: tensors in place of ``shared_tensors()``, in the same order.
        """

    def note_call(self, layer: int) -> None:
        """Record that the layer with the index ``layer`` was called with this cache."""


class Shape(NamedTuple):
    """The properties of a tensor on which a graph depends."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int  # storage offset in elements, modulo 16 bytes, which determines alignment

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        """Return the size, stride, dtype, device and alignment of a tensor."""
        offset = int(tensor.storage_offset()) % max(1, 16 // tensor.element_size())
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, offset)

    def fake(self) -> Tensor:
        """Return an uninitialised tensor of these properties; under a ``FakeTensorMode``, a fake tensor."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        memory = torch.empty(self.offset + max(extent, 1), dtype=self.dtype, device=self.device)
        return memory.as_strided(self.size, self.stride, self.offset)


class Call(NamedTuple):
    """The arguments with which a model calls one of its layers."""

    layer: int
    spec: pytree.TreeSpec  # structure of (args, kwargs)
    leaves: tuple[object, ...]  # flattened arguments, with a ``Shape`` in place of each tensor
    cache: LayerCache | None  # the cache object among the arguments
    own: list[Tensor]  # the cache's tensors of this layer, fake tensors of the trace
    shared: list[Shape]  # shapes of the cache's tensors that all layers share; inputs after the tensors of ``leaves``

    @property
    def alike(self) -> object:
        """A key of the call's arguments. Layers of equal structure share a graph if their keys are equal."""
        others = tuple(leaf for leaf in self.leaves if not isinstance(leaf, LayerCache))
        return str(self.spec), others, tuple(self.shared)


class Traced(NamedTuple):
    """A traced graph, whose inputs are the inputs of the traced function with the indices ``used``."""

    graph: GraphModule
    shapes: list[Shape]  # of the used inputs
    used: list[int]


def trace(function: Callable[..., Sequence[Tensor]], shapes: Sequence[Shape]) -> Traced:
    """Trace ``function``, called with one tensor for each of ``shapes``, to a graph of ATen operators.

    The graph has only the inputs that the function uses, in order; ``Traced.used`` has their indices. The graph returns
    a list of tensors.
    """
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
    """The graph of a step, and the graphs of the layers that it calls."""

    traced: Traced
    calls: list[Call]  # one per layer, in the model's order; empty if the step calls no layers
    caches: list[list[int]]  # for each layer, the indices of the step's inputs that are its keys, values and states
    graphs: list[Traced]  # of distinct layers
    graph_of: list[int]  # for each layer, its index in ``graphs``


def trace_step(module: nn.Module, inputs: Sequence[Tensor | list[Tensor]]) -> LayeredStep:
    """Trace a step, ``module(*inputs)``, to a graph that calls its decoder layers, and a graph of each distinct layer.

    Args:
        module: its method ``decoder_layers`` returns the layers, in the order of their numbers; without this method,
            the whole step is one graph.
        inputs: tensors and lists of tensors; only the tensors' ``Shape`` matters, not their values.
    """
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
    """Trace one decoder layer to a graph of ATen operators, for the arguments with which a model calls it.

    The graph's inputs are the tensors among these arguments, the cache's tensors that all layers share, the cache's
    tensors of this layer, and the layer's weights.

    Raises:
        TypeError: the layer returns anything but one tensor.
    """
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
    """Return for each decoder layer of a step the function that runs its compiled graph, with weights and caches bound.

    Args:
        layers: the decoder layers of the step's module.
        inputs: the step's inputs as a flat list, which contains the caches.
        graphs: the compiled ``step.graphs``, in their order.
    """
    runs = []
    for call, number, cached in zip(step.calls, step.graph_of, step.caches, strict=True):
        own = [*(inputs[place] for place in cached), *_weights(layers[call.layer])[1]]
        num_handed = sum(isinstance(leaf, Shape) for leaf in call.leaves) + len(call.shared)
        runs.append(_bound(graphs[number], step.graphs[number], own, num_handed))
    return runs


@contextmanager
def running(runs: Sequence[LayerRun]) -> Iterator[None]:
    """Context manager: within it, the operator ``run_layer`` calls ``runs[i]`` for decoder layer i."""
    before = _running.set(runs)
    try:
        yield
    finally:
        _running.reset(before)


def _bound(graph: Graph, traced: Traced, own: Sequence[Tensor], num_handed: int) -> LayerRun:
    """Bind the tensors ``own`` to ``graph``: the inputs of the traced function from index ``num_handed`` on."""
    handed = [(number, shape) for number, shape in zip(traced.used, traced.shapes, strict=True) if number < num_handed]
    kept = [own[number - num_handed] for number in traced.used[len(handed) :]]  # numbers ascend

    def run(tensors: Sequence[Tensor]) -> Tensor:
        return graph(*(_laid_out(tensors[number], shape) for number, shape in handed), *kept)[0]

    return run


def _laid_out(tensor: Tensor, shape: Shape) -> Tensor:
    """Return ``tensor`` with the strides of ``shape``, copied if they differ."""
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
    """Return a key of each layer's computation; layers with equal keys differ only in their tensors.

    For the key, every layer is traced once per process, whatever the number of steps.
    """
    for layer, call in zip(layers, calls, strict=True):
        if layer not in _known_structures:
            traced = trace_layer(layer, call)
            _known_structures[layer] = traced.graph.code, tuple(traced.used), len(_weights(layer)[0])
    return [_known_structures[layer] for layer in layers]


@contextmanager
def _called(layers: Sequence[nn.Module], calls: dict[int, Call]) -> Iterator[None]:
    """Context manager: replace every layer's forward by the operator ``run_layer``, and record calls in ``calls``."""
    for number, layer in enumerate(layers):
        layer.forward = _Stand(number, calls)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the method of the class


class _Stand:
    """The ``forward`` of a layer while its step is traced: records the call and runs the operator ``run_layer``."""

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
