"""Which class of tokenizer a folder asks for, kept from an earlier time.

transformers finds it out from the model's configuration, and importing that takes longer than reading the tokenizer.
"""

import hashlib
import json
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from yggdrasil.artifacts import parse_json, write_atomic
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.fork import ends_within
from yggdrasil.errors import ArtifactError, YggdrasilError

_READ = ("config.json", "tokenizer_config.json", "tokenizer.json")  # what the class is chosen by, besides file names
# What a first opening may take. Vocabularies of 262,144 tokens take 3 s and 1 GB; damaged files may have no end, and
# some have the parser in Rust panic, which is no Exception.
_CPU_SECONDS, _MEGABYTES = 20, 3072
_SAMPLE = "a b, " + 64 * "a" + 64 * " " + "\n1"
_THEIRS = "transformers."  # the only modules that are imported for a name in the cache


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """What ``AutoTokenizer`` makes of ``folder``; raises what it raises.

    Files that were never opened before are tried in a process of its own.

    Raises:
        YggdrasilError: they break the parser, or take too much time or memory.
    """
    kept = cache_root() / "tokenizers" / f"{_digest(folder)}.json"
    tokenizer: PreTrainedTokenizerBase
    known = _read(kept)
    if known is None:
        if not ends_within(lambda: _choose(folder, kept), _CPU_SECONDS, _MEGABYTES):
            raise YggdrasilError(
                f"its files break the parser, or take more than {_CPU_SECONDS} s or {_MEGABYTES} MB to open; fetch "
                "them again"
            )
        known = _read(kept)
    if known is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        tokenizer = known.from_pretrained(folder, local_files_only=True, _from_auto=True)
    return tokenizer


def _choose(folder: Path, kept: Path) -> None:
    """Let transformers find the class, and note it where it is one of its own and its tokenizer works."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.decode(tokenizer(_SAMPLE)["input_ids"])
    kind = type(tokenizer)
    if kind.__module__.startswith(_THEIRS):
        with suppress(ArtifactError):  # the next time takes as long as this one
            write_atomic(kept, json.dumps({"module": kind.__module__, "name": kind.__qualname__}).encode())


def _read(kept: Path) -> type[PreTrainedTokenizerBase] | None:
    """The class; None where it was not kept, or is not what it must be."""
    try:
        record = parse_json(kept.read_bytes())
        module, name = str(record["module"]), str(record["name"])
        kind = getattr(import_module(module), name) if module.startswith(_THEIRS) else None
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError):
        return None
    return kind if isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase) else None


def _digest(folder: Path) -> str:
    """Of all that the choice depends on."""
    hasher = hashlib.sha256(transformers.__version__.encode())
    for file in sorted(folder.iterdir()):
        hasher.update(f"\n{file.name}\n".encode())
        if file.name in _READ:
            hasher.update(hashlib.sha256(file.read_bytes()).digest())
    return hasher.hexdigest()[:20]
