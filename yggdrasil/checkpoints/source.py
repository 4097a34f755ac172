"""Finds the folders, in Hugging Face layout, of a model given as checkpoint folder, hub id or GGUF file.

A GGUF file is converted once: its configuration and tokenizer, and its weights dequantised to a dtype, are stored in
the user's cache under the file's fingerprint.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yggdrasil.artifacts import model_fingerprint, shown, tokenizer_fingerprint
from yggdrasil.artifacts.fork import begin_in_fork
from yggdrasil.artifacts.gguf import GgufHeader, is_gguf, read_gguf_header
from yggdrasil.artifacts.homes import expanded
from yggdrasil.checkpoints.hub import hub_folder
from yggdrasil.checkpoints.prepared import MARKER, is_whole, prepare, prepared_root
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    import torch

_LAYOUT = 6  # version of the prepared folders
_FINGERPRINT = (
    "tokenizer.fingerprint"  # file with the fingerprint of a GGUF file's tokenizer, stored with its configuration
)


@dataclass(frozen=True)
class Source:
    """A model as the user named it, and the paths of its parts."""

    given: str
    folder: Path  # with config.json, generation_config.json and the tokenizer
    gguf: Path | None = None  # the GGUF file, if one was given

    @classmethod
    def find(cls, given: "str | Path | Source") -> "Source":
        """Return the paths of the model that ``given`` names: a checkpoint folder, GGUF file or hub id.

        A hub id is downloaded unless it is in the local cache. A ``Source`` is returned unchanged.

        Raises:
            YggdrasilError: there is no such model, or it cannot be read.
        """
        if isinstance(given, Source):
            return given
        if not str(given):
            raise YggdrasilError("the name of a model (target or drafter) is empty; give a folder, file or hub id")
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
        """Return the path of the GGUF file, or else of the folder, whose fingerprint identifies the model."""
        return self.gguf or self.folder

    def fingerprint(self) -> str:
        """Return the fingerprint of the model's configuration and weights, 16 hexadecimal digits.

        Raises:
            ArtifactError: the configuration or the weights are missing or damaged.
        """
        return model_fingerprint(self.path)

    def tokenizer_fingerprint(self) -> str:
        """Return the fingerprint of the tokenizer's content, 16 hexadecimal digits.

        Raises:
            ArtifactError: the tokenizer's files are missing or damaged.
        """
        return tokenizer_fingerprint(self.folder) if self.gguf is None else (self.folder / _FINGERPRINT).read_text()

    def checkpoint(self, dtype: "torch.dtype", *, keeps_blocks: bool = False) -> Path:
        """Return the checkpoint folder to load the model's weights from.

        For a folder or hub id the result is the model's folder, and the arguments are ignored. The weights of a GGUF
        file are dequantised to ``dtype`` on the first call and stored in a folder of the user's cache. With
        ``keeps_blocks``, that folder lacks the weights whose layers read the file's quantised blocks.

        Raises:
            YggdrasilError: the GGUF file is damaged or unsupported, or the cache cannot be written.
        """
        if self.gguf is None:
            return self.folder
        return _gguf_weights(self.gguf.absolute(), self.folder, dtype, keeps_blocks)


_begun: dict[Path, Callable[[], str]] = {}  # folder in the cache -> function that waits for the fork that fills it


def begin_reading(path: Path) -> bool:
    """Start a fork that caches a GGUF file's configuration and tokenizer, unless they are; return whether it started.

    The next ``Source.find`` of this file waits for the fork, and raises its errors.

    Raises:
        ArtifactError: the file is missing, or too damaged to be fingerprinted.
    """
    path = path.absolute()
    folder = _facts_folder(path)
    if folder in _begun or (folder / MARKER).exists():
        return False
    _begun[folder] = _begin_preparing(path, folder, partial(_write_facts, path), f"reading {shown(path)}")
    return True


@lru_cache(maxsize=8)
def _gguf_facts(path: Path, _num_bytes: int, _modified: int) -> Path:
    """Return the cached folder with configuration and tokenizer of a GGUF file; size and mtime are cache keys."""
    return _prepared(path, _facts_folder(path), partial(_write_facts, path), f"reading {shown(path)}")


def _facts_folder(path: Path) -> Path:
    return prepared_root() / model_fingerprint(path) / "facts"


def _write_facts(path: Path, header: GgufHeader, folder: Path) -> None:
    from yggdrasil.checkpoints.gguf.facts import write_config_and_tokenizer
    from yggdrasil.checkpoints.shards import raising_os_errors

    with raising_os_errors():
        write_config_and_tokenizer(header, folder)
    (folder / _FINGERPRINT).write_text(tokenizer_fingerprint(path))


@lru_cache(maxsize=8)
def _gguf_weights(path: Path, facts: Path, dtype: "torch.dtype", keeps_blocks: bool) -> Path:
    """Return the cached folder with the weights of a GGUF file in ``dtype``, see ``Source.checkpoint``."""
    name = str(dtype).removeprefix("torch.") + ("-beside-blocks" if keeps_blocks else "")

    def write(header: GgufHeader, partial: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from yggdrasil.checkpoints.gguf.checkpoint import write_weights
        from yggdrasil.checkpoints.gguf.rows import blocks_of

        config = AutoConfig.from_pretrained(facts)
        write_weights(header, config, partial, dtype, blocks_of(header, config) if keeps_blocks else ())
        config.dtype = dtype
        model: Any = AutoModelForCausalLM._model_mapping[type(config)]
        config.architectures = [model.__name__]
        config.save_pretrained(partial)
        for file in facts.iterdir():
            if file.name not in ("config.json", MARKER):
                (partial / file.name).write_bytes(file.read_bytes())

    return _prepared(path, facts.parent / name, write, f"preparing {shown(path)}")


def _prepared(path: Path, folder: Path, write: Callable[[GgufHeader, Path], None], what: str) -> Path:
    """Return ``folder``; unless it is whole, let ``write`` fill it from the GGUF file ``path`` first.

    ``write`` runs in a fork, so that its memory is freed, after a message with the text ``what`` on standard error. If
    ``begin_reading`` has started the fork, this function only waits for it.
    """
    wait = _begun.pop(folder, None)
    if wait is not None:
        wait()
    elif not is_whole(folder, _LAYOUT):
        _begin_preparing(path, folder, write, what)()
    return folder


def _begin_preparing(
    path: Path, folder: Path, write: Callable[[GgufHeader, Path], None], what: str
) -> Callable[[], str]:
    """Start the fork of ``_prepared``, and return a function that waits for it."""
    again = " again, since what was kept is damaged or of an older version" if folder.exists() else ", once"

    def fill() -> str:
        from yggdrasil.checkpoints.gguf.config import read_config

        header = read_gguf_header(path)
        read_config(header)  # before the announcement: one of both raises for a damaged or unsupported file
        print(f"yggdrasil: {what}{again}", file=sys.stderr)  # noqa: T201
        prepare(folder, _LAYOUT, lambda partial: write(header, partial))
        return str(folder)

    return begin_in_fork(fill)
