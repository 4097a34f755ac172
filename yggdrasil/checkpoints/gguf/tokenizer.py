"""Builds the rules (tokenizer.json) of a GGUF file's tokenizer, equal to the rules that transformers builds.

This saves the import of transformers, which also takes long to convert a vocabulary of 262,144 tokens.
The ``tokenizers`` library, which would parse that vocabulary, only writes how text is split and decoded.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.checkpoints.token_bytes import byte_letters

_QWEN, _QWEN35_MOE = "qwen2", "qwen35moe"  # transformers uses special classes for these, which normalise text
_GEMMA4 = "gemma4"  # transformers adds no beginning of text to it, and llama.cpp always does
_GEMMA = ("gemma2", "gemma3", _GEMMA4)
_TESTED = (  # architectures whose tokenizers were tested against transformers
    "llama", "phi3", "smollm3", "granite", "granitehybrid", "olmo2", "ernie4_5", "falcon-h1", "gpt-oss", "lfm2",
    "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen3moe", "qwen3next", "qwen35", _QWEN35_MOE, _QWEN, *_GEMMA,
)  # fmt: skip
_TESTED_MIXTURES = (
    "gpt-oss", "granitehybrid", "lfm2moe", "nemotron_h_moe", "qwen3moe", "qwen3next", _QWEN35_MOE, _GEMMA4,
)  # fmt: skip
_SPACE = "\u2581"  # SentencePiece's character for a space
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35_SPLIT = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
# Patterns that split text into words before merging, by ``tokenizer.ggml.pre``.
_SPLITS = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN_SPLIT),
    "qwen35": _QWEN35_SPLIT,
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "dbrx", "pixtral", "smaug-bpe"),
        _LLAMA_SPLIT,
    ),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O_SPLIT),
    "tekken": _TEKKEN_SPLIT,
}
_USUAL_SPLITS = ("default", "gpt-2", "smollm")  # these use the pattern of GPT-2


class BuiltTokenizer(NamedTuple):
    """The content of a tokenizer.json, and the ``facts`` of ``checkpoints.tokenizer.Tokenizer``."""

    rules: dict[str, Any]
    facts: dict[str, Any]


class _Parts(NamedTuple):
    """Parts of a byte-pair tokenizer."""

    backend: Tokenizer  # everything but its vocabulary and added tokens
    vocabulary: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    usual: Sequence[str]  # the special tokens that transformers' class always adds


def build_tokenizer(header: GgufHeader) -> BuiltTokenizer | None:
    """Return the tokenizer of a GGUF file.

    The result is None if this kind of tokenizer was not tested against transformers, or the file is damaged.
    """
    facts = {name.removeprefix("tokenizer.ggml."): value for name, value in header.facts.items()}
    if header.architecture not in (_TESTED_MIXTURES if header.fact("expert_count") else _TESTED):
        return None
    try:
        return _built(header.architecture, facts)
    except Exception:  # noqa: BLE001  (the library in Rust raises nothing narrower; transformers says what is wrong)
        return None


def _built(architecture: str, facts: Mapping[str, Any]) -> BuiltTokenizer | None:
    template = facts.get("tokenizer.chat_template")
    is_bytes = facts["model"] == "gpt2"
    if not isinstance(template, str | None) or not (is_bytes or facts["model"] in ("llama", _GEMMA4)):
        return None
    found = _of_bytes(architecture, facts) if is_bytes else _of_pieces(architecture, facts)
    if found is None:
        return None
    tokens, types = facts["tokens"], facts.get("token_type") or ()
    alphabet = set(byte_letters().values())
    control = [
        token
        for token, kind in zip(tokens, types, strict=False)
        if kind == _CONTROL and not (is_bytes and set(token) - alphabet)
    ]
    defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    numbers = {name: facts.get(f"{theirs}_token_id") for name, theirs in _NAMES.items()}
    named: dict[str, str] = {name: tokens[number] for name, number in numbers.items() if number is not None}
    added = dict.fromkeys([*found.usual, *control], True)  # whether they are special; the first addition counts
    for token in defined:
        if token in found.vocabulary:
            added.setdefault(token, False)
    added = {**dict.fromkeys([*added, *named.values()], True), **added}
    ids = _ids(found.vocabulary, added)
    begins = bool(facts.get("add_bos_token", not is_bytes)) and "bos_token" in named
    ends = bool(facts.get("add_eos_token", False)) and "eos_token" in named
    found.backend.post_processor = _template(
        ids, named["bos_token"] if begins else "", named["eos_token"] if ends else ""
    )
    rules = json.loads(found.backend.to_str())
    rules["model"] |= {"vocab": found.vocabulary, "merges": found.merges}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    rules["added_tokens"] = [
        {"id": ids[token], "content": token, **plain, "special": added[token]}
        for token in sorted(ids, key=ids.__getitem__)
    ]
    return BuiltTokenizer(rules, {
        "chat_template": template, "special_tokens": named,
        **{f"{name}_id": ids[named[name]] if name in named else None for name in ("eos_token", "bos_token")},
    })  # fmt: skip


def _ids(vocabulary: Mapping[str, int], added: Iterable[str]) -> dict[str, int]:
    """Return the ids of added tokens: the vocabulary's id, or the next unused one for a token outside it."""
    unused = count(len(vocabulary))
    return {token: vocabulary[token] if token in vocabulary else next(unused) for token in added if token}


