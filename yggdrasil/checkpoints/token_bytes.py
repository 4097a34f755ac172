"""The bytes that each token of a vocabulary adds to a text."""

import json
from functools import cached_property
from typing import Any

from tokenizers.decoders import ByteLevel

from yggdrasil.checkpoints.tokenizer import Tokenizer

_SPACE = "\u2581"  # SentencePiece's symbol of a space


def byte_letters() -> dict[int, str]:
    """Return GPT-2's byte-to-character table of byte-level vocabularies: printable bytes map to themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


class TokenBytes:
    """Function from a token id to the bytes that it adds to a text.

    ``backend`` is the tokenizer of the ``tokenizers`` library.
    """

    def __init__(self, tokenizer: Tokenizer, backend: Any) -> None:
        self._backend = backend
        self._added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}

    def __call__(self, token: int) -> bytes:
        """Return the bytes of ``token``, which may be part of a UTF-8 character; empty for an unknown id."""
        if token in self._added:
            return self._added[token].encode()
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        if self._bytes_of and all(character in self._bytes_of for character in name):
            return bytes(self._bytes_of[character] for character in name)
        return name.replace(_SPACE, " ").encode() if self._has_spaces else self._text_after_itself(token).encode()

    def _text_after_itself(self, token: int) -> str:
        """Return the text that a second ``token`` adds to a first; some decoders strip a text's leading space."""
        once, twice = (str(self._backend.decode(each, skip_special_tokens=False)) for each in ([token], [token, token]))
        return twice[len(once) :] if twice.startswith(once) else once

    @cached_property
    def _has_spaces(self) -> bool:
        """Return whether the decoder begins by replacing SentencePiece's symbol of a space by a space."""
        decoder = {} if self._backend.decoder is None else json.loads(self._backend.decoder.__getstate__())
        first = (decoder.get("decoders") or [{}])[0]
        return bool(first.get("type") == "Replace" and first.get("pattern") == {"String": _SPACE})

    @cached_property
    def _bytes_of(self) -> dict[str, int]:
        """Return the map from byte-level BPE characters to bytes; empty for other tokenizers."""
        if not isinstance(self._backend.decoder, ByteLevel):
            return {}
        return {letter: byte for byte, letter in byte_letters().items()}
