"""N-gram table of the text and the tables that the package includes, for the tokenizer of any model.

A model without a calibration has no n-gram table of its own text. The table for it counts the shipped text in its
tokens, and adds the shipped tables of other models' answers: their tokens that are also tokens of this tokenizer, about
four fifths, are renamed. This takes some seconds, so a separate process does it, once per tokenizer, when such a model
is first opened. It may outlive the process that started it. The table is stored in the user's cache.

    python -m yggdrasil.drafters.statistics.shipped_table TOKENIZER_JSON TABLE
"""

import json
import lzma
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from yggdrasil.artifacts.lock import locked, tell
from yggdrasil.drafters.statistics.table import SCHEMA_VERSION, IntArray, Table
from yggdrasil.drafters.statistics.table_files import NICENESS, TABLE_FILE, start_process, tables_folder
from yggdrasil.errors import ArtifactError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ASSETS = Path(__file__).parents[2] / "assets"
TEXT = _ASSETS / "corpus" / "text.xz"  # its README lists the licences
TABLES = _ASSETS / "tables"  # a folder for each model whose answers were counted
VOCABULARY = "vocabulary.json.xz"  # in such a folder: the strings of the model's tokens, null where not text
_CONTENT = 2  # changes when the text or the tables change
CODE_CHARACTERS = 1_500_000  # characters of Python's standard library to count
LEAST_BYTES = 32 << 20  # of a model's weights; passes of smaller models are so short that a table slows them
_PIECE = 4_096  # characters per tokenised piece


def table_file(tokenizer_fingerprint: str) -> Path:
    """Return the path of the shipped text's n-gram table for a tokenizer, given by its fingerprint."""
    return tables_folder() / f"shipped-{tokenizer_fingerprint}-{SCHEMA_VERSION}.{_CONTENT}.safetensors"


def make_table_in_background(tokenizer: Path, file: Path) -> None:
    """Start a process that writes the shipped text's n-gram table to ``file``, unless it exists.

    Args:
        tokenizer: path of tokenizer.json; if there is none, nothing is started.
    """
    if not file.exists() and tokenizer.is_file():
        start_process(__name__, tokenizer, file)


def make_table(tokenizer: Path, file: Path) -> None:
    """Write the n-gram table of the shipped text and tables to ``file``, for ``tokenizer`` (a tokenizer.json).

    Does nothing if the file exists. Waits while another process writes it.

    Raises:
        ArtifactError: the file cannot be written.
    """
    from tokenizers import Tokenizer

    with locked(file.with_suffix(".lock"), f"writing {file}", tell):
        if file.exists():
            return
        encoder = Tokenizer.from_file(str(tokenizer))
        encoder.no_padding()
        encoder.no_truncation()
        pieces = list(_pieces(lzma.decompress(TEXT.read_bytes()).decode() + _code()))
        encoded = encoder.encode_batch_fast(pieces, add_special_tokens=False)
        table = Table.of(((), each.ids) for each in encoded).without_rare()
        for vocabulary in sorted(TABLES.glob(f"*/{VOCABULARY}")):
            known = Table.load(vocabulary.with_name(TABLE_FILE))
            table = table.plus(known.translated(_ids(json.loads(lzma.decompress(vocabulary.read_bytes())), encoder)))
        table.save(file)


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def _ids(vocabulary: list[str | None], encoder: "Tokenizer") -> IntArray:
    """Return the token id of each string of ``vocabulary``, -1 for those that ``encoder`` does not encode as one token.

    Each string is encoded after a line break, since some tokenizers insert a space at the start of a text; with others
    also alone, since a line break may be part of a longer token. Equal ids are kept once.
    """
    ids = np.full(len(vocabulary), -1, dtype=np.int64)
    inserts_space = len(encoder.encode("\n", add_special_tokens=False).ids) != 1
    for before in ("\n",) if inserts_space else ("", "\n"):
        start = encoder.encode(before, add_special_tokens=False).ids
        texts = [before + (string or "") for string in vocabulary]
        encoded = [each.ids for each in encoder.encode_batch_fast(texts, add_special_tokens=False)]
        decoded = encoder.decode_batch(encoded)  # differs where a character has no token
        for number, (tokens, text) in enumerate(zip(encoded, decoded, strict=True)):
            if len(tokens) == len(start) + 1 and tokens[:-1] == start and text == texts[number]:
                ids[number] = tokens[-1]
    distinct = np.unique(ids, return_index=True)[1]
    return np.where(np.isin(np.arange(len(ids)), distinct), ids, -1)


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
    with suppress(ArtifactError):  # decoding goes on without the table
        make_table(Path(sys.argv[1]), Path(sys.argv[2]))
