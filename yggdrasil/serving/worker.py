"""The thread that owns the decoder: opens it, then decodes one job after the other until the server ends."""

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
from yggdrasil.serving.answer_delivery import AnswerDelivery
from yggdrasil.serving.errors import Fault, fault_of
from yggdrasil.serving.jobs import Failed, Job, QueuedRequest
from yggdrasil.serving.metrics import ServerMetrics
from yggdrasil.serving.request_queue import RequestQueue, closing_fault
from yggdrasil.serving.server_settings import ServerSettings

_PATIENCE_SECONDS = 10.0  # for the iteration that runs, when all ends
_QUIET_SECONDS = 0.03  # after an answer, before what the caches hold of it is copied

log = logging.getLogger("yggdrasil.serving")


class Worker:
    """Decodes the jobs of a queue in a thread of its own.

    ``opening`` creates the decoder in that thread. If it raises, ``on_failure`` is called there with the error.
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
        self._is_ending = False
        self._usual_seconds = 1.0  # of a job, lately
        self._thread = Thread(target=self._work, name="decoder", daemon=True)

    def start(self) -> None:
        """Begin to open the decoder."""
        self._thread.start()

    @property
    def is_opening(self) -> bool:
        """Whether the decoder is still being opened."""
        return self.decoder is None and self.is_at_work

    def submit(self, ask: QueuedRequest) -> None:
        """Put a request in the line.

        Raises:
            Fault: the line is full or closed.
        """
        try:
            self.meters.position.observe(self.line.join(ask, self._usual_seconds * (1 + len(self.line))))
        except Fault as fault:
            if fault.status == 429:
                self.meters.refused.inc()
            raise

    def cancel(self, ask: QueuedRequest) -> None:
        """Nobody waits for these answers: they leave the line, and the decoder within one iteration."""
        ask.gone.set()
        self.line.leave(ask)

    def drain(self) -> None:
        """Take no more: what runs goes on, what waits is refused."""
        self.line.close()

    def give_up(self) -> None:
        """What runs ends too, behind the iteration that it is in: whoever waits for it is told."""
        self._is_ending = True  # first: a job that is just being taken is neither in the line nor running
        self.line.close(ends_begun=True)

    def stop(self) -> None:
        """End, at once but for the iteration that runs."""
        self.give_up()
        if self.decoder is not None:  # while it opens, the process ends without it
            self._thread.join(_PATIENCE_SECONDS)

    @property
    def is_at_work(self) -> bool:
        """Whether its thread still runs."""
        return self._thread.is_alive()

    def _work(self) -> None:
        try:
            self.decoder = self._opening()
        except BaseException as error:  # noqa: BLE001  (whoever waits for the decoder is told, whatever it was)
            self._on_failure(error)
            return
        self._conversations = Conversations(self.decoder.assembly, self._settings.kept_bytes)
        while (taken := self._next()) is not None:
            ask, job = taken
            self.meters.busy.set(1)
            try:
                self._serve(self.decoder, ask, job)
            finally:
                self.meters.busy.set(0)

    def _next(self) -> tuple[QueuedRequest, Job] | None:
        """The next job. While there is none, what the caches hold is copied: the next text need not wait for that."""
        if self.line.is_quiet(_QUIET_SECONDS):
            try:
                self._conversations.keep_ahead(lambda: self.line.is_quiet(0.0))
            except (RuntimeError, MemoryError) as error:
                log.warning("a conversation could not be kept: %s", first_line(error))
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
        self._usual_seconds += 0.2 * (monotonic() - began - self._usual_seconds)

    def _check_end(self) -> None:
        if self._is_ending:
            raise closing_fault()

    def _decode(self, decoder: Decoder, ask: QueuedRequest, job: Job) -> None:
        end = monotonic() + self._settings.limits.answer_seconds
        self._conversations.turn_to(job.prompt)
        scored, scoring_ms = self._score(decoder, ask, job)
        teller = AnswerDelivery(job, scored)
        options: RequestOptions = {**job.options, "watch": teller.trees.append} if job.shows_trees else job.options
        request = decoder.start(job.prompt, **options)
        for text in request:
            if ask.gone.is_set() or self._is_ending or monotonic() > end:
                break
            teller.note(text, request)
        result = request.result()
        if job.scores is not None:
            result = _as_read(result, scoring_ms)
        if result.finish_reason == "cancelled":
            self._check_end()
        self.meters.note(result)
        teller.end(result)

    def _score(self, decoder: Decoder, ask: QueuedRequest, job: Job) -> tuple[list[TokenLogprobs], float]:
        """Log-probabilities of the prompt, if they are wanted and as long as somebody waits, and the milliseconds."""
        if job.scores is None:
            return [], 0.0
        began = monotonic()
        found = [TokenLogprobs(job.prompt[0], 0.0, [])]  # nothing comes before the first
        for entries in decoder.score(job.prompt, job.scores):
            found += entries
            self._check_end()
            if ask.gone.is_set():
                break
        return found, 1e3 * (monotonic() - began)


def _as_read(result: Generation, scoring_ms: float) -> Generation:
    """Rows that scoring left in the caches are no earlier request's: this one has read them."""
    metrics = replace(result.metrics, reused_tokens=0, ttft_ms=result.metrics.ttft_ms + scoring_ms)
    return replace(result, metrics=metrics)
