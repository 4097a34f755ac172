"""Compiled steps: ahead-of-time packages made by TorchInductor and kept on disk, one for all widths above 1 of a step.

A package holds code only. Weights, caches and buffers are its inputs, so all steps share one copy of each, packages
do not depend on the weights' values, and nothing can be recompiled at run time: there is no compiler left in the loop.
Layers that repeat are a package of their own, which steps share.
"""

import hashlib
import io
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from yggdrasil.compiler.packages import (
    SUFFIX,
    compiling,
    is_whole,
    new_package,
    open_package,
    package_folder,
    unit_path,
)
from yggdrasil.errors import YggdrasilError, first_line
from yggdrasil.native import is_native
from yggdrasil.native.shims import c_shims

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from yggdrasil.compiler.units import Traced

# "native": steps made from the configuration where its family is covered, else those of "inductor".
Backend = Literal["native", "inductor", "eager", "cudagraph"]
# Code that is traced into packages; a change anywhere else leaves them valid.
_TRACED_SOURCES = (
    "acceptance/greedy.py", "bench/rivals/steps.py", "calibration/variants.py", "checkpoints/experts.py",
    "checkpoints/formats/layers.py", "checkpoints/packable.py", "checkpoints/packing.py", "compiler/chains.py",
    "compiler/compiled.py", "compiler/fusion.py", "compiler/lowering.py", "compiler/matching.py",
    "compiler/plain_linears.py", "compiler/repeated.py", "compiler/units.py", "drafters/draft_model_steps.py",
    "drafters/heads/block/module.py", "drafters/heads/block/steps.py", "drafters/heads/eagle/eagle1.py",
    "drafters/heads/eagle/eagle3.py", "drafters/heads/eagle/state_head.py", "drafters/heads/eagle/steps.py",
    "drafters/heads/layers.py", "drafters/heads/medusa/module.py", "drafters/heads/medusa/steps.py",
    "drafters/heads/mtp/module.py", "engine/targets/steps.py", "native/__init__.py", "native/portable.py",
    "native/program.py", "native/shapes.py", "runtime/attention.py", "runtime/cache.py", "runtime/runner.py",
    "runtime/traced.py", "tree/growth.py", "tree/token_tree.py",
)  # fmt: skip
_HINT = 8  # the width that a package for all widths is traced at
_INDUCTOR_OPTIONS = {
    "cpp.threads": 1,  # pointwise work of a few rows: a second thread costs more than it saves, and would change sums
    "aot_inductor.package": True,
    "aot_inductor.compile_wrapper_opt_level": "O1",
    # Round to the model's dtype after every operator, as eager does. Else rounding follows fusion, fusion follows the
    # width, and a plain step and a verified row differ in their last bits.
    "emulate_precision_casts": True,
    # Sums of a few numbers, as of the weights of a row's experts, would be unrolled for several rows and not for one.
    "unroll_reductions_threshold": 1,
    "aot_inductor.custom_ops_to_c_shims": c_shims(),
}


class BuildClock:
    """Nanoseconds spent on making steps ready, in all; so that a first use is not taken for a slow step."""

    ns = 0


class StepKey(NamedTuple):
    """What a package depends on besides the machine, the versions and our own code."""

    step: str  # e.g. "verify"
    width: int | None  # None: every width above 1
    model: str  # fingerprint of the model's configuration, dtype and thread count
    shapes: str  # capacities of the buffers it takes

    def file_name(self) -> str:
        digest = hashlib.sha256("\n".join((*map(str, self), _environment())).encode()).hexdigest()[:20]
        return f"{self.step}-w{self.width or 'n'}-{digest}{SUFFIX}"


Step: TypeAlias = Callable[[], Sequence[Tensor]]  # over tensors fixed at construction: only their values change


def flatten(inputs: Sequence[Tensor | Sequence[Tensor]]) -> list[Tensor]:
    """Inputs in the order in which a package takes them."""
    flat: list[Tensor] = []
    for item in inputs:
        flat.extend([item] if isinstance(item, Tensor) else item)
    return flat


def package_path(key: StepKey) -> Path:
    return package_folder() / key.file_name()


def build_step(
    module: nn.Module,
    inputs: Sequence[Tensor | list[Tensor]],
    key: StepKey,
    backend: Backend,
    *,
    fuse: bool = True,
    prepare: Callable[[], object] = lambda: None,
) -> Step:
    """Return ``module`` over ``inputs`` as a step: loaded from disk, compiled first where needed, or eager.

    ``prepare`` is called where it has to be compiled, before that.
    """
    flat = flatten(inputs)
    if backend == "cudagraph":
        from yggdrasil.compiler.in_process import InProcessStep  # it knows our keys

        return InProcessStep(module, inputs, key)
    if backend != "inductor":
        return partial(_eager, module, inputs)
    start = perf_counter_ns()
    ensure_compiled(module, inputs, key, fuse=fuse, prepare=prepare, is_announced=True)
    package = open_package(package_path(key))
    BuildClock.ns += perf_counter_ns() - start
    return package.over(flat)


@torch.no_grad()
def _eager(module: nn.Module, inputs: Sequence[Tensor | list[Tensor]]) -> Sequence[Tensor]:
    outputs: Sequence[Tensor] = module(*inputs)
    return outputs


