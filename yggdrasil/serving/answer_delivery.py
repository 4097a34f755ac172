"""Sends an answer to the route that waits for it, piece by piece, from the decoder's thread."""

from collections.abc import Sequence
from time import sleep

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.acceptance.sampling import GREEDY
from yggdrasil.engine.request import Generation, Request
from yggdrasil.engine.trace import IterationTree
from yggdrasil.serving.jobs import Finished, Job, Piece

# The first text is on its way sooner if whoever sends it need not take turns with the decoder for a core.
_REST_SECONDS = 5e-4


class AnswerDelivery:
    """Emits the pieces of one answer as their text becomes final."""

    def __init__(self, job: Job, scored: Sequence[TokenLogprobs]) -> None:
        self.trees: list[IterationTree] = []
        self._job, self._scored = job, scored
        self._logprobs = list(scored)
        self._told_length = self._noted = 0
        self._has_begun = self._has_told = False
        sampling = job.options.get("sampling", GREEDY)
        self._is_text_alone = sampling.logprobs is None and not job.shows_trees

    def note(self, text: str, request: Request) -> None:
        """More of the answer is final; at first, perhaps without text, a beginning of the prompt was read."""
        if not self._job.is_streamed:
            return
        if self._is_text_alone and self._told_length:  # nearly every time: as little as can be
            if text:
                self._told_length += len(text)
                self._job.emit(Piece(text))
            return
        logprobs = request.logprobs(self._noted)
        self._noted += len(logprobs)
        self._logprobs += logprobs
        # A prompt that is read in one pass has its first text right behind: they are told as one.
        is_begin = self._has_begun and not self._has_told
        self._has_begun = True
        self._tell(text, is_begin=is_begin)

    def end(self, result: Generation) -> None:
        """The answer is whole."""
        if self._job.is_streamed:
            self._logprobs += (result.logprobs or [])[self._noted :]
            self._tell(result.text[self._told_length :])
        self._job.emit(Finished(result, self._scored))

    def _tell(self, text: str, *, is_begin: bool = False) -> None:
        if not (text or self._logprobs or self.trees or is_begin):
            return
        self._job.emit(Piece(text, self._logprobs, list(self.trees)))
        if not self._told_length and text:
            sleep(_REST_SECONDS)
        self._has_told = True
        self._told_length += len(text)
        self._logprobs = []
        self.trees.clear()