def _template(ids: Mapping[str, int], begin: str, end: str) -> Any:
    """Return a post-processor that adds ``begin`` and ``end`` (a token or "") around one text or each of a pair."""
    single = f"{f'{begin}:0 ' if begin else ''}$A:0{f' {end}:0' if end else ''}"
    pair = f"{single}{f' {begin}:1' if begin else ''} $B:1{f' {end}:1' if end else ''}"
    special = [(token, ids[token]) for token in (begin, end) if token]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _of_bytes(architecture: str, facts: Mapping[str, Any]) -> _Parts | None:
    """Return the parts of a byte-level BPE tokenizer.

    The result is None if the pattern that splits words is unknown, two tokens are equal, or a part of a merge is no
    token.
    """
    split = _QWEN_SPLIT if architecture == _QWEN else _SPLITS.get(facts.get("pre", "default"))
    if split is None and facts.get("pre", "default") not in _USUAL_SPLITS:
        return None
    spelling = byte_letters()
    letters = set(spelling.values())
    tokens = [
        token if letters.issuperset(token) else "".join(spelling[byte] for byte in token.encode())
        for token in facts["tokens"]
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _distinct([(left, right) for left, right in (merge.split(" ") for merge in facts["merges"])], vocabulary)
    if merges is None or len(vocabulary) != len(tokens):
        return None
    backend = Tokenizer(BPE({}, [], continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False))
    backend.normalizer = normalizers.NFC() if architecture in (_QWEN, _QWEN35_MOE) else None
    words: list[Any] = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, by_bytes]) if words else by_bytes
    backend.decoder = decoders.ByteLevel()
    return _Parts(backend, vocabulary, merges, ["<|endoftext|>"])


def _of_pieces(architecture: str, facts: Mapping[str, Any]) -> _Parts | None:
    """Return the parts of a SentencePiece BPE tokenizer.

    The result is None if two tokens are equal, a part of a merge is no token, or the file has merges and is not
    Gemma 4's, or the reverse.
    """
    tokens, is_gemma, has_merges = facts["tokens"], architecture in _GEMMA, architecture == _GEMMA4
    if is_gemma and not has_merges:  # files store runs of spaces without SentencePiece's character
        tokens = [_SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or ("merges" in facts) != has_merges:
        return None
    if has_merges:
        merges = _distinct(_split(facts["merges"]), vocabulary)
    else:
        merges = _merges(tokens, vocabulary, None if is_gemma else facts["scores"])
    if merges is None:
        return None
    unknown = {"unk_token": "<unk>"} if is_gemma else {}
    backend = Tokenizer(BPE({}, [], fuse_unk=True, byte_fallback=True, **unknown))
    spaces: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous")
        backend.decoder = decoders.Sequence(spaces)
        return _Parts(backend, vocabulary, merges, ["<unk>", "<bos>", "<eos>", "<pad>", "<mask>"])
    if architecture == "phi3":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([*spaces, decoders.Strip(content=" ", left=1)])
    return _Parts(backend, vocabulary, merges, ["<unk>", "<s>", "</s>"])


def _distinct(merges: Sequence[tuple[str, str]], vocabulary: Mapping[str, int]) -> list[tuple[str, str]] | None:
    """Return the merges without duplicates, each at its last position, as the ``tokenizers`` library ranks them.

    The result is None if a part of a merge, or the merged string, is no token.
    """
    if not all(left in vocabulary and right in vocabulary and left + right in vocabulary for left, right in merges):
        return None
    return list(dict.fromkeys(reversed(merges)))[::-1]


def _split(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Split each merge of a file into its pair, at the first space after the merge's first character."""
    cuts = [merge.index(" ", 1) for merge in merges]
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _merges(
    tokens: Sequence[str], vocabulary: Mapping[str, int], scores: Sequence[float] | None
) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, in the order of merging.

    The pairs are sorted by descending score of the concatenation, or by its id without ``scores``. Of pairs with the
    same concatenation, a longer left part comes first.
    """
    found = [
        (left, right, number)
        for number, token in enumerate(tokens)
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in vocabulary and (right := token[cut:]) in vocabulary
    ]
    if scores is not None:
        found.sort(key=lambda merge: (scores[merge[2]], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in found]
