"""Builds the chunks of streamed chat completions and completions."""

from dataclasses import dataclass
from typing import Any

from yggdrasil.engine.request import Generation
from yggdrasil.engine.trace import IterationTree
from yggdrasil.scheduling.plan import Plan
from yggdrasil.serving.request_fields import StreamOptions
from yggdrasil.serving.service import Identity
from yggdrasil.serving.tokenization import Texts
from yggdrasil.serving.usage import timings_of, usage_of


def shown_tree(texts: Texts, tree: IterationTree) -> dict[str, Any]:
    """Return the JSON object of one iteration's token tree, with tokens as text; node 0 is the root.

    Keys: drafter, drafted (nodes 1 to ``drafted`` are the drafter's, later nodes are model-free drafts), tokens,
    parents, verified and accepted (node indices), bonus (the bonus token).
    """
    return {
        "drafter": tree.drafter,
        "drafted": tree.drafted,
        "tokens": [texts.token_text(token) for token in tree.tokens],
        "parents": tree.parents,
        "verified": tree.verified,
        "accepted": tree.accepted,
        "bonus": texts.token_text(tree.bonus),
    }


@dataclass(frozen=True)
class ChunkWriter:
    """Builds the chunks of one streamed reply.

    ``kind`` is the ``object`` field of every chunk, such as ``chat.completion.chunk``.
    """

    identity: Identity
    kind: str
    options: StreamOptions | None
    plan: Plan | None  # gives the cost of a plain step for the timings
    warnings: list[str]  # one sentence per ignored part of the request

    @property
    def shows_usage(self) -> bool:
        """Whether the client wants a final usage chunk. All other chunks then have ``usage: null``."""
        return self.options is not None and bool(self.options.include_usage)

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a chunk of a streamed reply with ``choices`` and the further top-level fields ``more``."""
        usage = {"usage": None} if self.shows_usage else {}
        return {**self.identity._asdict(), "object": self.kind, "choices": choices, **usage, **more}

    def end(self, choice: dict[str, Any], results: list[Generation], number: int) -> dict[str, Any]:
        """Return the last chunk of one answer; the chunk has timings and warnings if all ``number`` answers have ended.

        Args:
            choice: the chunk's choice, with the finish reason.
            results: the answers that have ended, this one included.
            number: number of answers of the request.
        """
        if len(results) < number:
            return self.chunk([choice])
        warnings = {"warnings": self.warnings} if self.warnings else {}
        return self.chunk([choice], timings=timings_of(results, self.plan).model_dump(), **warnings)

    def usage(self, results: list[Generation], answers: int) -> dict[str, Any]:
        """Return the final chunk of a stream: token usage and timings, with an empty list of choices.

        Args:
            results: all answers of the request.
            answers: number of answers per prompt.
        """
        usage, timings = usage_of(results, answers), timings_of(results, self.plan)
        return {**self.chunk([]), "usage": usage.model_dump(), "timings": timings.model_dump()}
