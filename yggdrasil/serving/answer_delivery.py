"""Emits the pieces of one answer, as events, from the decoder's thread to the HTTP route that waits for them."""

from collections.abc import Sequence
from time import sleep

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.acceptance.sampling import GREEDY
from yggdrasil.engine.request import Generation, Request
from yggdrasil.engine.trace import IterationTree
from yggdrasil.serving.jobs import Finished, Job, Piece

# Pause of the decoder's thread after the first text, so that the event loop can send it without competing for a core.
_REST_SECONDS = 5e-4


class AnswerDelivery:
    """Emits the events of one answer as its text becomes final.

    ``scored`` holds the log-probabilities of the prompt's tokens; it is empty if the job does not score the prompt.
    """

    def __init__(self, job: Job, scored: Sequence[TokenLogprobs]) -> None:
        self.trees: list[IterationTree] = []  # of the iterations since the last piece; the worker appends them
        self._job, self._scored = job, scored
        self._logprobs = list(scored)
        self._emitted_length = self._num_logprobs = 0
        self._has_begun = self._has_emitted = False
        sampling = job.options.get("sampling", GREEDY)
        self._is_text_only = sampling.logprobs is None and not job.shows_trees

    def emit_new(self, text: str, request: Request) -> None:
        """Emit an answer's new text, log-probabilities and trees as one ``Piece``, if the answer is streamed.

        Without any of them nothing is emitted, except one empty ``Piece`` during a prefill of several chunks.

        Args:
            text: text that became final since the last call. It may be empty: during the prefill, each call reports
                one prefilled chunk of the prompt.
            request: the running request, from which the new log-probabilities are read.
        """
        if not self._job.is_streamed:
            return
        if self._is_text_only and self._emitted_length:  # the common case, kept cheap
            if text:
                self._emitted_length += len(text)
                self._job.emit(Piece(text))
            return
        logprobs = request.logprobs(self._num_logprobs)
        self._num_logprobs += len(logprobs)
        self._logprobs += logprobs
        # The first call emits no empty piece: if the prompt is prefilled in one pass, the first text follows at once.
        is_begin = self._has_begun and not self._has_emitted
        self._has_begun = True
        self._emit(text, is_begin=is_begin)

    def end(self, result: Generation) -> None:
        """Emit the last event of the answer, with ``result``.

        If the answer is streamed, a ``Piece`` with text, log-probabilities and trees not emitted so far comes first.
        """
        if self._job.is_streamed:
            self._logprobs += (result.logprobs or [])[self._num_logprobs :]
            self._emit(result.text[self._emitted_length :])
        self._job.emit(Finished(result, self._scored))

    def _emit(self, text: str, *, is_begin: bool = False) -> None:
        if not (text or self._logprobs or self.trees or is_begin):
            return
        self._job.emit(Piece(text, self._logprobs, list(self.trees)))
        if not self._emitted_length and text:
            sleep(_REST_SECONDS)
        self._has_emitted = True
        self._emitted_length += len(text)
        self._logprobs = []
        self.trees.clear()
