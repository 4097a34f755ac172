"""Compiles steps with TorchInductor in this process: one graph for the step, and one for each distinct layer.

Dynamo is not used: graphs are traced once with fixed shapes and without guards, so nothing is recompiled. Compiled code
is cached on disk for later processes: for CPUs in our cache folder, for GPUs in one folder per card and versions, from
which it is loaded into TorchInductor's cache.
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

Compiler = Callable[["Any", list[Tensor]], Callable[..., Sequence[Tensor]]]  # (graph, fake inputs) -> compiled code
_OPTIONS: dict[str, Any] = {
    # Round to the model's dtype after every operator, as eager mode does. Otherwise rounding depends on fusion, which
    # depends on the width, and plain steps and verified rows differ in their last bits.
    "emulate_precision_casts": True,
    "triton.cudagraphs": False,  # ``runtime.graphs`` records CUDA graphs
}
_CPU_OPTIONS: dict[str, Any] = {
    **_OPTIONS,
    "cpp.threads": 1,  # for pointwise work on a few rows, more threads are slower, and change the order of sums
    # Small sums, as over the weights of a row's experts, would be unrolled for several rows but not for one.
    "unroll_reductions_threshold": 1,
    "cpp.use_two_step_variance_threshold": 0,  # compute variances in one pass at every width, as PyTorch 2.11 does
}
_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_USERS_FOLDER = os.environ.get(_FOLDER_VARIABLE)  # read before importing TorchInductor, which sets the variable
_LIBRARY = re.compile(r"/\S+\.so\b")
# Not compiled on a GPU: the time of wide steps is in matrix products, which the compiler does not change. On a CPU all
# steps are compiled, so that a row has the same bits in all of them.
_UNCOMPILED_ON_GPU = ("prefill",)


def compile_by_inductor(graph: Any, inputs: list[Tensor], options: Mapping[str, Any] = _OPTIONS) -> Callable[..., Any]:
    """Compile the FX graph ``graph`` with TorchInductor, or load its code from a cache; return the compiled function.

    Called with real tensors as positional arguments, the function returns the graph's outputs as a sequence.

    Args:
        inputs: the graph's inputs as fake tensors.
        options: settings of ``torch._inductor.config``; settings that the installed PyTorch lacks are ignored.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    (mode,) = {tensor.fake_mode for tensor in inputs}  # type: ignore[attr-defined]
    if inputs[0].device.type == "cuda":
        load_kept_code()
    known = config.get_config_copy()
    patches = {name: value for name, value in options.items() if name in known}
    with tracing(TracingContext(mode)), torch.no_grad():
        compiled: Any = compile_fx(graph, inputs, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def compile_for_cpu(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    """Call ``compile_by_inductor`` with the options for CPUs.

    Code is cached in our cache folder, unless the user sets TORCHINDUCTOR_CACHE_DIR. If a library in the cache is
    damaged, it is deleted and compiled again.
    """
    if _USERS_FOLDER is None:
        os.environ[_FOLDER_VARIABLE] = str(cache_root() / "steps")
    try:
        return compile_by_inductor(graph, inputs, _CPU_OPTIONS)
    except Exception as error:
        found = _LIBRARY.search(str(error))
        library = None if found is None else Path(found[0])
        if library is None or not library.is_relative_to(os.environ[_FOLDER_VARIABLE]) or not library.exists():
            raise
        library.unlink()  # incomplete: a process was killed while writing it
        return compile_by_inductor(graph, inputs, _CPU_OPTIONS)


_COMPILERS: dict[str, Compiler] = {"cpu": compile_for_cpu, "cuda": compile_by_inductor}  # by device
_compiler: ContextVar[Compiler | None] = ContextVar("_compiler")
_run_steps: "ContextVar[list[InProcessStep]]" = ContextVar("_run_steps")


@contextmanager
def compiling_by(compiler: Compiler | None) -> Iterator[None]:
    """Context manager: steps created in the block are compiled by ``compiler``, on any device.

    None means that they are not compiled. Prefill steps are never compiled on a GPU.
    """
    before = _compiler.set(compiler)
    try:
        yield
    finally:
        _compiler.reset(before)


@contextmanager
def noting_steps() -> "Iterator[list[InProcessStep]]":
    """Context manager that yields a list, to which each step is appended whenever the step runs in the block."""
    steps: list[InProcessStep] = []
    before = _run_steps.set(steps)
    try:
        yield steps
    finally:
        _run_steps.reset(before)


class InProcessStep:
    """A step that is compiled by ``prepare`` or its first call, and runs operator by operator if that fails.

    On a GPU, steps are recorded as CUDA graphs in either case: compiling fuses kernels but saves no launches.

    Args:
        module: computes the step as ``module(*inputs)``.
        inputs: tensors that every call reads; only their values change between calls.
        step, width: name and width (number of rows) of the step, for messages.
        is_captured: the step is part of a capture. On a CPU, where only tests make captures, such a step is not
            compiled unless ``compiling_by`` sets a compiler.
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
        """Compile the step without running it. Later calls do nothing, even after a failure.

        The step runs operator by operator if it has no compiler, or if compiling fails, which prints a warning.

        Raises:
            YggdrasilError: tracing or compiling raised it. Other exceptions count as failures of compiling.
        """
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
            self.fall_back(error)
        finally:
            self._run = self._run or self._eager
            elapsed = perf_counter_ns() - start
            self.build_ms = elapsed / 1e6
            BuildClock.ns += elapsed

    def fall_back(self, error: BaseException) -> bool:
        """Make later calls run the step operator by operator, because the exception ``error`` was raised.

        Prints a warning and returns True. If the step already runs uncompiled, does nothing and returns False.
        """
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
        from yggdrasil.compiler.layer_calls import layer_runs, running, trace_step  # imports PyTorch's tracer: 1 s

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
    """Compile ``traced``, or return the code of an equal graph that this process has already compiled."""
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
    """Return the cache folder of compiled code for this GPU and these versions of PyTorch, CUDA, Triton and Python.

    The folder has one file for each set of steps that was compiled together.
    """
    from torch.utils._triton import get_triton_version

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = card, torch.__version__, torch.version.cuda, get_triton_version(), sys.version_info[:2]
    return cache_root() / "captures" / hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


@cache
def load_kept_code() -> int:
    """Load the compiled code that ``keep_code`` has written for this GPU into TorchInductor's cache.

    Returns the number of files loaded, 0 if the folder cannot be read. Later calls in this process load nothing and
    return the same number. Files that cannot be loaded are deleted with a warning.
    """
    try:
        paths = sorted(kept_code_folder().glob("*.bin"))
    except (OSError, ImportError):
        return 0
    loaded = 0
    for path in paths:
        try:
            found, reason = torch.compiler.load_cache_artifacts(path.read_bytes()), "another checksum"
        except Exception as error:  # noqa: BLE001 - PyTorch's format: on any error, the code is compiled again
            found, reason = None, first_line(error)[:200]
        if found is None:
            _say(f"{path} cannot be read and is compiled again ({reason})")
            path.unlink(missing_ok=True)
        loaded += found is not None
    return loaded


def keep_code() -> Path | None:
    """Write the code that this process has compiled for its GPU to ``kept_code_folder``, and return the file.

    Returns None if all code came from a cache, or if the file cannot be written, which prints a warning.
    """
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
