"""The n-gram table of shipped text, to which a calibration adds the counts of the target's own text."""

from collections.abc import Iterable
from typing import NamedTuple

from yggdrasil.calibration.calibration_settings import CalibrationSettings
from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.reporter import Reporter
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.shipped_assets import table_folder
from yggdrasil.drafters.statistics.grown_table import with_answers
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.shipped_table import LEAST_BYTES, make_table, table_file
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.runtime.loaded import LoadedModel


class BaseTable(NamedTuple):
    """An n-gram table of shipped text, and the scorer that was fitted with it."""

    scorer: NGramScorer
    table: Table  # its ``origin`` says what was counted


def count_documents(documents: Iterable[Document], base: BaseTable | None) -> Table:
    """Return the n-gram table of the answers of ``documents``, added to ``base`` if there is one.

    Without ``base``, rare n-grams are left out, as ``Table.without_rare`` does.
    """
    own = Table.of(documents)
    return own.without_rare() if base is None else with_answers(base.table, own)


def base_table(settings: CalibrationSettings, target: LoadedModel, reporter: Reporter) -> BaseTable | None:
    """Return the shipped n-gram table of the target, or the table of the shipped text for its tokenizer.

    The shipped text is counted if no decoder has done so yet, which takes some seconds.

    The result is None if the calibration has no table, and with ``settings.own_table``. If there is no shipped table of
    the target, it is also None without a tokenizer.json and for targets of less than ``LEAST_BYTES``, whose passes are
    so short that a large table slows them.

    Raises:
        ArtifactError: the table of the shipped text cannot be written.
    """
    pair = settings.pair
    if pair.counts is None or not pair.counts.table or settings.own_table:
        return None
    source = Source.find(pair.target)
    # The shipped table of a model's own answers is valid for its own weights, dequantised or not.
    folder = table_folder(source.fingerprint()) if pair.weights in ("file", "full") else None
    if folder is not None:
        found = BaseTable(NGramScorer.load(folder / SCORER_FILE), Table.load(folder / TABLE_FILE))
        return _announced(found, "shipped answers of this model", reporter)
    tokenizer = source.folder / "tokenizer.json"
    if not tokenizer.is_file() or sum(tensor.nbytes for tensor in target.tensors.values()) < LEAST_BYTES:
        return None
    file = table_file(source.tokenizer_fingerprint())
    make_table(tokenizer, file)
    return _announced(BaseTable(NGramScorer.of_shipped_text(), Table.load(file)), "shipped text", reporter)


def _announced(found: BaseTable, text: str, reporter: Reporter) -> BaseTable:
    origin = f"{found.table.num_tokens:,} tokens of {text}"
    reporter.phase(f"the n-gram table starts from {origin} (--own-table leaves that out)")(1.0)
    return found._replace(table=found.table.with_origin(origin))
