"""N-gram table of the text that the package includes, for the tokenizer of any model.

A model without a calibration has no n-gram table of its own text. Tokenising and counting the shipped text takes some
seconds, so a separate process does it, once per tokenizer, when such a model is first opened. It may outlive the
process that started it. The table is stored in the user's cache.

    python -m yggdrasil.drafters.statistics.shipped_table TOKENIZER_JSON TABLE
"""

import lzma
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from yggdrasil.artifacts.lock import locked
from yggdrasil.drafters.statistics.table import SCHEMA_VERSION, Table
from yggdrasil.drafters.statistics.table_files import NICENESS, start_process, tables_folder
from yggdrasil.errors import ArtifactError

TEXT = Path(__file__).parents[2] / "assets" / "corpus" / "text.xz"  # its README lists the licences
CODE_CHARACTERS = 1_500_000  # characters of Python's standard library to count
LEAST_BYTES = 32 << 20  # of a model's weights; passes of smaller models are so short that a table slows them
_PIECE = 4_096  # characters per tokenised piece


def table_file(tokenizer_fingerprint: str) -> Path:
    """Return the path of the table for a tokenizer."""
    return tables_folder() / f"shipped-{tokenizer_fingerprint}-{SCHEMA_VERSION}.safetensors"


def make_in_background(tokenizer: Path, file: Path) -> None:
    """Start a process that writes the table, unless ``file`` exists or there is no ``tokenizer.json``."""
    if not file.exists() and tokenizer.is_file():
        start_process(__name__, tokenizer, file)


def make_table(tokenizer: Path, file: Path) -> None:
    """Tokenise the shipped text with ``tokenizer`` (a tokenizer.json), count it and write the table to ``file``.

    Do nothing if another process is writing the table or has written it.
    """
    from tokenizers import Tokenizer

    with suppress(ArtifactError), locked(file.with_suffix(".lock"), f"writing {file}"):
        if file.exists():
            return
        encoder = Tokenizer.from_file(str(tokenizer))
        encoder.no_padding()
        encoder.no_truncation()
        pieces = list(_pieces(lzma.decompress(TEXT.read_bytes()).decode() + _code()))
        encoded = encoder.encode_batch_fast(pieces, add_special_tokens=False)
        Table.of(((), each.ids) for each in encoded).without_rare().save(file)


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def _code() -> str:
    """Return source text of Python's standard library, modules by name; empty if its sources are not installed."""
    folder, found, size = Path(sysconfig.get_paths()["stdlib"]), list[str](), 0
    for file in sorted(folder.glob("*.py")):
        with suppress(OSError, ValueError):
            found.append(file.read_text(encoding="utf-8"))
            size += len(found[-1])
        if size >= CODE_CHARACTERS:
            break
    return "\n".join(found)[:CODE_CHARACTERS]


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    make_table(Path(sys.argv[1]), Path(sys.argv[2]))
