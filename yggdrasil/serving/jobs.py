"""One answer to decode, and the events that report its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import Event as Flag
from time import monotonic

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.engine.request import Generation
from yggdrasil.engine.request_options import RequestOptions
from yggdrasil.engine.trace import IterationTree
from yggdrasil.serving.errors import ClientGone, Fault


@dataclass(frozen=True)
class Piece:
    """New final text of an answer. The first piece may be empty: it reports that the prefill has begun."""

    text: str
    logprobs: Sequence[TokenLogprobs] = ()  # of the tokens committed since the last piece, if requested
    trees: Sequence[IterationTree] = ()  # of the iterations since the last piece, if requested

    @classmethod
    def joined(cls, pieces: "Sequence[Piece]") -> "Piece":
        """Return consecutive pieces of one answer as one piece."""
        if len(pieces) == 1:
            return pieces[0]
        text = "".join(piece.text for piece in pieces)
        logprobs = chain.from_iterable(piece.logprobs for piece in pieces)
        return cls(text, list(logprobs), list(chain.from_iterable(piece.trees for piece in pieces)))


@dataclass(frozen=True)
class Finished:
    """The last event of an answer: its result."""

    result: Generation
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # empty if not requested


@dataclass(frozen=True)
class Failed:
    """The last event of an answer that failed: its error."""

    error: Fault | ClientGone


Event = Piece | Finished | Failed


@dataclass(frozen=True)
class Job:
    """One answer to decode. The worker's thread calls ``emit`` with each event; ``emit`` must not block."""

    prompt: Sequence[int]  # token ids
    options: RequestOptions
    emit: Callable[[Event], None]
    is_streamed: bool = True  # whether pieces are emitted, not only the result
    shows_trees: bool = False  # whether pieces include the tree of each iteration
    scores: int | None = None  # alternatives reported at each prompt position; None: the prompt is not scored


@dataclass(eq=False)
class QueuedRequest:
    """The jobs of one HTTP request, which the worker takes one at a time."""

    client: str  # client address; the queue is round-robin over clients
    jobs: list[Job]
    gone: Flag = field(default_factory=Flag)  # set when the client disconnected
    has_begun: bool = False  # whether the worker has taken the first job
    since: float = field(default_factory=monotonic)  # seconds of ``monotonic`` at which the request was queued

    def fail(self, fault: Fault) -> None:
        """Emit ``Failed(fault)`` for every job that the worker has not taken, and remove these jobs."""
        while self.jobs:
            self.jobs.pop(0).emit(Failed(fault))
