"""What a calibration learns for drafters that count: the table, the belief, and what decoding with them will give."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from yggdrasil.calibration.foreseen import foresee
from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.replay import RunnersUp
from yggdrasil.drafters.belief import Belief
from yggdrasil.drafters.counts import BELIEF_FILE, TABLE_FILE, CountsDrafter
from yggdrasil.drafters.options import CountsOptions
from yggdrasil.drafters.protocol import FreeDrafter, together
from yggdrasil.drafters.table import Table
from yggdrasil.scheduling.plan import Expectation
from yggdrasil.tree.objective import StepCosts, least_useful

_HELD_OUT_EVERY, _BELIEF_EVERY = 10, 5  # documents for the prediction, and for the belief; the others fill the table
_MOST_CANDIDATES = 400_000  # that a belief is fitted to
_END = 24  # tokens that tell prompts apart
_LEAST_TOKENS = 2_000  # of answers, for a belief of one's own


class Counted(NamedTuple):
    """A belief, a table of all documents, and what to expect by documents that neither has seen: see ``foresee``.

    Without documents there is no table and no outcome; or the table is another plan's.
    """

    belief: Belief
    table: Table | None
    expected: list[Expectation]
    recycles: bool = False
    documents: Sequence[Document] = ()

    def options(self) -> CountsOptions:
        """What a plan says of it."""
        return CountsOptions(table=self.table is not None, recycling=self.recycles)

    def knowing_nothing_of(self, documents: Sequence[Document]) -> CountsDrafter:
        """The drafter without what followed the ends of their prompts: decoding will meet others.

        Of a table that counts nobody knows which documents, their own answers are taken away.
        """
        ends = {tuple(document.prompt[-_END:]) for document in documents}
        others = [document for document in self.documents if tuple(document.prompt[-_END:]) not in ends]
        table = self.table
        if table is not None:
            table = Table.of(others) if self.documents else table.minus(Table.of(documents))
        return CountsDrafter(self.belief, table, recycles=self.recycles)

    def save(self, folder: Path) -> None:
        """Write what ``CountsDrafter.load`` reads."""
        self.belief.save(folder / BELIEF_FILE)
        if self.table is not None:
            self.table.save(folder / TABLE_FILE)


def learn_counts(
    documents: Sequence[Document],
    costs: StepCosts,
    *,
    with_table: bool,
    others: Sequence[FreeDrafter] = (),
    runners_up: RunnersUp | None = None,
) -> Counted:
    """Fit on some documents, predict on others; the table that is kept counts all of them.

    ``others`` guess in the same tree. ``runners_up``: the drafter recycles them, and they are these.
    """
    if not documents:
        return Counted(Belief.usual(with_table=False), None, [], runners_up is not None)
    recycles = runners_up is not None
    held_out = documents[::_HELD_OUT_EVERY]
    rest = [document for i, document in enumerate(documents) if i % _HELD_OUT_EVERY]
    belief = fit_belief(rest, with_table=with_table, runners_up=runners_up)
    drafter = CountsDrafter(belief, Table.of(rest) if with_table else None, recycles=recycles)
    drafter.leave_out_below(least_useful([costs]))
    is_foreseen = any(len(document.answer) > 1 for document in held_out)
    expected = foresee(together([*others, drafter]), held_out, costs, runners_up) if is_foreseen else []
    return Counted(belief, Table.of(documents) if with_table else None, expected, recycles, documents)


def fit_belief(documents: Sequence[Document], *, with_table: bool, runners_up: RunnersUp | None = None) -> Belief:
    """From documents that the table does not know: it is counted without them here.

    The usual one where they are too few, or nothing in them ever came again.
    """
    if sum(len(document.answer) for document in documents) < _LEAST_TOKENS:
        return Belief.usual(with_table=with_table)
    asked = documents[::_BELIEF_EVERY]
    known = [document for i, document in enumerate(documents) if i % _BELIEF_EVERY]
    drafter = CountsDrafter(Belief.none(), Table.of(known) if with_table else None, recycles=runners_up is not None)
    kinds: list[np.ndarray] = []
    right: list[np.ndarray] = []
    for document in asked:
        drafter.begin(document.prompt)
        likely = None if runners_up is None else runners_up(document)
        before = document.prompt[-1]
        for place, token in enumerate(document.answer):
            rows = drafter.evidence(()).numpy()
            kinds.append(np.concatenate([rows[:, 1:], np.arange(len(rows))[:, None]], axis=1))
            right.append(rows[:, 0] == token)
            if likely is not None:
                drafter.recycle([before], likely[place : place + 1])
                before = token
            drafter.extend([token], {})
        if sum(map(len, right)) > _MOST_CANDIDATES:
            break
    is_right = np.concatenate(right)
    if is_right.all() or not is_right.any():
        return Belief.usual(with_table=with_table)
    return Belief.fit(np.concatenate(kinds), is_right)
