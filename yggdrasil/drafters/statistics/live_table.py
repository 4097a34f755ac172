"""The n-gram statistics of a decoder, whose table background processes replace while it decodes."""

from collections.abc import Callable
from pathlib import Path

from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.grown_table import AnswerCounts
from yggdrasil.drafters.statistics.shipped_table import make_in_background, table_file
from yggdrasil.drafters.statistics.table_files import TABLE_FILE, WatchedTable


class LiveTable:
    """The n-gram statistics among ``model_free`` drafters, if any, and the files of their table, if it has any."""

    def __init__(self, model_free: DrafterGroup | None) -> None:
        each_of = [] if model_free is None else model_free.drafters
        self.counts = next((each for each in each_of if isinstance(each, StatisticsDrafter)), None)
        self.base: Path | None = None  # file of the table without answers
        self._loaded: Path | None = None  # the file whose table the statistics had when they were loaded
        self._watched: WatchedTable | None = None
        self._answers: AnswerCounts | None = None

    def open_in(self, folder: Path) -> None:
        """Note the file of the table that the statistics loaded from ``folder``."""
        if self.counts is not None and self.counts.has_table:
            self.base = self._loaded = folder / TABLE_FILE

    def use_shipped_text(self, tokenizer: Path, fingerprint: str) -> None:
        """Count the shipped text in the background, and draft from its table as soon as that is written.

        ``tokenizer`` is the path of tokenizer.json and ``fingerprint`` the tokenizer's. Do nothing if there are no
        statistics, or if they have a table.
        """
        if self.counts is not None and not self.counts.has_table:
            self.base = table_file(fingerprint)
            make_in_background(tokenizer, self.base)
            self._watched = WatchedTable((self.base,), self.counts.set_table)

    def grow(self, folder: Path) -> Callable[[], None]:
        """Also draft from the answers counted in ``folder``, and add later ones. Return what stores the last of them.

        There must be a table.
        """
        assert self.base is not None
        assert self.counts is not None
        self._answers = AnswerCounts(folder, self.base)
        self._watched = WatchedTable((self._answers.merged, self.base), self.counts.set_table, self._loaded)
        return self._answers.keep

    def look_first(self) -> None:
        """Load the table's newest file unless that was done before."""
        if self._watched is not None:
            self._watched.look_first()

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Add a finished answer if the table grows, and load a newer table if there is one."""
        if self._answers is not None:
            self._answers.add(prompt, answer)
        if self._watched is not None:
            self._watched.look()
