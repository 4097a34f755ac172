"""Captured sequences: device work that a step needs, launched at once.

On a CUDA device a capture becomes a CUDA graph on its second call; the first call is the work itself, which compiles
and allocates what a capture may not. On other devices it stays the work itself, so one call path serves, and is tested
on, all of them.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TypeVar

import torch
from torch import Tensor

from yggdrasil.compiler.compiled import BuildClock
from yggdrasil.compiler.in_process import noting_steps
from yggdrasil.errors import YggdrasilError, first_line

Launch = Callable[[], Sequence[Tensor]]
Result = TypeVar("Result")


class Capture:
    """Work over tensors fixed at construction. Outputs are overwritten by the next call.

    Work that fails when it first runs, or cannot be recorded, is tried again with its steps uncompiled; what then still
    cannot be recorded is run instead of replayed. Each is said in one sentence.
    """

    def __init__(self, run: Launch, recorder: "Recorder") -> None:
        self._run = run
        self._recorder = recorder
        self._replay: Launch | None = None
        self._was_run = False

    def __call__(self) -> Sequence[Tensor]:
        if self._replay is not None:
            return self._replay()
        if not self._was_run:
            self._was_run = True
            return _with_less(lambda: self._recorder.run(self._run))
        return self.prepare()()

    @property
    def is_recorded(self) -> bool:
        """Whether a call replays."""
        return self._replay is not None

    def prepare(self) -> Launch:
        """Record now; runs the work once, over whatever its inputs hold, if it never ran."""
        if not self._was_run:
            self()
        if self._replay is None:
            try:
                self._replay = _with_less(lambda: self._recorder.record(self._run))
            except Exception as error:  # noqa: BLE001 - a driver, an allocator or a library may refuse a capture
                sentence = f"a step cannot be captured and runs slower ({type(error).__name__}: {first_line(error)})"
                print(f"yggdrasil: {sentence}", file=sys.stderr)  # noqa: T201
                self._replay = lambda: self._recorder.run(self._run)
        return self._replay


def _with_less(work: Callable[[], Result]) -> Result:
    """``work()``, again with its steps uncompiled where it fails.

    Raises:
        YggdrasilError: the device's memory is full.
    """
    while True:
        with noting_steps() as steps:
            try:
                return work()
            except YggdrasilError:
                raise
            except Exception as error:
                gave_way = [step.give_way(error) for step in steps]  # all of them
                if not any(gave_way):
                    if isinstance(error, torch.OutOfMemoryError):
                        raise out_of_memory(error) from error
                    raise


def out_of_memory(error: Exception) -> YggdrasilError:
    """The one sentence for a device whose memory is full."""
    return YggdrasilError(
        f"the GPU's memory is full ({first_line(error)[:160]}); take a smaller model or --max-length, or end other "
        "programs that use the card"
    )


class Recorder:
    """What the captures of one engine share: a device, a memory pool and a side stream.

    Captures replay one after another, so what one needs only while it runs may be another's too.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self.num_recorded = 0

    def capture(self, run: Launch) -> Capture:
        return Capture(run, self)

    def run(self, run: Launch) -> Sequence[Tensor]:
        """Do the work itself, on the stream that records: libraries keep a workspace for each stream."""
        if self._stream is None:
            with _no_gradients():
                return run()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), _no_gradients():
            outputs = run()
        current.wait_stream(self._stream)
        return outputs

    def record(self, run: Launch) -> Launch:
        """Record ``run`` without executing it; returns what executes it and hands back its outputs."""
        self.num_recorded += 1
        if self._stream is None:
            return lambda: self.run(run)
        start = perf_counter_ns()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a compiler's, a server's) may call the driver meanwhile.
        with (
            _no_gradients(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            outputs = run()
        BuildClock.ns += perf_counter_ns() - start

        def replay() -> Sequence[Tensor]:
            graph.replay()
            return outputs

        return replay


@contextmanager
def _no_gradients() -> Iterator[None]:
    """One mode for the first call, for recording and so for compiling, whichever the caller runs under."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
