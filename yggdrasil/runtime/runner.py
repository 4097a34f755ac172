"""A loaded model with its cache and compiled steps, and functions that move KV entries of accepted rows in a cache."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from yggdrasil.compiler.compiled import Backend, Step
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.native.direct import Mailbox, direct, native_rows
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.graphs import Capture, Recorder
from yggdrasil.runtime.kept_text import KeptText
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.native_steps.call import native_call
from yggdrasil.runtime.passes import Forward, HostBuffer, ModelCall, StepModule
from yggdrasil.runtime.states.snapshots import TextStates
from yggdrasil.runtime.traced import TracedCall

Move = Callable[[Sequence[int], int], None]

_SMALL_SHARE = 0.01  # largest ratio of a text's cache bytes to the weights' bytes at which small pages stay in use


class ModelRunner:
    """One model, its static KV cache, and its steps (calls with a fixed number of rows) by (name, width).

    With a ``recorder`` (backend "cudagraph"), steps run as parts of CUDA graphs, which ``captured`` returns.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        capacity: int,
        vocab_size: int,
        backend: Backend,
        hidden_layers: Sequence[int] = (),
        recorder: Recorder | None = None,
        widest: int | None = None,
        *,
        is_sparse: bool = False,
    ) -> None:
        """Allocate the cache; steps are declared by ``define``.

        Args:
            capacity: slots of the cache.
            vocab_size: number of logits of a row, which may include padding of the vocabulary.
            backend: how steps run; "native" falls back to another backend for models that native steps do not cover.
            hidden_layers: indices of layers whose outputs a pass returns; -1 stands for the LM head's input.
            recorder: records steps as CUDA graphs; None calls the steps directly.
            widest: maximum number of rows of a pass over recurrent layers; None means ``capacity``.
            is_sparse: use small memory pages until ``prepare_cache`` is called with a long text.
        """
        self.loaded = loaded
        self.recorder = recorder
        self.weights = list(loaded.tensors.values())
        self.cache = StaticCache.allocate(
            loaded.sizes, capacity, loaded.dtype, loaded.device, widest, is_sparse=is_sparse
        )
        is_built = backend in ("native", "uncompiled")
        native = native_call(loaded, self.cache, vocab_size, hidden_layers) if is_built else None
        # Draft heads consist of a few operators over packed layers, so they run eagerly.
        others: Backend = "inductor" if loaded.config and backend == "native" else "eager"
        self.backend: Backend = backend if not is_built else "native" if native is not None else others
        self.call: ModelCall = native or TracedCall(loaded, vocab_size, hidden_layers)
        states = self.cache.states
        if states is not None and native is None:
            states.read_weights(loaded.tensors)
        self.states = None if states is None else TextStates(states, loaded.num_threads)
        self.text = KeptText(self.states)  # the text in the cache
        self._is_complete = self._is_uncompiled = False
        self._steps: dict[tuple[str, int], Step] = {}
        self._captures: dict[tuple[tuple[str, int], ...], Capture] = {}
        self._defined: dict[tuple[str, int], tuple[nn.Module, list[Tensor | list[Tensor]]]] = {}

    def prepare_cache(self, num_tokens: int) -> None:
        """Move the KV cache to huge memory pages if ``num_tokens`` tokens take more than 1 % of the weights' bytes."""
        num_bytes = self.cache.num_bytes / self.cache.capacity * num_tokens
        if num_bytes > _SMALL_SHARE * sum(weight.nbytes for weight in self.weights):
            self.cache.use_huge_pages()

    def keep(self, rows: Sequence[int]) -> None:
        """Count ``rows`` of the last pass as committed, and apply their updates to the recurrent states.

        The caller must already have moved the rows' keys and values to the slots after the committed text.

        Args:
            rows: row indices of the pass along a path of the tree, the root's first.
        """
        if self.states is not None:
            self.states.commit(self.text.num_rows, rows)
        self.text.num_rows += len(rows)

    def keep_captured(self, start: Tensor, rows: Tensor, count: Tensor) -> None:
        """Apply the updates of a pass's accepted rows to the recurrent states, as a part of the pass's CUDA graph.

        The rows' keys and values must have been moved before. After the graph, the caller must call ``note_kept``.

        Args:
            start: [1] int64, number of committed tokens before the pass.
            rows: [W] int64 row indices; the first ``count`` [1] int64 are accepted.
        """
        if self.cache.states is not None:
            self.cache.states.commit_captured(start, rows, count)

    def note_launch(self) -> None:
        """Mark the recurrent states as being updated, before a CUDA graph that commits rows is launched.

        After the graph has ended, the caller must call ``note_kept``.
        """
        if self.states is not None:
            self.states.mark_updating()

    def note_kept(self, num_rows: int) -> None:
        """Add ``num_rows``, the number of rows that a CUDA graph has committed, to the number of cached tokens."""
        self.text.num_rows += num_rows
        if self.states is not None:
            self.states.mark_updated(self.text.num_rows)

    def read(self, tokens: Tensor, most: int) -> Iterator[Forward]:
        """Run a new text ``tokens`` [N] int64 in eager passes of at most ``most`` rows; yield the result of each pass.

        The text in the cache is dropped before the first and after the last pass.
        """
        self.text.forget()
        yield from self.extend(tokens, most)
        self.text.forget()

    def extend(self, tokens: Tensor, most: int) -> Iterator[Forward]:
        """Append ``tokens`` [N] int64 to the text in eager passes of at most ``most`` rows; yield each pass's result.

        A pass's rows are committed when the next result is requested.
        """
        most = most if self.states is None else min(most, self.states.widest)
        for chunk in tokens.split(most):
            start, rows = self.text.num_rows, torch.arange(len(chunk), device=tokens.device)
            mask, offsets = rows[:, None] >= rows[None, :], torch.tensor([start, start], device=tokens.device)
            yield self.call(self.weights, self.cache.tensors(), chunk, start + rows, mask, offsets, rows)
            self.keep(range(len(chunk)))

    def call_reading(self, hidden_layers: Sequence[int]) -> ModelCall:
        """Return a ``ModelCall`` over this runner's weights and cache whose passes return outputs of ``hidden_layers``.

        ``hidden_layers`` are indices of layers; -1 stands for the LM head's input.
        """
        if self.backend == "native":
            native = native_call(self.loaded, self.cache, self.call.vocab_size, hidden_layers)
            assert native is not None
            return native
        return TracedCall(self.loaded, self.call.vocab_size, hidden_layers)

    def define(self, name: str, width: int, module: StepModule, inputs: Sequence[Tensor]) -> None:
        """Declare the step ``name`` of ``width`` rows, which runs ``module(weights, caches, *inputs)``.

        The step is built by ``complete`` or at its first use.

        Args:
            inputs: tensors that every call reads; only their values change between calls.
        """
        assert (name, width) not in self._defined, f"the step {name} of width {width} is defined already"
        self._defined[name, width] = module, self.arguments(inputs)

    def arguments(self, inputs: Sequence[Tensor]) -> list[Tensor | list[Tensor]]:
        """Return ``[weights, caches, *inputs]``, the positional arguments of a step's module.

        ``weights`` and ``caches`` are lists of tensors.
        """
        return [self.weights, self.cache.tensors(), *inputs]

    def step(self, name: str, width: int) -> Step:
        """Return the step ``name`` of ``width`` rows: a function without arguments that returns its outputs.

        The step is built first if necessary.

        Raises:
            YggdrasilError: the step is not built, and ``complete`` was called before.
            KeyError: the step was not declared by ``define``.
        """
        found = self._steps.get((name, width))
        if found is None:
            if self._is_complete:
                raise YggdrasilError(
                    f"the step {name} of width {width} was not prepared, and nothing is compiled while decoding; "
                    "this is a fault of ours, please report it"
                )
            found = self._steps[name, width] = self._build(name, width)
        return found

    def _build(self, name: str, width: int) -> Step:
        module, inputs = self._defined[name, width]
        if self.backend not in ("inductor", "cudagraph") or self._is_uncompiled:
            return partial(_eager, module, inputs)
        from yggdrasil.compiler.in_process import InProcessStep  # imported late: native steps need no compiler

        is_captured = self.backend == "cudagraph"
        step = InProcessStep(module, inputs, name, width, is_captured=is_captured)
        if is_captured:  # a capture prepares its steps itself
            return step
        step.prepare()
        if not step.is_compiled:  # compiled and uncompiled steps differ in the last bits, so none is compiled
            self._is_uncompiled = True
            self._steps = {key: self._build(*key) for key in self._steps}
        return step

    def complete(self, report: Callable[[float], None] = lambda _: None) -> None:
        """Build all declared steps that are not built. Later, ``step`` raises YggdrasilError for a step that is not.

        Args:
            report: called after each step with the fraction of steps that are built; the last is 1.
        """
        for number, step in enumerate(self._defined, start=1):
            if step not in self._steps:
                self._steps[step] = self._build(*step)
            report(number / len(self._defined))
        self._is_complete = True

    def complete_again(self) -> None:
        """If ``complete`` was called, build the steps that were declared after that call."""
        if self._is_complete:
            self.complete()

    def launch(self, *steps: tuple[str, int]) -> Sequence[Tensor]:
        """Run steps, each given as (name, width), one after another, and return the outputs of the last one.

        With a recorder, the steps are one CUDA graph, and the next launch of this graph overwrites the outputs.
        """
        if self.recorder is not None:
            return self.captured(*steps)()
        outputs: Sequence[Tensor] = ()
        for step in steps:
            outputs = self.step(*step)()
        return outputs

    def captured(self, *steps: tuple[str, int]) -> Capture:
        """Return the CUDA graph of ``steps``, each given as (name, width), that run one after another.

        The first call of the returned object runs the steps, the second records and replays the graph, and later calls
        replay it. Each call returns the outputs of the last step. Equal ``steps`` give the same object. The runner must
        have a recorder.
        """
        found = self._captures.get(steps)
        if found is None:
            assert self.recorder is not None
            work = [self.step(*step) for step in steps]

            def run() -> Sequence[Tensor]:
                outputs: Sequence[Tensor] = ()
                for step in work:
                    outputs = step()
                return outputs

            found = self._captures[steps] = self.recorder.capture(run)
        return found

    @property
    def defined(self) -> list[tuple[str, int]]:
        """Name and width (number of rows) of every declared step, in the order of declaration."""
        return list(self._defined)


