#!/usr/bin/env python3
"""Write the strings of a tokenizer's tokens beside a shipped n-gram table, so that other tokenizers can use the table.

scripts/table_vocabulary.py my/model yggdrasil/assets/tables/FINGERPRINT
"""

import json
import lzma
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from tokenizers import Tokenizer

from yggdrasil.checkpoints.source import Source
from yggdrasil.cli import run_script
from yggdrasil.drafters.statistics.shipped_table import VOCABULARY
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import TABLE_FILE


def main(
    model: Annotated[str, typer.Argument(help="The checkpoint folder or GGUF file whose answers the table counts.")],
    folder: Annotated[Path, typer.Argument(help="The folder of the table.")],
) -> None:
    """Write FOLDER/vocabulary.json.xz."""
    tokenizer = Tokenizer.from_file(str(Source.find(model).folder / "tokenizer.json"))
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    used = set(np.unique(Table.load(folder / TABLE_FILE).tokens).tolist()) - special
    strings = [tokenizer.decode([number]) if number in used else None for number in range(max(used) + 1)]
    whole = [None if string is None or "�" in string else string for string in strings]
    packed = lzma.compress(json.dumps(whole, ensure_ascii=False).encode(), preset=9 | lzma.PRESET_EXTREME)
    (folder / VOCABULARY).write_bytes(packed)


if __name__ == "__main__":
    run_script(main, "table_vocabulary")
