"""Tells an answer to whoever waits for it, piece by piece and not more often than anybody reads."""

from collections.abc import Sequence
from time import monotonic, sleep

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.engine.request import Generation, Request
from yggdrasil.engine.seen import SeenTree
from yggdrasil.serving.jobs import Finished, Job, Piece

# A piece on its way to a client takes some 0.2 ms of the cores that decode: a fiftieth of a second apart, that is 1 %.
_PAUSE_SECONDS = 0.02
# The first text is on its way sooner if whoever sends it need not take turns with the decoder for a core.
_REST_SECONDS = 5e-4


class Teller:
    """Gathers what becomes final of one answer. The first text is told at once, later ones after a pause."""

    def __init__(self, job: Job, scored: Sequence[TokenLogprobs]) -> None:
        self.trees: list[SeenTree] = []
        self._job, self._scored = job, scored
        self._text, self._logprobs = "", list(scored)
        self._told_length = self._noted = 0
        self._has_begun = False
        self._told_at: float | None = None

    def note(self, text: str, request: Request) -> None:
        """More of the answer is final; at first, perhaps without text, a beginning of the prompt was read."""
        if not self._job.is_streamed:
            return
        logprobs = request.logprobs(self._noted)
        self._noted += len(logprobs)
        self._text += text
        self._logprobs += logprobs
        if self._may_speak:
            self._tell()
        self._has_begun = True

    def end(self, result: Generation) -> None:
        """The answer is whole."""
        if self._job.is_streamed:
            self._text = result.text[self._told_length :]
            self._logprobs += (result.logprobs or [])[self._noted :]
            if self._has_news:
                self._tell()
        self._job.emit(Finished(result, self._scored))

    @property
    def _has_news(self) -> bool:
        return bool(self._text or self._logprobs or self.trees)

    @property
    def _may_speak(self) -> bool:
        if self._told_at is None:  # a prompt read in one pass has its first text right behind: they are told as one
            return self._has_news or self._has_begun
        is_due = not self._told_length or monotonic() - self._told_at >= _PAUSE_SECONDS
        return is_due and self._has_news

    def _tell(self) -> None:
        self._job.emit(Piece(self._text, self._logprobs, list(self.trees)))
        if not self._told_length:
            sleep(_REST_SECONDS)
        self._told_length += len(self._text)
        self._text, self._logprobs, self._told_at = "", [], monotonic()
        self.trees.clear()
