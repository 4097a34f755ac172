"""A byte-pair tokenizer over sorted tables, in a tenth of the memory of the ``tokenizers`` library's maps.

The library keeps 100 MB for a vocabulary of 262,144 tokens, and its parser holds the GIL for most of a second. Here the
native library merges each word's bytes into tokens. The ``tokenizers`` library still finds added tokens, normalises,
splits text into words and decodes, with the same rules and an empty vocabulary.

Dims: L single characters that are tokens.
"""

import ctypes
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers

from yggdrasil.artifacts.store import read_tensors, write_tensors
from yggdrasil.errors import ArtifactError
from yggdrasil.library.build import Native, check

_KIND, _SCHEMA_VERSION, _FILE = "vocabulary", 1, "tokenizer.tables"
_TABLES = ("letters", "letter_tokens", "bytes", "starts", "rights", "ranks", "merged")  # in the order of BytePairs
_PAIRS = struct.Struct("=7Q3q")  # text/byte_pairs.h: addresses of the tables, L, the unknown token, whether it is fused
_NONE = -1
_MOST_TEXTS = 4096  # tokens whose texts are cached as Python strings
_TEXT = (1 << 31) - 1  # the id of text between added tokens
_PLAIN = {"type": "BPE", "dropout": None, "ignore_merges": False}  # settings that the rules must have
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of added tokens; none may be set


class Encoded(NamedTuple):
    """Token ids of a text."""

    ids: list[int]


class CompactTokenizer:
    """A byte-pair tokenizer with the methods of ``tokenizers.Tokenizer`` that Yggdrasil calls.

    Other attributes without a leading underscore are those of ``whole``. The native library must be loaded. Several
    threads may call the methods at once.
    """

    def __init__(
        self, tables: Mapping[str, npt.NDArray[Any]], rules: Mapping[str, Any], load: Callable[[], tokenizers.Tokenizer]
    ) -> None:
        self._tables, self._load = tables, load
        self._text, self._ends = tables["text"].data, tables["ends"].data  # faster than arrays
        self._size = int(rules["size"])
        self._finder = tokenizers.Tokenizer.from_str(json.dumps(rules["finder"]))
        parts = tokenizers.Tokenizer.from_str(json.dumps(rules["parts"]))
        self.normalizer, self.pre_tokenizer, self.decoder = parts.normalizer, parts.pre_tokenizer, parts.decoder
        self._kept_text = lru_cache(maxsize=_MOST_TEXTS)(self.id_to_token)
        addresses = (tables[name].ctypes.data for name in _TABLES)
        self._pairs = _PAIRS.pack(*addresses, len(tables["letters"]), rules["unknown"], rules["fuses"])

    @cached_property
    def whole(self) -> tokenizers.Tokenizer:
        """The same tokenizer as an object of the ``tokenizers`` library, opened on first access."""
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoded]:
        """Return the token ids of each text; ``add_special_tokens`` adds tokens such as the beginning of text."""
        found = self._finder.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [Encoded(self._ids(text, each)) for text, each in zip(texts, found, strict=True)]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the token ids ``tokens``; ids outside the vocabulary are skipped."""
        hidden = self._special if skip_special_tokens else frozenset[str]()
        texts = [text for text in map(self._kept_text, tokens) if text is not None and text not in hidden]
        return " ".join(texts) if self.decoder is None else str(self.decoder.decode(texts))

    def id_to_token(self, token: int) -> str | None:
        """Return the vocabulary's string for a token id, or None for an unknown id."""
        if token in self._added:
            return self._added[token]
        if not 0 <= token < len(self._ends):
            return None
        return str(self._text[self._ends[token - 1] if token else 0 : self._ends[token]], "utf-8")

    def get_vocab_size(self, *, with_added_tokens: bool = True) -> int:
        """Return the number of tokens in the vocabulary, with or without the added tokens."""
        return self._size if with_added_tokens else len(self._ends)

    def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """Return the added tokens, keyed by token id."""
        return dict(self._finder.get_added_tokens_decoder())

    @cached_property
    def _added(self) -> dict[int, str]:
        return {number: token.content for number, token in self.get_added_tokens_decoder().items()}

    @cached_property
    def _special(self) -> frozenset[str]:
        return frozenset(token.content for token in self.get_added_tokens_decoder().values() if token.special)

    def _ids(self, text: str, found: Any) -> list[int]:
        """Return the ids of ``text``; ``found`` is its encoding by ``_finder``, with ``_TEXT`` between added tokens."""
        ids: list[int] = []
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            ids += [token] if token != _TEXT else self._encoded(text[start:end])
        return ids

    def _encoded(self, text: str) -> list[int]:
        text = text if self.normalizer is None else self.normalizer.normalize_str(text)
        split = self.pre_tokenizer
        words = [word.encode() for word in ([text] if split is None else [w for w, _ in split.pre_tokenize_str(text)])]
        ends = np.cumsum([len(word) for word in words], dtype=np.int64)
        tokens = np.empty(int(ends[-1]) if words else 0, dtype=np.int32)
        assert Native.library is not None
        function = Native.library.yggdrasil_encode_words
        function.restype = ctypes.c_int64
        buffers = ctypes.c_void_p(ends.ctypes.data), ctypes.c_int64(len(words)), ctypes.c_void_p(tokens.ctypes.data)
        size: int = function(self._pairs, b"".join(words), *buffers)
        check(size)
        ids: list[int] = tokens[:size].tolist()
        return ids


