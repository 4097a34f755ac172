"""Where a model comes from: a checkpoint folder, a hub id, or a GGUF file.

Whatever was given becomes folders in Hugging Face layout. A GGUF file is prepared once: its facts and tokenizer, and
its weights dequantised to a dtype, lie in the user's cache under the file's fingerprint.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from yggdrasil.artifacts import model_fingerprint, shown, tokenizer_fingerprint
from yggdrasil.artifacts.fork import in_fork
from yggdrasil.artifacts.gguf import GgufHeader, is_gguf, read_gguf_header
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.hub import hub_folder
from yggdrasil.checkpoints.prepared import MARKER, is_whole, prepare, prepared_root
from yggdrasil.errors import YggdrasilError

_LAYOUT = 5  # raised when what is prepared changes
_FINGERPRINT = (
    "tokenizer.fingerprint"  # beside a GGUF file's facts: of what the file says, which nobody need read again
)


@dataclass(frozen=True)
class Source:
    """A model as it was given, and where its parts lie."""

    given: str
    folder: Path  # config.json, generation_config.json and the tokenizer
    gguf: Path | None = None  # the weights as they are, where a GGUF file was given

    @classmethod
    def find(cls, given: "str | Path | Source") -> "Source":
        """What ``given`` (a folder, a GGUF file, a hub id) names; a hub id is fetched unless it is in the cache.

        Raises:
            YggdrasilError: there is no such model, or it cannot be read.
        """
        if isinstance(given, Source):
            return given
        if not str(given):
            raise YggdrasilError("a model (target or drafter) is named by an empty text; give a folder, file or hub id")
        path = expanded(given)
        if is_gguf(path):
            stat = path.stat()
            return cls(str(given), _gguf_facts(path.absolute(), stat.st_size, stat.st_mtime_ns), path)
        if path.is_dir():
            if not (path / "config.json").exists():
                files = sorted(path.glob("*.gguf"))
                hint = f"give the file {files[0]}" if files else "give a checkpoint folder in Hugging Face layout"
                raise YggdrasilError(f"{given} holds no config.json; {hint}")
            return cls(str(given), path)
        if path.exists():
            raise YggdrasilError(f"{given} is a file, but no GGUF file; give a checkpoint folder or a .gguf file")
        return cls(str(given), hub_folder(str(given)))

    @property
    def path(self) -> Path:
        """The folder or file whose fingerprint is the model's."""
        return self.gguf or self.folder

    def fingerprint(self) -> str:
        """16 hexadecimal digits over configuration and weights."""
        return model_fingerprint(self.path)

    def tokenizer_fingerprint(self) -> str:
        """16 hexadecimal digits over what the tokenizer does."""
        return tokenizer_fingerprint(self.folder) if self.gguf is None else (self.folder / _FINGERPRINT).read_text()

    def checkpoint(self, dtype: torch.dtype, *, keeps_blocks: bool = False) -> Path:
        """The folder to load weights from; those of a GGUF file are dequantised to ``dtype`` when first asked for.

        With ``keeps_blocks`` it lacks the weights of a GGUF file whose layers read its blocks.
        """
        if self.gguf is None:
            return self.folder
        return _gguf_weights(self.gguf.absolute(), self.folder, dtype, keeps_blocks)


@lru_cache(maxsize=8)
def _gguf_facts(path: Path, _num_bytes: int, _modified: int) -> Path:
    def write(header: GgufHeader, partial: Path) -> None:
        from yggdrasil.checkpoints.gguf.facts import write_facts
        from yggdrasil.checkpoints.shards import faults_of_disks

        with faults_of_disks():
            write_facts(header, partial)
        (partial / _FINGERPRINT).write_text(tokenizer_fingerprint(path))

    folder = prepared_root() / model_fingerprint(path) / "facts"
    return _prepared(path, folder, write, f"reading {shown(path)}")


@lru_cache(maxsize=8)
def _gguf_weights(path: Path, facts: Path, dtype: torch.dtype, keeps_blocks: bool) -> Path:
    name = str(dtype).removeprefix("torch.") + ("-beside-blocks" if keeps_blocks else "")

    def write(header: GgufHeader, partial: Path) -> None:
        from transformers import AutoConfig

        from yggdrasil.checkpoints.gguf.checkpoint import write_weights
        from yggdrasil.checkpoints.gguf.rows import blocks_of

        config = AutoConfig.from_pretrained(facts)
        write_weights(header, config, partial, dtype, blocks_of(header, config) if keeps_blocks else ())
        config.dtype = dtype
        config.save_pretrained(partial)
        for file in facts.iterdir():
            if file.name not in ("config.json", MARKER):
                (partial / file.name).write_bytes(file.read_bytes())

    return _prepared(path, facts.parent / name, write, f"preparing {shown(path)} in {name}")


def _prepared(path: Path, folder: Path, write: Callable[[GgufHeader, Path], None], what: str) -> Path:
    """``folder`` as ``write`` fills it from the GGUF file: kept from an earlier time if it is whole, else written now.

    Written in a fork, whose memory goes with it, and said so.
    """
    if not is_whole(folder, _LAYOUT):
        again = " again, since what was kept is damaged or of an older version" if folder.exists() else ", once"

        def fill() -> str:
            header = read_gguf_header(path)  # before a word is said: it may be damaged
            print(f"yggdrasil: {what}{again}", file=sys.stderr)  # noqa: T201
            prepare(folder, _LAYOUT, lambda partial: write(header, partial))
            return str(folder)

        in_fork(fill)
    return folder
