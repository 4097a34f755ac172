"""N-gram table of the text that the package includes, for the tokenizer of any model.

A model without a calibration has no n-gram table of its own text. The table of this module counts the shipped text and
answers of a chat model, encoded by the model's tokenizer. Counting takes some seconds, so a separate process counts,
once per tokenizer, when such a model is first opened. That process may outlive the process that started it. The table
is stored in the user's cache.

    python -m yggdrasil.drafters.statistics.shipped_table TOKENIZER_JSON TABLE
"""

import json
import lzma
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from yggdrasil.artifacts.lock import locked, tell
from yggdrasil.drafters.statistics.table import SCHEMA_VERSION, Table
from yggdrasil.drafters.statistics.table_files import NICENESS, start_process, tables_folder
from yggdrasil.errors import ArtifactError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ASSETS = Path(__file__).parents[2] / "assets"
TEXT = _ASSETS / "corpus" / "text.xz"  # its README lists the licences
ANSWERS = _ASSETS / "corpus" / "answers.xz"  # a JSON list of strings, answers of a chat model
_CONTENT = 4  # changes when the text changes
ANSWERS_WEIGHT = 4  # factor of the answers' counts in the sum: answers of models are more alike than other text
CODE_CHARACTERS = 3_000_000  # characters of Python's standard library to count
LEAST_BYTES = 32 << 20  # least size of a model's weights: passes of smaller models are so short that a table slows them
_PIECE = 4_096  # characters per tokenised piece


def table_file(tokenizer_fingerprint: str) -> Path:
    """Return the path of the shipped text's n-gram table for the tokenizer with this fingerprint. It may not exist."""
    return tables_folder() / f"shipped-{tokenizer_fingerprint}-{SCHEMA_VERSION}.{_CONTENT}.safetensors"


def make_table_in_background(tokenizer: Path, file: Path) -> None:
    """Start a process that writes the shipped text's n-gram table to ``file``; do nothing if the file exists.

    Args:
        tokenizer: path of tokenizer.json; if there is no such file, nothing is started.
    """
    if not file.exists() and tokenizer.is_file():
        start_process(__name__, tokenizer, file)


def make_table(tokenizer: Path, file: Path) -> None:
    """Write the n-gram table of the shipped text to ``file``, for ``tokenizer`` (a tokenizer.json).

    Does nothing if ``file`` exists. Waits while another process writes ``file``.

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
        answers = Table.of(_encoded(json.loads(lzma.decompress(ANSWERS.read_bytes())), encoder))
        text = Table.of(_encoded(_pieces(lzma.decompress(TEXT.read_bytes()).decode() + _code()), encoder))
        table = text.plus(answers.times(ANSWERS_WEIGHT)).without_rare()
        table.save(file)


def _encoded(pieces: Iterable[str], encoder: "Tokenizer") -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Return a pair (empty prompt, token ids) for each piece, as ``Table.of`` takes documents."""
    encoded = encoder.encode_batch_fast(list(pieces), add_special_tokens=False)
    return (((), each.ids) for each in encoded)


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
    with suppress(ArtifactError):  # decoding goes on without the table
        make_table(Path(sys.argv[1]), Path(sys.argv[2]))