def write_compact(folder: Path, all_rules: Mapping[str, Any], digest: str) -> bool:
    """Write a tokenizer's tables to ``folder``, or return False if ``CompactTokenizer`` does not support its rules.

    Args:
        all_rules: the content of the tokenizer's tokenizer.json.
        digest: identifies the rules; ``open_compact`` opens the tables only with the same digest.

    Raises:
        ArtifactError: the file cannot be written.
    """
    if not _is_covered(all_rules):
        return False
    model, added = all_rules["model"], all_rules["added_tokens"]
    vocabulary: dict[str, int] = model["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        return False
    mark = "text"
    words = {"type": "WordLevel", "vocab": {mark: _TEXT, **{each["content"]: each["id"] for each in added}}}
    empty: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    parts = {name: all_rules[name] for name in ("normalizer", "pre_tokenizer", "decoder")}
    facts = {
        "finder": {
            **empty, **dict.fromkeys(parts), "added_tokens": added, "post_processor": all_rules["post_processor"],
            "model": {**words, "unk_token": mark},
        },
        "parts": {**empty, **parts, "post_processor": None, "model": {**_PLAIN, "vocab": {}, "merges": []}},
        "size": len(vocabulary) + sum(each["content"] not in vocabulary for each in added),
        "unknown": vocabulary.get(model["unk_token"], _NONE), "fuses": int(model["fuse_unk"]), "rules": digest,
    }  # fmt: skip
    data = [token.encode() for token in tokens]
    letters = sorted((ord(token), number) for token, number in vocabulary.items() if len(token) == 1)
    fallback = [vocabulary.get(f"<0x{b:02X}>", _NONE) if model["byte_fallback"] else _NONE for b in range(256)]
    write_tensors(folder / _FILE, _KIND, _SCHEMA_VERSION, {
        "rules": np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8),
        "text": np.frombuffer(b"".join(data), dtype=np.uint8), "ends": _column(np.cumsum([len(each) for each in data])),
        "letters": _column([code for code, _ in letters]), "letter_tokens": _column([token for _, token in letters]),
        "bytes": _column(fallback), **_merge_tables(vocabulary, model["merges"]),
    })  # fmt: skip
    return True


def open_compact(folder: Path, digest: str, load: Callable[[], tokenizers.Tokenizer]) -> CompactTokenizer | None:
    """Open the tokenizer that ``write_compact`` has written to ``folder``.

    The result is None if the file is missing or damaged, or has another ``digest``, or the native library is not
    loaded.

    Args:
        digest: identifies the rules, as given to ``write_compact``.
        load: opens the same tokenizer with the ``tokenizers`` library.
    """
    if Native.library is None or not (folder / _FILE).exists():
        return None
    try:
        tables = read_tensors(folder / _FILE, _KIND, _SCHEMA_VERSION)
        rules = json.loads(tables["rules"].tobytes())
        return CompactTokenizer(tables, rules, load) if rules["rules"] == digest else None
    except (ArtifactError, KeyError, ValueError):
        return None


def _is_covered(rules: Mapping[str, Any]) -> bool:
    """Return whether the rules are byte-pair encoding that treats each text between added tokens separately."""
    model = rules["model"]
    return (
        all(model.get(name) == value for name, value in _PLAIN.items())
        and not any(model.get(name) for name in _AFFIXES)
        and (model["unk_token"] is None or model["unk_token"] in model["vocab"])
        and not any(each[flag] for each in rules["added_tokens"] for flag in _FLAGS)
        and rules["truncation"] is rules["padding"] is None
        # Metaspace prepends a space only before the first piece of a text.
        and "Metaspace" not in json.dumps(rules["pre_tokenizer"])
    )


def _merge_tables(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]) -> dict[str, npt.NDArray[np.int32]]:
    """Return tables of the ``merges`` (distinct pairs in rank order), sorted by left and then by right token id."""
    lefts, rights = (_column([vocabulary[pair[side]] for pair in merges]) for side in (0, 1))
    merged = _column([vocabulary[left + right] for left, right in merges])
    order = np.lexsort((rights, lefts))
    starts = np.searchsorted(lefts[order], np.arange(len(vocabulary) + 1))
    return {
        "starts": _column(starts), "rights": _column(rights[order]),
        "ranks": _column(order), "merged": _column(merged[order]),
    }  # fmt: skip


def _column(values: Any) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values, dtype=np.int32)
