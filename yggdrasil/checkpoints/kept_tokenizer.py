"""Opens a folder's tokenizer with transformers once, and caches it for later starts without transformers.

The cache stores the rules and vocabulary (tokenizer.json as transformers' class builds it) and the settings. If a
tokenizer restored from these files behaves differently, only the name of its class is cached. ``write_tokenizer``
stores a tokenizer that was built without transformers in the model's folder, in the same form.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from yggdrasil.artifacts import parse_json, write_atomic
from yggdrasil.artifacts.ahead import Ahead
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.fork import ends_within
from yggdrasil.checkpoints.compact_tokenizer import open_compact, write_compact
from yggdrasil.checkpoints.tokenizer import Tokenizer, render_chat, try_template
from yggdrasil.errors import ArtifactError, YggdrasilError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = 2  # version of the cached form
_READ = (".json", ".jinja", ".model", ".txt")  # suffixes of files that transformers may read for a tokenizer
# Limits for the first opening. Vocabularies of 262,144 tokens take 3 s and 1 GB; damaged files may never end, and some
# make the parser in Rust panic, which is no Exception.
_CPU_SECONDS, _MEGABYTES = 20, 3072
_TEMPLATE_MEGABYTES = 512  # where the chat template alone is tried
_SAMPLES = ("a b, " + 64 * "a" + 64 * " " + "\n1", " Hello, wörld 123! <b>if (x):\n\treturn</b>", "数 🙂 \u00a0x .")
_BUILT = "built_tokenizer.json"  # the record that ``write_tokenizer`` writes
_THEIRS = "transformers."  # a class named in the cache is imported only from these modules


_ahead: dict[tuple[Path, int], Ahead[Tokenizer | None]] = {}  # (folder, its inode) -> its tokenizer


def open_ahead(folder: Path) -> Ahead[Tokenizer | None]:
    """Return a function that opens the tokenizer of ``folder``, for a thread to call ahead of time.

    The next ``open_tokenizer`` of this folder returns the function's result. The function returns None if only
    transformers can open the tokenizer; ``open_tokenizer`` then does so.
    """
    found = _ahead[folder, folder.stat().st_ino] = Ahead(lambda: _by_record(folder)[0])
    return found


def open_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of ``folder``, equivalent to the one that transformers' ``AutoTokenizer`` opens.

    Files that were never opened before are first tried in a fork with limited time and memory.

    Raises:
        YggdrasilError: the files crash the parser, or take too much time or memory.
        Exception: any exception of ``AutoTokenizer``.
    """
    ahead = _ahead.pop((folder, folder.stat().st_ino), None)
    if ahead is not None and (opened := ahead()) is not None:
        return opened
    found, record = _by_record(folder)
    if found is None and record is None:
        kept = _kept_file(folder)
        from transformers import AutoTokenizer  # noqa: F401 - this process needs it too, and the fork inherits it

        if not ends_within(lambda: _keep(folder, kept), _CPU_SECONDS, _MEGABYTES):
            raise YggdrasilError(
                f"its files break the parser, or they or the chat template take more than {_CPU_SECONDS} s or "
                f"{_MEGABYTES} MB; fetch them again"
            )
        found, record = _by_record(folder)
    return found or _of(_by_transformers(folder, record))


def _by_record(folder: Path) -> tuple[Tokenizer | None, dict[str, Any] | None]:
    """Return (tokenizer, record in the cache); each is None unless an earlier opening stored it."""
    built = _read(folder / _BUILT)
    if built is not None and (ours := _compact(folder, built) or _kept_tokenizer(folder, _written(folder), built)):
        return ours, None
    kept = _kept_file(folder)
    record = _read(kept)
    return (None if record is None else _kept_tokenizer(folder, _rules(kept), record)), record


def _written(folder: Path) -> Path:
    return folder / "tokenizer.json"


def _compact(folder: Path, built: Mapping[str, Any]) -> Tokenizer | None:
    """Open the compact form of a tokenizer that ``write_tokenizer`` has written, or None without one."""
    load = partial(tokenizers.Tokenizer.from_file, str(_written(folder)))
    backend: Any = open_compact(folder, str(built.get("rules")), load)
    return None if backend is None else Tokenizer(backend, built, lambda: _by_transformers(folder, built))


def _kept_file(folder: Path) -> Path:
    return cache_root() / "tokenizers" / f"{_digest(folder)}.json"


