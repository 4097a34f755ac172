"""The n-gram statistics of a decoder, whose table background processes replace while it decodes."""

from collections.abc import Callable
from pathlib import Path

from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.grown_table import AnswerCounts
from yggdrasil.drafters.statistics.shipped_table import make_table_in_background, table_file
from yggdrasil.drafters.statistics.table_files import TABLE_FILE, WatchedTable


class LiveTable:
    """The n-gram statistics among ``model_free`` drafters, if any, and the files from which their table is loaded."""

    def __init__(self, model_free: DrafterGroup | None) -> None:
        each_of = [] if model_free is None else model_free.drafters
        self.counts = next((each for each in each_of if isinstance(each, StatisticsDrafter)), None)
        self.base: Path | None = None  # file of the table without answers
        self._loaded: Path | None = None  # the file whose table the statistics had when they were loaded
        self._watched: WatchedTable | None = None
        self._answers: AnswerCounts | None = None

    def set_loaded_folder(self, folder: Path) -> None:
        """Record that the statistics' table was loaded from ``folder``, so that only a different file replaces it.

        Nothing is read. Without a table nothing is recorded.
        """
        if self.counts is not None and self.counts.has_table:
            self.base = self._loaded = folder / TABLE_FILE

    def use_shipped_text(self, tokenizer: Path, fingerprint: str) -> None:
        """Count the shipped text in a background process, and draft from its n-gram table once it exists.

        ``load_once`` and ``add`` look for this table. Does nothing without n-gram statistics, or if they have a table.

        Args:
            tokenizer: path of tokenizer.json; if there is no such file, only a table written earlier is used.
            fingerprint: fingerprint of the tokenizer.
        """
        if self.counts is not None and not self.counts.has_table:
            self.base = table_file(fingerprint)
            make_table_in_background(tokenizer, self.base)
            self._watched = WatchedTable((self.base,), self.counts.set_table)

    def count_answers(self, folder: Path) -> Callable[[], None]:
        """Also draft from the model's own answers, whose counts are in ``folder``; ``add`` adds later answers to these.

        ``set_loaded_folder`` or ``use_shipped_text`` must have set a table. Returns a function that writes the counts
        of the answers not yet written.
        """
        assert self.base is not None
        assert self.counts is not None
        self._answers = AnswerCounts(folder, self.base)
        self._watched = WatchedTable((self._answers.merged, self.base), self.counts.set_table, self._loaded)
        return self._answers.save

    def load_once(self) -> None:
        """Load the table, preferably with answers, unless it is loaded already; only the first call has an effect."""
        if self._watched is not None:
            self._watched.load_once()

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Count a finished answer (token ids) if answers are counted, and load the n-gram table if its file is new."""
        if self._answers is not None:
            self._answers.add(prompt, answer)
        if self._watched is not None:
            self._watched.load_newest()
