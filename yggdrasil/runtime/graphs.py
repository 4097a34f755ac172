"""CUDA graphs: record sequences of device work and replay each with one launch.

On a CUDA device, the first call of a capture runs its work, since compiling and allocating are not allowed while
recording; the second call records a CUDA graph. On other devices every call runs the work.
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
    """A callable that runs work over fixed tensors at its first call, and then records and replays it as a CUDA graph.

    A replay overwrites the outputs of the previous replay. If the first run or the recording fails, it is retried with
    all steps uncompiled. If the recording fails again, every call runs the work. Both cases print a warning.
    """

    def __init__(self, run: Launch, recorder: "Recorder") -> None:
        self._run = run
        self._recorder = recorder
        self._replay: Launch | None = None
        self._was_run = False

    def __call__(self) -> Sequence[Tensor]:
        if self._replay is not None:
            return self._replay()
        if self._was_run:
            return self.prepare()()
        outputs = _with_less(lambda: self._recorder.run(self._run))
        self._was_run = True
        return outputs

    @property
    def is_prepared(self) -> bool:
        """Whether ``prepare`` has run: calls then replay the CUDA graph, or run the work if there is no graph."""
        return self._replay is not None

    def prepare(self) -> Launch:
        """Record the work as a CUDA graph, and return the function that replays it and returns its outputs.

        If the work never ran, it is run once before, on the current values of its inputs. Later calls return the same
        function. If recording fails, a warning is printed, and the returned function runs the work.

        Raises:
            YggdrasilError: the device's memory was full in the first run.
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
    """Return ``work()``; if it fails, replace the compiled steps that it ran by uncompiled ones and retry.

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
                gave_way = [step.fall_back(error) for step in steps]  # a list, so that every step is called
                if not any(gave_way):
                    if isinstance(error, torch.OutOfMemoryError):
                        raise out_of_memory(error) from error
                    raise


def out_of_memory(error: Exception) -> YggdrasilError:
    """Return the YggdrasilError to raise for ``error``, PyTorch's exception when a GPU's memory is full."""
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
        self.num_recorded = 0  # number of calls of ``record``

    def capture(self, run: Launch) -> Capture:
        """Return a callable that calls ``run`` the first time, and later replays a CUDA graph recorded from ``run``.

        The second call records the graph. On devices other than CUDA, or if recording fails, every call calls ``run``.
        """
        return Capture(run, self)

    def run(self, run: Launch) -> Sequence[Tensor]:
        """Call ``run`` on the recording stream (on a CPU: directly), and return its outputs.

        Libraries allocate workspaces per stream, so work must run on this stream once before it is recorded.
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

        Recording executes the Python code of ``run`` but not its kernels. ``Recorder.run`` must have called ``run``
        before. Every replay returns the same tensors. On a CPU nothing is recorded; the returned function calls
        ``run``.
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
    """Context manager: disable gradients and inference mode, so that all calls have one mode whatever the caller's."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
