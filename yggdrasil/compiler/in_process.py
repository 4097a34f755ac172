"""Steps compiled by TorchInductor in this process: a graph for the step, one for each distinct layer.

No Dynamo: graphs are traced once over fixed shapes and have no guards, so nothing is ever compiled a second time.
TorchInductor keeps what it makes on disk, and a later process finds it there: of a CPU in our cache folder, of a GPU in
files by card and versions, from which it is put where TorchInductor looks.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from yggdrasil.artifacts.atomic import write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.compiler.compiled import BuildClock
from yggdrasil.errors import YggdrasilError, first_line

Compiler = Callable[["Any", list[Tensor]], Callable[..., Sequence[Tensor]]]  # (graph, fake inputs) -> what runs
_OPTIONS: dict[str, Any] = {
    # Round to the model's dtype after every operator, as eager does. Else rounding follows fusion, fusion follows the
    # width, and a plain step and a verified row differ in their last bits.
    "emulate_precision_casts": True,
    "triton.cudagraphs": False,  # we capture ourselves
}
_CPU_OPTIONS: dict[str, Any] = {
    **_OPTIONS,
    "cpp.threads": 1,  # pointwise work of a few rows: a second thread costs more than it saves, and would change sums
    # Sums of a few numbers, as of the weights of a row's experts, would be unrolled for several rows and not for one.
    "unroll_reductions_threshold": 1,
    "cpp.use_two_step_variance_threshold": 0,  # variances of one row are always summed in one pass
}
_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_USERS_FOLDER = os.environ.get(_FOLDER_VARIABLE)  # before TorchInductor is imported, which sets it
_LIBRARY = re.compile(r"/\S+\.so\b")
# Wide rows of a GPU: their time is in matrix products, which the compiler does not change. On a CPU a row has the same
# bits in every step, so all are compiled.
_UNCOMPILED_ON_GPU = ("prefill",)


def compile_by_inductor(graph: Any, inputs: list[Tensor], options: Mapping[str, Any] = _OPTIONS) -> Callable[..., Any]:
    """TorchInductor's code for ``graph``, from its caches where it is there."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx

    (mode,) = {tensor.fake_mode for tensor in inputs}  # type: ignore[attr-defined]
    if inputs[0].device.type == "cuda":
        load_kept_code()
    with tracing(TracingContext(mode)), torch.no_grad():
        compiled: Any = compile_fx(graph, inputs, config_patches=dict(options))
    return compiled  # type: ignore[no-any-return]