def ensure_compiled(
    module: nn.Module,
    inputs: Sequence[Tensor | list[Tensor]],
    key: StepKey,
    *,
    fuse: bool = True,
    prepare: Callable[[], object] = lambda: None,
    is_announced: bool = False,
) -> bool:
    """Compile ``module`` where its package is not on disk, once no other process compiles. False where it was there.

    ``prepare`` makes what tracing needs, when the turn has come: of a large model, no more than one at a time.
    """
    path = package_path(key)
    if is_whole(path):
        return False
    with compiling(path) as is_missing:
        if is_missing:
            prepare()
            if is_announced:
                widths = "all widths" if key.width is None else f"width {key.width}"
                print(f"yggdrasil: compiling the step {key.step} of {widths}, once", file=sys.stderr)  # noqa: T201
            compile_package(module, inputs, key, fuse=fuse)
    return is_missing


@torch.no_grad()
def compile_package(
    module: nn.Module, inputs: Sequence[Tensor | list[Tensor]], key: StepKey, *, fuse: bool = True
) -> None:
    """Export ``module`` in full and compile it to its package; a graph break or an unsupported operator is an error.

    ``fuse`` runs linears of one input as one operator, with what stands around them; without it only to measure what
    that is worth.
    """
    from yggdrasil.compiler.chains import chain_linears  # here, as below: a second of imports that no package needs
    from yggdrasil.compiler.fusion import fuse_linears
    from yggdrasil.compiler.plain_linears import keep_sums
    from yggdrasil.compiler.units import drop_assertions, without_unused_inputs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own, about its own internals
        exported = _exported(module, inputs, () if key.width is not None else getattr(module, "wide", ()))
        drop_assertions(exported)
        keep_sums(exported)
        if fuse:
            fuse_linears(exported)
        units = _compile_units(exported, key, len(flatten(inputs[:2])) - 1, fuse=fuse) if is_native() else ()
        if fuse and is_native():
            chain_linears(exported)
        traced, used = without_unused_inputs(exported, _HINT)
        _write_package(traced, package_path(key), units, used)


def _exported(module: nn.Module, inputs: Sequence[Tensor | list[Tensor]], wide: Sequence[int]) -> "ExportedProgram":
    """``module`` as a graph; the first size of the inputs numbered ``wide`` (weights and caches aside) is a symbol."""
    from yggdrasil.compiler.units import WIDEST

    arguments = list(inputs)
    shapes = torch.export.ShapesCollection()
    for number in wide:
        example = arguments[2 + number]
        assert isinstance(example, Tensor)
        arguments[2 + number] = example = example.new_zeros(_HINT, *example.shape[1:])
        shapes[example] = {0: torch.export.Dim("width", min=2, max=WIDEST)}
    dynamic = shapes.dynamic_shapes(module, tuple(arguments)) if wide else None
    return torch.export.export(module, tuple(arguments), strict=False, dynamic_shapes=dynamic)


def _compile_units(exported: "ExportedProgram", key: StepKey, table: int, *, fuse: bool) -> tuple[str, ...]:
    """Take the layers that repeat out of ``exported``: as a program, or compiled by themselves; returns units' names.

    ``table`` is the place of the input that holds the number of the table: the last of the caches.
    """
    from yggdrasil.compiler.chains import chain_linears
    from yggdrasil.compiler.lowering import lower_unit
    from yggdrasil.compiler.repeated import find_repetition
    from yggdrasil.compiler.units import Traced, replace_units, unit_program

    found = find_repetition(exported.graph_module.graph)
    if found is None:
        return ()
    operators = torch.ops.yggdrasil
    if fuse and (lowered := lower_unit(found)) is not None:
        program, num_threads = lowered
        behind = (program.code, program.numbers, num_threads)
        replace_units(exported, found, table, operators.run_layers.default, (), behind)
        return ()
    if (
        key.width is not None
    ):  # one row is over so soon that a call a layer would show, and is half of all that is compared with
        return ()
    unit = unit_program(found, _HINT)
    if fuse:
        chain_linears(unit.exported)
    digest = hashlib.sha256(f"{unit.text}\n{_environment()}".encode()).hexdigest()[:20]
    name = f"layers-{digest}"
    if not is_whole(unit_path(name)):
        _write_package(Traced.of(unit.exported), unit_path(name))
    replace_units(exported, found, table, operators.run_units.default, (name,), ())
    return (name,)


def _write_package(traced: "Traced", path: Path, units: Sequence[str] = (), used: Sequence[int] | None = None) -> None:
    from torch._inductor.exc import CppCompileError, InductorError
    from torch._inductor.package.package import package_aoti

    try:
        with new_package(path, units, used) as temporary:
            # What torch._inductor.aoti_compile_and_package does with an exported program, which this is not any more.
            files = torch._inductor.aot_compile(traced.module, tuple(traced.examples), options=dict(_INDUCTOR_OPTIONS))
            assert isinstance(files, list)
            archive = io.BytesIO()  # PyTorch's writer of files ends the process where a disk is full
            package_aoti(archive, files)
            temporary.write_bytes(archive.getvalue())
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise YggdrasilError(
            f"cannot compile to {path.parent} ({reason}); check the folder's permissions and free space, or name "
            "another in YGGDRASIL_CACHE"
        ) from error
    except (CppCompileError, InductorError) as error:
        fault = getattr(error, "inner_exception", None)
        if isinstance(fault, OSError):
            raise YggdrasilError(
                f"PyTorch cannot write what it compiles ({fault.strerror or first_line(fault)}); check permissions and "
                "free space of TORCHINDUCTOR_CACHE_DIR, or of the folder for temporary files where that is not set"
            ) from error
        raise YggdrasilError(
            f"the C++ compiler failed on {path.name} ({first_line(error)[:200]}); check that g++ or clang++ works here"
        ) from error


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