@torch.no_grad()
def _eager(module: nn.Module, inputs: Sequence[Tensor | list[Tensor]]) -> Sequence[Tensor]:
    outputs: Sequence[Tensor] = module(*inputs)
    return outputs


def row_mover(cache: StaticCache, recorder: Recorder | None = None, max_rows: int = 1) -> Move:
    """Return a function (source slots, destination slot) that moves KV entries within ``cache``.

    The entries move to consecutive slots from the destination slot on. The source slots must ascend.

    Args:
        recorder: makes each move one launch of a CUDA graph. None means one C call on a CPU with the native library,
            else PyTorch operators.
        max_rows: the most entries of one move; used only with a ``recorder``.
    """
    if recorder is not None:
        return CapturedMover(cache, recorder, max_rows)
    is_here = cache.keys[0].device.type == "cpu" and is_native()
    return _NativeMover(cache) if is_here else cache.commit


class CapturedMover:
    """Callable that moves at most ``most`` KV entries within a cache by one launch of a CUDA graph."""

    def __init__(self, cache: StaticCache, recorder: Recorder, most: int) -> None:
        device = cache.keys[0].device
        self._start, self._rows, self._count = HostBuffer(1, device), HostBuffer(most, device), HostBuffer(1, device)
        self._cache = cache
        self.capture = recorder.capture(self.move)

    def __call__(self, sources: Sequence[int], destination: int) -> None:
        self.write(sources, destination)
        self.capture()

    def write(self, sources: Sequence[int], destination: int) -> None:
        """Set which KV entries the next ``move`` moves: from slots ``sources`` to slots from ``destination`` on.

        ``sources`` must ascend.
        """
        self._start.write(destination)
        self._rows.write(*(source - destination for source in sources))
        self._count.write(len(sources))

    def move(self) -> Sequence[Tensor]:
        """Move the KV entries that ``write`` has set. Call it within a CUDA graph that includes the move."""
        arguments = self._start.tensor, self._rows.tensor, self._count.tensor
        torch.ops.yggdrasil.keep_rows(self._cache.rows(), *arguments)
        return ()


class _NativeMover:
    """Callable that moves KV entries by a direct C call; the cache's tensors are registered once, at construction."""

    def __init__(self, cache: StaticCache) -> None:
        self._mail = Mailbox(2 + cache.capacity)
        self._rows = native_rows(cache.rows(), self._mail.tensor)
        self._move = direct("move", self._rows)

    def __call__(self, sources: Sequence[int], destination: int) -> None:
        numbers = self._mail.numbers
        numbers[0], numbers[1] = len(sources), destination
        for place, source in enumerate(sources, 2):
            numbers[place] = source
        if self._move() < 0:
            raise RuntimeError("accepted rows could not be moved")