def compile_for_cpu(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    """TorchInductor's code for ``graph`` on a CPU, kept in our cache folder unless the user names another."""
    if _USERS_FOLDER is None:
        os.environ[_FOLDER_VARIABLE] = str(cache_root() / "steps")
    try:
        return compile_by_inductor(graph, inputs, _CPU_OPTIONS)
    except Exception as error:
        found = _LIBRARY.search(str(error))
        library = None if found is None else Path(found[0])
        if library is None or not library.is_relative_to(os.environ[_FOLDER_VARIABLE]) or not library.exists():
            raise
        library.unlink()  # half of it: a process was killed while it was written
        return compile_by_inductor(graph, inputs, _CPU_OPTIONS)


def interpret(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    """The traced graph as it is, operator by operator: the stand-in for a compiler, on any device."""
    run: Callable[..., Any] = graph
    return run


_COMPILERS: dict[str, Compiler] = {"cpu": compile_for_cpu, "cuda": compile_by_inductor}  # by device
_compiler: ContextVar[Compiler | None] = ContextVar("_compiler")
_run_steps: "ContextVar[list[InProcessStep]]" = ContextVar("_run_steps")


@contextmanager
def compiling_by(compiler: Compiler | None) -> Iterator[None]:
    """Compile steps that are made inside by ``compiler``, or not at all; else TorchInductor compiles them."""
    before = _compiler.set(compiler)
    try:
        yield
    finally:
        _compiler.reset(before)


@contextmanager
def noting_steps() -> "Iterator[list[InProcessStep]]":
    """Yield a list of the steps that run inside, in order."""
    steps: list[InProcessStep] = []
    before = _run_steps.set(steps)
    try:
        yield steps
    finally:
        _run_steps.reset(before)


class InProcessStep:
    """A step compiled when first called or ``prepare``d; run operator by operator where that fails.

    On a GPU a capture follows either way, so what the compiler adds there is fused kernels, not fewer launches.

    Args:
        is_captured: the step is part of a capture. On a CPU, where a capture is the work itself and only tests make
            one, it is not compiled unless ``compiling_by`` names a compiler.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor | list[Tensor]],
        step: str,
        width: int,
        *,
        is_captured: bool = False,
    ) -> None:
        self._module, self._inputs = module, inputs
        self.name = f"{step} of width {width}"
        device = pytree.tree_leaves(list(inputs))[0].device.type
        compiler = _compiler.get(None if is_captured and device == "cpu" else _COMPILERS.get(device))
        self._compiler = None if device != "cpu" and step in _UNCOMPILED_ON_GPU else compiler
        self._run: Callable[[], Sequence[Tensor]] | None = None
        self.is_compiled = self.has_run = False
        self.build_ms = 0.0

    def __call__(self) -> Sequence[Tensor]:
        noted = _run_steps.get(None)
        if noted is not None:
            noted.append(self)
        self.prepare()
        assert self._run is not None
        self.has_run = True
        return self._run()

    def prepare(self) -> None:
        """Compile now. Where that fails, print one sentence and run the step operator by operator."""
        if self._run is not None:
            return
        start = perf_counter_ns()
        try:
            if self._compiler is not None:
                self._run = self._compiled(self._compiler)
                self.is_compiled = True
        except YggdrasilError:
            raise
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            self.give_way(error)
        finally:
            self._run = self._run or self._eager
            elapsed = perf_counter_ns() - start
            self.build_ms = elapsed / 1e6
            BuildClock.ns += elapsed

    def give_way(self, error: BaseException) -> bool:
        """Run operator by operator from now on, because of ``error``; False where it does so already."""
        if self._run is not None and not self.is_compiled:
            return False
        _say(f"the step {self.name} runs uncompiled and so slower ({type(error).__name__}: {first_line(error)[:200]})")
        self._run, self.is_compiled = self._eager, False
        return True

    @torch.no_grad()
    def _eager(self) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = self._module(*self._inputs)
        return outputs

    def _compiled(self, compiler: Compiler) -> Callable[[], Sequence[Tensor]]:
        from yggdrasil.compiler.layer_calls import layer_runs, running, trace_step  # imports the tracer, a second

        flat = pytree.tree_leaves(list(self._inputs))
        with getattr(self._module, "tracing", nullcontext)():
            step = trace_step(self._module, self._inputs)
        graphs = [_compiled_once(traced, compiler) for traced in step.graphs]
        whole = _compiled_once(step.traced, compiler)
        taken = [flat[number] for number in step.traced.used]
        if not step.graphs:
            return lambda: whole(*taken)
        layers: Sequence[nn.Module] = getattr(self._module, "decoder_layers")()  # noqa: B009 - any module's
        runs = layer_runs(step, layers, flat, graphs)

        def run() -> Sequence[Tensor]:
            with running(runs):
                return whole(*taken)

        return run


_graphs: dict[tuple[Compiler, str], Callable[..., Sequence[Tensor]]] = {}


def _compiled_once(traced: Any, compiler: Compiler) -> Callable[..., Sequence[Tensor]]:
    """Compile ``traced``, or return the code of an equal graph that this process has compiled."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    text = f"{traced.graph.code}\n{traced.shapes}"
    key = compiler, hashlib.sha256(text.encode()).hexdigest()
    if key not in _graphs:
        with FakeTensorMode(shape_env=ShapeEnv()):
            inputs = [shape.fake() for shape in traced.shapes]
        _graphs[key] = compiler(traced.graph, inputs)
    return _graphs[key]


# ==== compiled code on disk ====


def kept_code_folder() -> Path:
    """Where TorchInductor's code for this card and these versions is kept, a file for each set of steps."""
    from torch.utils._triton import get_triton_version

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = card, torch.__version__, torch.version.cuda, get_triton_version(), sys.version_info[:2]
    return cache_root() / "captures" / hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


@cache
def load_kept_code() -> int:
    """Put kept code where TorchInductor looks for it, once a process; returns how many files there were."""
    try:
        paths = sorted(kept_code_folder().glob("*.bin"))
    except (OSError, ImportError):
        return 0
    loaded = 0
    for path in paths:
        try:
            loaded += torch.compiler.load_cache_artifacts(path.read_bytes()) is not None
        except Exception as error:  # noqa: BLE001 - PyTorch's own format: whatever is wrong with it, it is made again
            _say(f"{path} cannot be read and is compiled again ({first_line(error)[:200]})")
            path.unlink(missing_ok=True)
    return loaded


def keep_code() -> Path | None:
    """Write the code of all steps of this process to a file, if any of it was compiled here; else None."""
    from torch._dynamo.utils import counters

    if not counters["inductor"]["fxgraph_cache_miss"]:
        return None
    found = torch.compiler.save_cache_artifacts()
    if found is None:
        return None
    content, info = found
    name = hashlib.sha256(repr(sorted(info.inductor_artifacts)).encode()).hexdigest()[:20]
    try:
        path = kept_code_folder() / f"{name}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except (OSError, ImportError, YggdrasilError) as error:
        _say(f"compiled steps could not be kept, the next start compiles them again: {first_line(error)}")
        return None
    return path


def _say(sentence: str) -> None:
    print(f"yggdrasil: {sentence}", file=sys.stderr)  # noqa: T201
