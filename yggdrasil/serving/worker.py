"""The thread that owns the decoder: it opens the decoder, then decodes one job at a time until the server stops."""

import logging
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from time import monotonic

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.engine.conversations import Conversations
from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.request import Generation
from yggdrasil.engine.request_options import RequestOptions
from yggdrasil.errors import first_line
from yggdrasil.runtime.memory_limits import process_bytes
from yggdrasil.serving.answer_delivery import AnswerDelivery
from yggdrasil.serving.errors import Fault, fault_of
from yggdrasil.serving.jobs import Failed, Job, QueuedRequest
from yggdrasil.serving.metrics import ServerMetrics
from yggdrasil.serving.request_queue import RequestQueue, closing_fault
from yggdrasil.serving.server_settings import ServerSettings

_PATIENCE_SECONDS = 10.0  # wait for the current iteration at shutdown
_TRIM_SECONDS = 10.0  # least time between two returns of freed memory to the system
_IDLE_SECONDS = 1.0  # without a request before unused memory is returned
_QUIET_SECONDS = 0.03  # without a request before the last conversation's KV entries are copied

log = logging.getLogger("yggdrasil.serving")


class Worker:
    """Thread that decodes the jobs of a queue.

    The thread calls ``opening`` to create the decoder. If ``opening`` raises, the thread calls ``on_failure`` with the
    error and ends.
    """

    def __init__(
        self,
        opening: Callable[[], Decoder],
        settings: ServerSettings,
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self.decoder: Decoder | None = None
        self.line = RequestQueue(settings.queue)
        self.meters = ServerMetrics(lambda: len(self.line))
        self._opening, self._on_failure = opening, on_failure
        self._settings = settings
        self.is_busy = False  # whether a request is being decoded
        self._is_ending = False
        self._mean_seconds = 1.0  # moving average over jobs
        self._trimmed, self._is_tidy = monotonic(), False  # when unused memory was last returned; no job since
        self._thread = Thread(target=self._work, name="decoder", daemon=True)

    def start(self) -> None:
        """Start the decoder's thread, which opens the decoder."""
        self._thread.start()

    @property
    def is_opening(self) -> bool:
        """Whether the decoder is still being opened; False before ``start`` and after opening has failed."""
        return self.decoder is None and self.is_at_work

    def submit(self, ask: QueuedRequest) -> None:
        """Queue a request for the decoder.

        Raises:
            Fault: the queue is full or closed.
        """
        try:
            self.meters.position.observe(self.line.join(ask, self._mean_seconds * (1 + len(self.line))))
        except Fault as fault:
            if fault.status == 429:
                self.meters.refused.inc()
            raise

    def cancel(self, ask: QueuedRequest) -> None:
        """Remove a request from the queue, and end its running answer, if any, after the current iteration."""
        ask.gone.set()
        self.line.leave(ask)

    def drain(self) -> None:
        """Reject new and queued requests, and return at once; the thread finishes the requests that have begun."""
        self.line.close()

    def give_up(self) -> None:
        """Reject all requests, and end the running answer after its current iteration, with error replies to all."""
        self._is_ending = True  # set first: a job that is being taken is neither queued nor running
        self.line.close(ends_begun=True)

    def stop(self) -> None:
        """End all requests, stop the decoder's thread, and wait at most 10 s for its current iteration.

        While the decoder is being opened, the call does not wait.
        """
        self.give_up()
        if self.decoder is not None:  # opening cannot be interrupted: do not wait for it
            self._thread.join(_PATIENCE_SECONDS)

    @property
    def is_at_work(self) -> bool:
        """Whether the decoder's thread is running."""
        return self._thread.is_alive()

    def _work(self) -> None:
        try:
            self.decoder = self._opening()
        except BaseException as error:  # noqa: BLE001  (any failure is reported)
            self._on_failure(error)
            return
        # On a GPU the growth says nothing: libraries of the driver are loaded late.
        is_host = self.decoder.assembly.target.cache.keys[0].device.type == "cpu"
        measured = process_bytes if is_host else lambda: None
        self._conversations = Conversations(self.decoder.assembly, self._settings.kept_bytes, measured)
        while (taken := self._next()) is not None:
            ask, job = taken
            self.is_busy = True
            self.meters.busy.set(1)
            try:
                self._serve(self.decoder, ask, job)
            finally:
                self.is_busy = False
                self.meters.busy.set(0)
            self._is_tidy = False
            if monotonic() - self._trimmed > _TRIM_SECONDS:
                self._tidy()

    def _tidy(self) -> None:
        """Return memory that no conversation uses to the operating system."""
        self._conversations.release_unused()
        self._is_tidy, self._trimmed = True, monotonic()

    def _next(self) -> tuple[QueuedRequest, Job] | None:
        """Wait for the next job and return it with its request; None once the queue is closed and empty.

        While the queue is empty, copy the last conversation's KV entries for later reuse and return unused memory.
        """
        if self.line.is_quiet(_QUIET_SECONDS):
            try:
                self._conversations.copy_ahead(lambda: self.line.is_quiet(0.0))
            except (RuntimeError, MemoryError) as error:
                log.warning("a conversation could not be kept: %s", first_line(error))
            if not self._is_tidy and self.line.is_quiet(_IDLE_SECONDS):
                self._tidy()
        return self.line.take()

    def _serve(self, decoder: Decoder, ask: QueuedRequest, job: Job) -> None:
        began = monotonic()
        self.meters.waited.observe(began - ask.since)
        try:
            self._check_end()
            if not ask.gone.is_set():
                self._decode(decoder, ask, job)
        except Exception as error:
            fault = fault_of(error)
            if fault.status >= 500 and not isinstance(error, Fault):
                log.error("a request failed: %s", fault.message, exc_info=error)
                decoder.forget()
            self.meters.answers.labels("error").inc()
            job.emit(Failed(fault))
        self._mean_seconds += 0.2 * (monotonic() - began - self._mean_seconds)

    def _check_end(self) -> None:
        if self._is_ending:
            raise closing_fault()

    def _decode(self, decoder: Decoder, ask: QueuedRequest, job: Job) -> None:
        end = monotonic() + self._settings.limits.answer_seconds
        self._conversations.switch_to(job.prompt)
        scored, scoring_ms = self._score(decoder, ask, job)
        delivery = AnswerDelivery(job, scored)
        options: RequestOptions = {**job.options, "watch": delivery.trees.append} if job.shows_trees else job.options
        request = decoder.start(job.prompt, **options)
        for text in request:
            if ask.gone.is_set() or self._is_ending or monotonic() > end:
                break
            delivery.emit_new(text, request)
        result = request.result()
        if job.scores is not None:
            result = _as_read(result, scoring_ms)
        if result.finish_reason == "cancelled":
            self._check_end()
        self.meters.record(result)
        delivery.end(result)

    def _score(self, decoder: Decoder, ask: QueuedRequest, job: Job) -> tuple[list[TokenLogprobs], float]:
        """Return the prompt tokens' log-probabilities and the milliseconds of scoring; ([], 0.0) if not requested."""
        if job.scores is None:
            return [], 0.0
        began = monotonic()
        found = [TokenLogprobs(job.prompt[0], 0.0, [])]  # the first token has no log-probability
        for entries in decoder.score(job.prompt, job.scores):
            found += entries
            self._check_end()
            if ask.gone.is_set():
                break
        return found, 1e3 * (monotonic() - began)


def _as_read(result: Generation, scoring_ms: float) -> Generation:
    """Return ``result`` with scoring counted as prefill: no reused tokens, ``scoring_ms`` added to the TTFT."""
    metrics = replace(result.metrics, reused_tokens=0, ttft_ms=result.metrics.ttft_ms + scoring_ms)
    return replace(result, metrics=metrics)
