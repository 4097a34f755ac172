"""CUDA graphs: record sequences of device work and replay each with one launch.

On a CUDA device, a capture runs its work on the first call, which compiles and allocates what a recording must not, and
records a CUDA graph on the second. On other devices every call runs the work, so all devices share one code path.
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
    """A callable that runs work over fixed tensors, records it as a CUDA graph, and then replays the graph.

    Each call overwrites the outputs of the one before. Work that fails on its first run, or cannot be recorded, is
    retried with its steps uncompiled. If recording still fails, every call runs the work. Both cases print a warning.
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
    def is_prepared(self) -> bool:
        """Whether ``prepare`` has ended, so that calls replay the CUDA graph or, where there is none, run the work."""
        return self._replay is not None

    def prepare(self) -> Launch:
        """Record the work as a CUDA graph, and return the function that replays it and returns its outputs.

        Work that never ran is run once first, with the present values of its inputs. Later calls return the same
        function. If recording fails, a warning is printed, and the function runs the work.

        Raises:
            YggdrasilError: the device's memory is full in the first run.
        """
        if not self._was_run:
            self()
        if self._replay is None:
            try:
                self._replay = _with_less(lambda: self._recorder.record(self._run))
            except Exception as error:  # noqa: BLE001 - a driver, an allocator or a library may fail while recording
                sentence = f"a step cannot be captured and runs slower ({type(error).__name__}: {first_line(error)})"
                print(f"yggdrasil: {sentence}", file=sys.stderr)  # noqa: T201
                self._replay = lambda: self._recorder.run(self._run)
        return self._replay


def _with_less(work: Callable[[], Result]) -> Result:
    """Return ``work()``; if it fails, retry with the steps it ran uncompiled.

    Raises:
        YggdrasilError: if the device's memory is full.
    """
    while True:
        with noting_steps() as steps:
            try:
                return work()
            except YggdrasilError:
                raise
            except Exception as error:
                gave_way = [step.fall_back(error) for step in steps]  # a list, so that every step is called
                if not any(gave_way):
                    if isinstance(error, torch.OutOfMemoryError):
                        raise out_of_memory(error) from error
                    raise


def out_of_memory(error: Exception) -> YggdrasilError:
    """Return, not raise, the YggdrasilError for ``error``, the exception of a GPU whose memory is full."""
    return YggdrasilError(
        f"the GPU's memory is full ({first_line(error)[:160]}); take a smaller model or --max-length, or end other "
        "programs that use the card"
    )


class Recorder:
    """Device, memory pool and side stream that the captures of one engine share.

    Captures replay one after another, so they can share the memory of their intermediate results.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self.num_recorded = 0

    def capture(self, run: Launch) -> Capture:
        """Return a callable that runs ``run`` on its first call, and from its second on replays a CUDA graph of it.

        The second call records the graph. On other devices, or if that fails, every call runs ``run``.
        """
        return Capture(run, self)

    def run(self, run: Launch) -> Sequence[Tensor]:
        """Run the work ``run`` on the recording stream, and return its outputs.

        Libraries allocate their workspaces per stream, so work must run there once before it is recorded.
        """
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
        """Capture ``run`` as a CUDA graph, and return a function that replays it and returns the outputs.

        The Python code of ``run`` runs now, its kernels do not; it must have run before. The outputs are the same
        tensors each time. On a CPU nothing is recorded, and the returned function calls ``run``.
        """
        self.num_recorded += 1
        if self._stream is None:
            return lambda: self.run(run)
        start = perf_counter_ns()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (of a compiler or server) may call the driver meanwhile.
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
    """Context manager: use the same gradient mode for the first call and the recording, whatever the caller's mode."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
