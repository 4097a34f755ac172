"""Compiled steps: one ahead-of-time package a (step, width), made by TorchInductor and kept on disk.

A package holds code only. Weights, caches and buffers are its inputs, so all widths share one copy of each, packages
do not depend on the weights' values, and nothing can be recompiled at run time: there is no compiler left in the loop.
"""

import hashlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from yggdrasil.errors import first_line
from yggdrasil.models.fusion import fuse_shared_inputs
from yggdrasil.models.kernels.build import cache_root

Backend = Literal["inductor", "eager", "cudagraph"]
# Code that is traced into packages; a change anywhere else leaves them valid.
_TRACED_SOURCES = (
    "models/attention.py", "models/cache.py", "models/packing.py",
    "models/fusion.py", "models/formats/layers.py", "models/runner.py", "models/kernels/__init__.py",
    "tree/growth.py", "tree/token_tree.py", "acceptance/greedy.py", "drafters/steps.py",
    "drafters/chosen_steps.py",
    "engine/steps.py", "engine/logit_steps.py", "drafters/expansion_steps.py",
)  # fmt: skip
_INDUCTOR_OPTIONS = {
    "cpp.threads": 1,  # pointwise work of a few rows: a second thread costs more than it saves, and would change sums
    "aot_inductor.compile_wrapper_opt_level": "O1",
    # Round to the model's dtype after every operator, as eager does. Else rounding follows fusion, fusion follows the
    # width, and a plain step and a verified row differ in their last bits.
    "emulate_precision_casts": True,
}


_GRAPH_OPTIONS = {"emulate_precision_casts": True, "triton.cudagraphs": False}  # we capture ourselves


class BuildClock:
    """Nanoseconds spent on making steps ready, in all; so that a first use is not taken for a slow step."""

    ns = 0


class StepKey(NamedTuple):
    """What a package depends on besides the machine, the versions and our own code."""

    step: str  # e.g. "verify"
    width: int
    model: str  # fingerprint of the model's configuration, dtype and thread count
    shapes: str  # capacities of the buffers it takes

    def file_name(self) -> str:
        digest = hashlib.sha256("\n".join((*map(str, self), _environment())).encode()).hexdigest()[:20]
        return f"{self.step}-w{self.width}-{digest}.pt2"


class Step:
    """A callable over a flat list of tensors fixed at construction; only values inside them change between calls."""

    def __init__(self, run: Callable[[list[Tensor]], Sequence[Tensor]], inputs: list[Tensor]) -> None:
        self._run = run
        self._inputs = inputs

    def __call__(self) -> Sequence[Tensor]:
        return self._run(self._inputs)


def flatten(inputs: Sequence[Tensor | Sequence[Tensor]]) -> list[Tensor]:
    """Inputs in the order in which a package takes them."""
    flat: list[Tensor] = []
    for item in inputs:
        flat.extend([item] if isinstance(item, Tensor) else item)
    return flat


def package_path(key: StepKey) -> Path:
    return cache_root() / "steps" / key.file_name()


def build_step(
    module: nn.Module, inputs: Sequence[Tensor | list[Tensor]], key: StepKey, backend: Backend, *, fuse: bool = True
) -> Step:
    """Return ``module`` over ``inputs`` as a step: loaded from disk, compiled first where needed, or eager."""
    flat = flatten(inputs)
    if backend == "cudagraph" and flat[0].device.type == "cuda":
        return Step(InProcessStep(module, inputs, key), flat)
    if backend != "inductor":
        return Step(lambda _: _eager(module, inputs), flat)
    start = perf_counter_ns()
    path = package_path(key)
    if not path.exists():
        print(f"yggdrasil: compiling the step {key.step} of width {key.width}, once", file=sys.stderr)  # noqa: T201
        compile_package(module, inputs, path, fuse=fuse)
    run = load_package(path)
    BuildClock.ns += perf_counter_ns() - start
    return Step(run, flat)


def load_package(path: Path) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """What `torch._inductor.aoti_load_package` does in the end, after two seconds of importing the compiler."""
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)  # single-threaded, one runner
    run: Callable[[list[Tensor]], Sequence[Tensor]] = loader.run
    return run


@torch.no_grad()
def _eager(module: nn.Module, inputs: Sequence[Tensor | list[Tensor]]) -> Sequence[Tensor]:
    outputs: Sequence[Tensor] = module(*inputs)
    return outputs


class InProcessStep:
    """A step compiled by ``torch.compile`` when first called; run operator by operator where no compiler works.

    A capture follows either way, so what the compiler adds is fused kernels, not fewer launches.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor | list[Tensor]], key: StepKey) -> None:
        self._module, self._inputs, self._key = module, inputs, key
        self._run: Callable[..., Sequence[Tensor]] | None = None

    def __call__(self, _: list[Tensor]) -> Sequence[Tensor]:
        # NOTE: all graph modules share one code object, and Dynamo gives up on the ninth version of one.
        with torch._dynamo.config.patch(recompile_limit=1 << 10, accumulated_recompile_limit=1 << 10):
            return self._first_run() if self._run is None else self._run(*self._inputs)

    @property
    def is_compiled(self) -> bool:
        """False where the step runs operator by operator (or has not run yet)."""
        return self._run not in (None, self._module)

    def _first_run(self) -> Sequence[Tensor]:
        from torch._dynamo.exc import TorchDynamoException

        start = perf_counter_ns()
        try:
            self._run = compile_in_process(self._module, self._inputs)
            return self._run(*self._inputs)
        except TorchDynamoException as error:
            name = f"{self._key.step} of width {self._key.width}"
            reason = first_line(error)
            print(f"yggdrasil: the step {name} is not compiled and runs slower: {reason}", file=sys.stderr)  # noqa: T201
            self._run = self._module
            return _eager(self._module, self._inputs)
        finally:
            BuildClock.ns += perf_counter_ns() - start


def compile_in_process(
    module: nn.Module, inputs: Sequence[Tensor | list[Tensor]], options: Mapping[str, Any] = _GRAPH_OPTIONS
) -> Callable[..., Sequence[Tensor]]:
    """``module`` as one graph without breaks, compiled by TorchInductor when it is first called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(module, tuple(inputs), strict=False)
    compiled: Callable[..., Sequence[Tensor]] = torch.compile(
        exported.module(), fullgraph=True, dynamic=False, options=dict(options)
    )
    return compiled


@torch.no_grad()
def compile_package(
    module: nn.Module, inputs: Sequence[Tensor | list[Tensor]], path: Path, *, fuse: bool = True
) -> None:
    """Export ``module`` in full and compile it to ``path``; a graph break or an unsupported operator is an error.

    ``fuse`` runs linears of one input as one operator; without it only to measure what that is worth.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own, about its own internals
        exported = torch.export.export(module, tuple(inputs), strict=False)
        if fuse:
            fuse_shared_inputs(exported)
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(Path(folder) / "step.pt2"), inductor_configs=dict(_INDUCTOR_OPTIONS)
        )
        Path(package).replace(path)


@cache
def _environment() -> str:
    """Digest of everything but the model that a package depends on: versions, processor, our own code."""
    import transformers

    from yggdrasil.artifacts.machine import current_machine

    digest = hashlib.sha256()
    for part in (
        torch.__version__,
        transformers.__version__,
        current_machine().fingerprint,
        str(sorted(_INDUCTOR_OPTIONS.items())),
    ):
        digest.update(part.encode())
    package = Path(__file__).parent.parent
    for source in _TRACED_SOURCES:
        digest.update((package / source).read_bytes())
    return digest.hexdigest()
