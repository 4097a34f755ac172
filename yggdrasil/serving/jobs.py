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
    """Text that became final. The first piece, which may be empty, says that the prompt is being read."""

    text: str
    logprobs: Sequence[TokenLogprobs] = ()  # of the tokens that became certain since the last piece, where asked for
    trees: Sequence[IterationTree] = ()  # of the iterations since, where asked for

    @classmethod
    def joined(cls, pieces: "Sequence[Piece]") -> "Piece":
        """Pieces that follow each other as one."""
        if len(pieces) == 1:
            return pieces[0]
        text = "".join(piece.text for piece in pieces)
        logprobs = chain.from_iterable(piece.logprobs for piece in pieces)
        return cls(text, list(logprobs), list(chain.from_iterable(piece.trees for piece in pieces)))


@dataclass(frozen=True)
class Finished:
    """The answer is whole."""

    result: Generation
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # where asked for


@dataclass(frozen=True)
class Failed:
    """The answer failed; no event follows."""

    error: Fault | ClientGone


Event = Piece | Finished | Failed


@dataclass(frozen=True)
class Job:
    """One prompt to be decoded once. ``emit`` takes events from the worker's thread and never waits."""

    prompt: Sequence[int]
    options: RequestOptions
    emit: Callable[[Event], None]
    is_streamed: bool = True  # pieces are wanted, not the whole alone
    shows_trees: bool = False
    scores: int | None = None  # alternatives reported at each prompt position; None: the prompt is not scored


@dataclass(eq=False)
class QueuedRequest:
    """The jobs of one HTTP request, which the worker takes one at a time."""

    client: str  # whose turn it is; those of one client wait for each other
    jobs: list[Job]
    gone: Flag = field(default_factory=Flag)  # set when the client is gone
    has_begun: bool = False  # the first was taken
    since: float = field(default_factory=monotonic)

    def fail(self, fault: Fault) -> None:
        """End every job that is left."""
        while self.jobs:
            self.jobs.pop(0).emit(Failed(fault))
