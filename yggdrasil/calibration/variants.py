"""Other ways to build the target's steps, timed beside the one that decodes: what the choice of backend is worth.

Every variant computes the logits of W tokens behind a context with our attention over a static cache, so they differ
in nothing but how the step was made. ``ahead of time`` is the decoder's own.

Dims: W rows, S cache capacity.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from yggdrasil.calibration.settings import PairSource
from yggdrasil.compiler.compiled import Backend, Step, build_step
from yggdrasil.engine.loading import DTYPES, DtypeName
from yggdrasil.errors import first_line
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.forward import ModelCall
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.runtime.traced import CallStep, TracedCall

STREAK = 4  # runs in a row; the first is warm-up
ROUNDS = 7
WIDTHS = (1, 8, 16)
OWN = "ahead of time"


class Variant(NamedTuple):
    """A way to build a step."""

    name: str
    packed: bool  # our packed linears, or PyTorch's
    fused: bool  # linears of one input in one operator
    compile_options: Mapping[str, Any] | None  # of torch.compile; None runs eagerly
    weights_constant: bool = False  # known to the compiler, which then packs them, once a graph
    cores: int = 0  # threads of the target; 0 for the pair's own
    dtype: DtypeName | None = None


def all_variants(source: PairSource) -> list[Variant]:
    """The variants worth timing on a CPU; thread counts and dtypes of our own steps included."""
    other: DtypeName = "float32" if source.dtype == "bfloat16" else "bfloat16"
    return [
        Variant(OWN, True, True, None),
        Variant("ahead of time, linears not fused", True, False, None),
        *[
            Variant(f"ahead of time, threads: {threads}", True, True, None, cores=threads)
            for threads in range(1, source.target_threads)
        ],
        Variant(f"ahead of time, {other}", True, True, None, dtype=other),
        Variant("eager, packed linears", True, False, None),
        Variant("eager", False, False, None),
        Variant("inductor", False, False, {}),
        Variant("inductor, C++ wrapper", False, False, {"cpp_wrapper": True}),
        Variant("inductor, frozen weights", False, False, {"freezing": True}, True),
        Variant("inductor, max-autotune templates", False, False, {"freezing": True, "max_autotune": True}, True),
    ]


class Built(NamedTuple):
    """A variant's steps by width, and the threads that PyTorch's own pool needs to run them."""

    steps: dict[int, Callable[[], object]]
    torch_threads: int


class RowsStep(CallStep[ModelCall]):
    """Choices after W tokens of a path behind a context; weights and caches as inputs."""

    wide = (0,)

    def forward(self, weights: list[Tensor], caches: list[Tensor], tokens: Tensor, start: Tensor) -> tuple[Tensor]:
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        mask = rows[:, None] >= rows[None, :]
        offsets = start.expand(2).contiguous()
        return (self._call(weights, caches, tokens, start + rows, mask, offsets).logits.argmax(-1),)


class ConstantStep(nn.Module):
    """The same with weights inside the module, as freezing wants them."""

    def __init__(self, step: RowsStep, loaded: LoadedModel) -> None:
        super().__init__()
        self._step = step
        self._values = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in loaded.tensors.values())

    def forward(self, caches: list[Tensor], tokens: Tensor, start: Tensor) -> tuple[Tensor]:
        output: tuple[Tensor] = self._step(list(self._values), caches, tokens, start)
        return output


def time_variants(source: PairSource, context: int, rounds: int, progress: Callable[[float], None]) -> pd.DataFrame:
    """Median milliseconds by variant and width at ``context``, each timed in turns with the decoder's own step.

    A variant that cannot be built is kept with the reason. ``against_own`` is the median ratio over the rounds.
    """
    rows: list[dict[str, object]] = []
    before = torch.get_num_threads()
    own = _built(all_variants(source)[0], source, context)
    rivals = all_variants(source)[1:]
    for i, variant in enumerate(rivals):
        try:
            rows += _time_pair(variant, _built(variant, source, context), own, rounds)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            rows.append({"variant": variant.name, "failed": first_line(error)[:120]})
        finally:
            torch.set_num_threads(before)
        torch._dynamo.reset()
        gc.collect()
        progress((i + 1) / len(rivals))
    return pd.DataFrame(rows)


def _time_pair(variant: Variant, rival: Built, own: Built, rounds: int) -> Iterator[dict[str, object]]:
    for width in rival.steps:
        times = pd.DataFrame([(_streak_ms(rival, width), _streak_ms(own, width)) for _ in range(rounds)])
        yield {
            "variant": variant.name,
            "width": width,
            "ms": times[0].median(),
            "own_ms": times[1].median(),
            "against_own": (times[0] / times[1]).median(),
        }


@torch.no_grad()
def _streak_ms(built: Built, width: int) -> float:
    run = built.steps[width]
    torch.set_num_threads(built.torch_threads)  # idle ones would spin on the cores that our operators use
    run()
    start = perf_counter_ns()
    for _ in range(STREAK - 1):
        run()
    return (perf_counter_ns() - start) / 1e6 / (STREAK - 1)


def _built(variant: Variant, source: PairSource, context: int) -> Built:
    threads = variant.cores or source.target_threads
    dtype = DTYPES[variant.dtype or source.dtype]
    loaded = load_model(source.target, dtype, torch.device("cpu"), threads, pack=variant.packed)
    inputs = [torch.full((max(WIDTHS),), 1, dtype=torch.int64), torch.tensor([context])]
    capacity = context + max(WIDTHS)
    if variant.packed:
        backend: Backend = "inductor" if variant.name.startswith(OWN) else "eager"
        runner = ModelRunner(loaded, capacity, loaded.vocab_size, backend)
        name = "rows" if variant.fused else "rows-unfused"
        steps = {width: _own_step(runner, name, width, inputs, backend, fuse=variant.fused) for width in WIDTHS}
        return Built(dict(steps), 1)
    torch.set_num_threads(threads)  # also what the compiler compiles for
    return Built({width: _torch_step(variant, loaded, capacity, width, inputs) for width in WIDTHS}, threads)


def _own_step(
    runner: ModelRunner, name: str, width: int, inputs: Sequence[Tensor], backend: Backend, *, fuse: bool
) -> Step:
    arguments = [inputs[0][:width], inputs[1]]
    key = runner.key(name, width, arguments, RowsStep.wide)
    return build_step(RowsStep(runner.call), runner.arguments(arguments), key, backend, fuse=fuse)


def _torch_step(
    variant: Variant, loaded: LoadedModel, capacity: int, width: int, inputs: Sequence[Tensor]
) -> Callable[[], object]:
    call = TracedCall(loaded, loaded.vocab_size)
    caches = StaticCache.allocate(loaded.outline.key_heads, capacity, loaded.dtype, loaded.device).tensors()
    step = RowsStep(call)
    tokens = inputs[0][:width]
    if variant.weights_constant:
        module: nn.Module = ConstantStep(step, loaded)
        arguments: tuple[Any, ...] = (caches, tokens, inputs[1])
    else:
        module, arguments = step, (list(loaded.tensors.values()), caches, tokens, inputs[1])
    if variant.compile_options is None:
        run: Callable[..., object] = module
    else:
        run = _compile_in_process(module, arguments, variant.compile_options)
    return lambda: run(*arguments)


def _compile_in_process(
    module: nn.Module, inputs: Sequence[Tensor | list[Tensor]], options: Mapping[str, Any]
) -> Callable[..., Sequence[Tensor]]:
    """``module`` as one graph without breaks, compiled by TorchInductor when it is first called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(module, tuple(inputs), strict=False)
    compiled: Callable[..., Sequence[Tensor]] = torch.compile(
        exported.module(), fullgraph=True, dynamic=False, options=dict(options)
    )
    return compiled