def write_tokenizer(folder: Path, rules: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write a tokenizer to the existing ``folder``, in files that ``open_tokenizer`` and transformers read.

    Files of the same names are replaced.

    Args:
        rules: the content of tokenizer.json.
        facts: the ``facts`` of ``Tokenizer``: chat template, special tokens, and ids of the tokens that begin and end
            a text.

    Raises:
        YggdrasilError: the chat template takes more than 20 s or 512 MiB for short chats.
    """
    unused = tokenizers.Tokenizer(tokenizers.models.BPE())  # a chat is rendered without a vocabulary
    tokenizer = Tokenizer(unused, facts, lambda: _by_transformers(folder, None))
    if tokenizer.chat_template and not ends_within(lambda: try_template(tokenizer), _CPU_SECONDS, _TEMPLATE_MEGABYTES):
        raise YggdrasilError(
            f"the chat template takes more than {_CPU_SECONDS} s or {_TEMPLATE_MEGABYTES} MB for a short chat"
        )
    text = json.dumps(rules, ensure_ascii=False, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest()
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token")) | facts["special_tokens"]
    settings = {"tokenizer_class": "TokenizersBackend", **named}  # null overrides the class's default token
    record = {"module": _THEIRS, "name": "", **facts, "rules": digest}
    _written(folder).write_bytes(text)
    write_compact(folder, rules, digest)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / _BUILT).write_text(json.dumps(record))
    if facts["chat_template"] is not None:
        (folder / "chat_template.jinja").write_text(facts["chat_template"], encoding="utf-8", newline="")


def _keep(folder: Path, kept: Path) -> None:
    """Open the tokenizer of ``folder`` with transformers, and write it to the cache; ``kept`` is the record's file.

    Rules and settings are written only if a tokenizer restored from them gives the same results for the samples.
    """
    theirs = _by_transformers(folder, None)
    theirs.decode(theirs.encode(_SAMPLES[0]))
    try_template(theirs)
    kind = type(theirs)
    record: dict[str, Any] = {"module": kind.__module__, "name": kind.__qualname__}
    with suppress(ArtifactError):  # if the cache cannot be written, the next start opens it again
        if getattr(theirs, "backend_tokenizer", None) is not None:
            rules = theirs.backend_tokenizer.to_str().encode()
            facts = {**record, **_facts(theirs), "rules": hashlib.sha256(rules).hexdigest()}
            if _is_alike(Tokenizer(theirs.backend_tokenizer, facts, lambda: theirs), theirs):
                write_atomic(_rules(kept), rules)
                record = facts
        if record["module"].startswith(_THEIRS):
            write_atomic(kept, json.dumps(record).encode())


def _facts(theirs: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Return the ``facts`` of a ``Tokenizer`` from transformers' tokenizer."""
    return {
        "chat_template": theirs.chat_template,
        "special_tokens": {name: _plain(value) for name, value in theirs.special_tokens_map.items()},
        "eos_token_id": theirs.eos_token_id, "bos_token_id": theirs.bos_token_id,
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """Convert a special token, or a list of them, to plain strings."""
    return [str(each) for each in value] if isinstance(value, list | tuple) else str(value)


def _is_alike(ours: Tokenizer, theirs: "PreTrainedTokenizerBase") -> bool:
    """Return whether both tokenizers encode and decode the samples equally."""
    if not isinstance(ours.chat_template, str | None) or getattr(theirs, "split_special_tokens", False):
        return False
    for text in _SAMPLES:
        for special in (True, False):
            tokens = theirs.encode(text, add_special_tokens=special)
            if ours.encode(text, add_special_tokens=special) != tokens:
                return False
            if any(ours.decode(tokens, skip_special_tokens=k) != theirs.decode(tokens, skip_special_tokens=k)
                   for k in (True, False)):  # fmt: skip
                return False
    return True


def _read(kept: Path) -> dict[str, Any] | None:
    """Read the cached record in the file ``kept``, and return None if it is missing or invalid."""
    try:
        record = parse_json(kept.read_bytes())
        is_ours = isinstance(record, dict) and str(record["module"]).startswith(_THEIRS)
    except (OSError, ValueError, KeyError):
        return None
    return record if is_ours else None


def _kept_tokenizer(folder: Path, file: Path, record: Mapping[str, Any]) -> Tokenizer | None:
    """Build the tokenizer from its record and the rules in ``file``; return None if ``file`` is missing or damaged."""
    try:
        rules = file.read_bytes()
        if hashlib.sha256(rules).hexdigest() != record["rules"]:
            return None
        backend = tokenizers.Tokenizer.from_buffer(rules)
        return Tokenizer(backend, record, lambda: _by_transformers(folder, record))
    except Exception:  # noqa: BLE001  (the parser in Rust raises nothing narrower)
        return None


def _rules(kept: Path) -> Path:
    """Return the path of the rules that belong to the record ``kept``."""
    return kept.with_suffix(".tokenizer.json")


def _by_transformers(folder: Path, record: Mapping[str, Any] | None) -> "PreTrainedTokenizerBase":
    """Open the tokenizer with transformers, by the class named in ``record`` or else by ``AutoTokenizer``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase
    from transformers.utils import logging

    logging.set_verbosity_error()
    with suppress(KeyError, ImportError, AttributeError):
        if record is not None:
            kind = getattr(import_module(str(record["module"])), str(record["name"]))
            if isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase):
                named: PreTrainedTokenizerBase = kind.from_pretrained(folder, local_files_only=True, _from_auto=True)
                return named
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return found


def _of(theirs: "PreTrainedTokenizerBase") -> Tokenizer:
    """Return transformers' tokenizer as a ``Tokenizer``, with ``render_chat`` as its ``apply_chat_template``."""
    ours: Any = theirs
    ours.apply_chat_template = partial(render_chat, theirs)
    tokenizer: Tokenizer = ours
    return tokenizer


def _digest(folder: Path) -> str:
    """Return a hash of the files that transformers may read for a tokenizer, and of the libraries' versions."""
    hasher = hashlib.sha256(f"{_FORMAT} {version('transformers')} {version('tokenizers')}".encode())
    for file in sorted(folder.iterdir()):
        hasher.update(f"\n{file.name}\n".encode())
        if file.suffix in _READ and not file.name.endswith(".index.json"):
            hasher.update(hashlib.sha256(file.read_bytes()).digest())
    return hasher.hexdigest()[:20]
