"""One running request of a decoder, and its result."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from math import inf
from threading import Lock, get_ident
from types import GeneratorType
from weakref import WeakSet

import torch

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.engine.host_acceptance import PreparedRequest
from yggdrasil.engine.text_stream import FinishReason, TextStream
from yggdrasil.engine.trace import Metrics, Trace, Watch
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.graphs import out_of_memory


class RequestLock:
    """Lock by which a decoder runs one request at a time, from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: int | None = None  # id of the thread whose request runs

    @contextmanager
    def take(self, *, wait: bool) -> Iterator[None]:
        """Context manager: hold the lock while the block runs. With ``wait``, first wait until it is free.

        Raises:
            YggdrasilError: the lock is held and ``wait`` is False, or this thread holds it (a deadlock).
        """
        if not self._lock.acquire(blocking=False):
            self._wait(wait=wait)
        self._holder = get_ident()
        try:
            yield
        finally:
            self._holder = None
            self._lock.release()

    def _wait(self, *, wait: bool) -> None:
        if not wait:
            raise YggdrasilError(
                "another request is under way on this decoder, which serves one at a time: finish or drop that one, "
                "or queue with wait=True"
            )
        if self._holder == get_ident():
            raise YggdrasilError("this thread's own request is under way on this decoder; finish or drop it first")
        self._lock.acquire()


@dataclass(frozen=True)
class Generation:
    """The result of a request: text, token ids, finish reason and metrics.

    ``prompt_tokens`` is the number of prompt tokens.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    finish_reason: FinishReason
    metrics: Metrics
    logprobs: list[TokenLogprobs] | None = None  # one per token; None if not requested


@contextmanager
def _naming_full_memory() -> Iterator[None]:
    """Context manager: raise YggdrasilError if the block fills a GPU's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error) from error


class Request:
    """A running request: an iterable over pieces of final text, which can be iterated once.

    Close the iterator, or call ``result``, to cancel the request. The request holds the decoder's lock from the first
    piece until it ends, or until its iterator is closed or garbage-collected. ``on_end`` is called at the end, also
    after errors, with the prompt's tokens, the answer's tokens and the trace.
    """

    def __init__(
        self,
        turns: RequestLock,
        prompt: list[int],
        stream: TextStream,
        prepared: PreparedRequest,
        *,
        wait: bool,
        watch: Watch | None = None,
        on_begin: Callable[[], object] = lambda: None,
        on_end: Callable[[list[int], list[int], Trace], None] | None = None,
    ) -> None:
        self._turns = turns
        self._prompt = prompt
        self._stream = stream
        self._prepared = prepared
        self._wait = wait
        self._on_begin = on_begin  # called after the first piece, before more is drafted
        self._on_end = on_end  # called with prompt, answer and trace at the end, also after errors
        self._trace = Trace(watch=watch)
        self._has_begun = False
        self._iterators: WeakSet[Generator[str, None, None]] = WeakSet()

    def __iter__(self) -> Generator[str, None, None]:
        pieces = self._pieces()
        self._iterators.add(pieces)
        return pieces

    def _pieces(self) -> Generator[str, None, None]:
        with self._turns.take(wait=self._wait):
            if self._has_begun or self._stream.finish_reason is not None:
                raise YggdrasilError("a request is iterated once; start another for the same prompt")
            self._has_begun = True
            with _naming_full_memory():
                yield from self._decoded()

    def _decoded(self) -> Generator[str, None, None]:
        prepared = self._prepared
        prepared.begin()
        decoding = prepared.engine.decode(self._prompt, self._stream, prepared.policy, self._trace)
        try:
            with closing(decoding):
                yield next(decoding, "")
                self._on_begin()
                yield from decoding
        finally:
            if self._on_end is not None:
                self._on_end(self._prompt, self._stream.tokens, self._trace)

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids generated so far, without the prompt."""
        return self._stream.tokens

    @property
    def prefilled_share(self) -> float:
        """Return the fraction of the prompt that is prefilled, 0 to 1; the request must have begun."""
        return min(1.0, self._prepared.engine.target.length / len(self._prompt))

    def logprobs(self, start: int = 0) -> list[TokenLogprobs]:
        """Return log-probabilities of the generated tokens from index ``start`` on; an empty list if not requested."""
        sampler = self._prepared.sampler
        if sampler is None or sampler.params.logprobs is None:
            return []
        # Acceptance may continue after the end of the text: drop its surplus entries.
        return sampler.logprobs[start : len(self._stream.tokens)]

    def finished(self) -> Generation:
        """Decode to the end without streaming, and return text, tokens and metrics."""
        for _ in self.without_streaming(inf):
            pass
        return self.result()

    def without_streaming(self, iterations: float) -> Iterator[str]:
        """Return an iterator that decodes without streaming text, and yields after every ``iterations`` iterations.

        It also yields after each chunk of the prefill, at the first token and at the end. Its items have no meaning;
        ``result`` has the text.
        """
        self._stream.is_read, self._stream.most_unread = False, iterations
        return iter(self)

    def result(self) -> Generation:
        """End the request, free the decoder for the next one, and return text, tokens and metrics.

        The finish reason is "cancelled" if no end condition had been met. Later calls return the same result.
        """
        for pieces in list(self._iterators):
            if isinstance(pieces, GeneratorType) and not pieces.gi_running:
                pieces.close()
        self._stream.finish("cancelled")
        assert self._stream.finish_reason is not None
        prepared, tokens = self._prepared, self._stream.tokens
        metrics = replace(self._trace.metrics(), decoding=prepared.final_report())
        has_logprobs = prepared.sampler is not None and prepared.sampler.params.logprobs is not None
        logprobs = self.logprobs() if has_logprobs else None
        return Generation(len(self._prompt), tokens, self._stream.text, self._stream.finish_reason, metrics, logprobs)
