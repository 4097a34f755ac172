"""Play what an engine would do over recorded text: accepted lengths first, then our objective at its costs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from yggdrasil.calibration.own_text import Document
from yggdrasil.export.lookups import LookUp
from yggdrasil.policy.costs import StepCosts
from yggdrasil.profiling.tally import ShapeTally
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape


class Drafts(NamedTuple):
    """Tokens of a play, and how often so many were drafted and so many of them right."""

    tokens: int
    counts: dict[tuple[int, int], int]  # (drafted, accepted) -> passes


@dataclass(frozen=True)
class Prediction:
    """What a setting gives by the objective."""

    aal: float
    ms_per_token: float
    speedup: float  # over a token without speculation


def play(look_up: LookUp, documents: Sequence[Document]) -> Drafts:
    """Decode every document greedily with ``look_up``, each a request, in turn."""
    tokens, counts = 0, Counter[tuple[int, int]]()
    for document in documents:
        text = [*document.prompt, *document.answer]
        look_up.begin(document.prompt)
        place = len(document.prompt) + 1  # the first token of an answer comes with the prompt
        tokens += len(text) - place
        while place < len(text):
            found = look_up.draft(text[:place])
            # An engine keeps room for the pass's own token, and knows how long the answer may be, not how long it is.
            drafted = list(found)[: len(text) - place - 1]
            accepted = next((i for i, token in enumerate(drafted) if token != text[place + i]), len(drafted))
            if drafted:
                look_up.settle(len(found), accepted)
            counts[len(drafted), accepted] += 1
            place += accepted + 1
    return Drafts(tokens, dict(counts))


def predict(drafts: Drafts, costs: StepCosts, verified: int | None = None) -> Prediction:
    """The objective over a play. ``verified``: an engine whose passes all have this width, drafted or not."""
    tally = ShapeTally()
    tally.begin()  # passes are known as counts, of no document
    for (drafted, accepted), passes in sorted(drafts.counts.items()):
        shape = TreeShape(0, drafted, verified or drafted + 1) if drafted or verified else PLAIN_STEP
        milliseconds = costs.verify_ms[verified] if verified else costs.iteration_ms(*shape)
        for _ in range(passes):
            tally.add(shape, accepted, milliseconds)
    result = tally.result(drafts.tokens)
    return Prediction(result.aal, result.ms_per_token, costs.plain_ms / result.ms_per_token)
