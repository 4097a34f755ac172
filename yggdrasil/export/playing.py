"""Simulates an engine's decoding over recorded text, and predicts the engine's time per token from costs."""

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
    """The result of a simulation: generated tokens, and passes by drafted and accepted tokens."""

    tokens: int  # number of generated tokens
    counts: dict[tuple[int, int], int]  # (drafted, accepted) tokens -> number of passes


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of an engine's settings."""

    aal: float  # tokens per pass, bonus token included
    ms_per_token: float
    speedup: float  # factor over plain decoding


def play(look_up: LookUp, documents: Sequence[Document]) -> Drafts:
    """Simulate greedy decoding of recorded answers with an n-gram lookup; count passes by drafted and accepted tokens.

    The first token of an answer comes from the prefill and is not counted. ``look_up`` decodes all documents in order.
    """
    tokens, counts = 0, Counter[tuple[int, int]]()
    for document in documents:
        text = [*document.prompt, *document.answer]
        look_up.begin(document.prompt)
        position = len(document.prompt) + 1  # the first token of an answer comes with the prompt
        tokens += len(text) - position
        while position < len(text):
            found = look_up.draft(text[:position])
            # The draft leaves room for the pass's own token; ``observe`` gets all of it, as in an engine.
            drafted = list(found)[: len(text) - position - 1]
            accepted = next((i for i, token in enumerate(drafted) if token != text[position + i]), len(drafted))
            if drafted:
                look_up.observe(len(found), accepted)
            counts[len(drafted), accepted] += 1
            position += accepted + 1
    return Drafts(tokens, dict(counts))


def predict(drafts: Drafts, costs: StepCosts, verified: int | None = None) -> Prediction:
    """Predict the speed of a simulated lookup from the engine's step costs.

    Args:
        drafts: passes of the simulation.
        verified: rows of every pass if fixed; None: a pass has one row more than drafted tokens.
    """
    tally = ShapeTally()
    tally.begin()  # passes are counted over all documents together
    for (drafted, _), passes in sorted(drafts.counts.items()):
        shape = TreeShape(0, drafted, verified or drafted + 1) if drafted or verified else PLAIN_STEP
        milliseconds = costs.verify_ms[verified] if verified else costs.iteration_ms(*shape)
        for _ in range(passes):
            tally.add(shape, milliseconds)
    result = tally.result(drafts.tokens)
    return Prediction(result.aal, result.ms_per_token, costs.plain_ms / result.ms_per_token)
