"""One fault, and what may come of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forked import Outcome, Run
from verdict import judge

Check = Callable[[Outcome], str | None]


@dataclass(frozen=True)
class Case:
    """One fault: what was done, what is run on it, and what may come of it."""

    done: str
    run: Run
    names: Sequence[str]  # one of them stands in a refusal
    check: Check  # what is wrong with the output of a run that ends well
    codes: Sequence[int] = field(default=(2,))

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    def verdict(self, outcome: Outcome) -> str:
        return judge(outcome, self.names, self.check(outcome) if outcome.code == 0 else None, self.codes)
