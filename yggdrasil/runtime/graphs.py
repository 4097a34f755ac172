"""Captured sequences: device work that a step needs, launched at once.

On a CUDA device a capture becomes a CUDA graph on its second call; the first call is the work itself, which compiles
and allocates what a capture may not. On other devices it stays the work itself, so one call path serves, and is tested
on, all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns

import torch
from torch import Tensor

from yggdrasil.compiler.compiled import BuildClock

Launch = Callable[[], Sequence[Tensor]]


class Capture:
    """Work over tensors fixed at construction. Outputs are overwritten by the next call."""

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
            return self._recorder.run(self._run)
        return self.prepare()()

    def prepare(self) -> Launch:
        """Record now; runs the work once, over whatever its inputs hold, if it never ran."""
        if not self._was_run:
            self()
        if self._replay is None:
            self._replay = self._recorder.record(self._run)
        return self._replay


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
