"""Text to tokens and back, for one decoder. Every thread may ask; one is served at a time."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from threading import Lock
from typing import Any

from tokenizers.decoders import ByteLevel
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelInput

from yggdrasil.arguments import check_text
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import apply_template
from yggdrasil.serving.errors import Fault, context_fault
from yggdrasil.serving.request_fields import ChatMessage, Tool

# (before the beginning, before what follows, before the middle), by family.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, GPT
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)


def infill_marks(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """The three tokens; None where the tokenizer has none."""
    vocabulary = tokenizer.get_vocab()
    for marks in _MARKS:
        if all(mark in vocabulary for mark in marks):
            first, second, third = (vocabulary[mark] for mark in marks)
            return first, second, third
    return None


_SPACE = "▁"  # as SentencePiece writes it
_LETTERS = 32  # a text of fewer for each token that the context holds is tokenized whole at once
# What transformers' ``apply_chat_template`` takes under these names is not for the template.
_TAKEN = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "options",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
    "turns",
}
_BEFORE = "☺"  # what no tokenizer joins with what follows


class Texts:
    """The decoder's tokenizer, and what fits its model."""

    def __init__(self, decoder: Decoder) -> None:
        self.tokenizer = decoder.tokenizer
        self.limit = decoder.assembly.engine.max_length
        self._decoder = decoder
        self._lock = Lock()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokenize a text of any length; YggdrasilError if it is not valid Unicode.

        Takes no lock: the tokenizer is not changed, and tokenizing releases the GIL.
        """
        check_text("the text", text)
        (found,) = self.tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=special)
        return list(found.ids)

    def check_size(self, texts: Sequence[str]) -> None:
        """Refuse a prompt made of ``texts`` by its beginning, where that alone is too long; a short one is not read.

        Raises:
            Fault: it has more tokens than the context holds.
        """
        if sum(map(len, texts)) <= _LETTERS * self.limit:
            return
        whole = "\n".join(texts)
        size, least = _LETTERS * self.limit // 2, self.limit + 2 * len(texts)  # joints may be tokens less than here
        while size < len(whole):
            found = len(self.encode(whole[:size], special=False))
            if found > least:
                raise context_fault(found - 2 * len(texts), self.limit, is_whole=False)
            size *= 2

    def encode_behind(self, text: str) -> list[int]:
        """Tokens of a text that goes on from another: without the space that some tokenizers put before any."""
        before = self.encode(_BEFORE, special=False)
        if not "".join(self.tokenizer.convert_ids_to_tokens(before)).startswith(_SPACE):
            return self.encode(text, special=False)
        return self.encode(_BEFORE + text, special=False)[len(before) :]

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool] | None = None,
        *,
        continues: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a chat in the model's own template, up to where the answer begins, or behind what there is of it.

        Raises:
            Fault: it is far longer than the context, or ``variables`` has a name that the template cannot be given.
            YggdrasilError: as ``apply_template``.
        """
        functions = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
        wrong = _TAKEN.intersection(variables or ())
        if wrong:
            raise Fault(400, f"chat_template_kwargs cannot set {min(wrong)}", param="chat_template_kwargs")
        self.check_size([message["content"] for message in messages])
        with self._lock:
            return apply_template(self.tokenizer, messages, functions, continues=continues, variables=variables)

    def check(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the decoder takes as a prompt.

        Raises:
            Fault: there are too many.
            YggdrasilError: none, or one that the vocabulary lacks.
        """
        if len(tokens) >= self.limit:
            raise context_fault(len(tokens), self.limit)
        return self._decoder.encode(tokens)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of tokens; YggdrasilError where the vocabulary lacks one."""
        size = self._decoder.assembly.target.call.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise YggdrasilError(f"there is no token {wrong}: the vocabulary ends at {size - 1}")
        with self._lock:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text; it may be a part of a character."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        if isinstance(name, str):
            if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
                return bytes.fromhex(name[3:5])
            if self._bytes_of and all(character in self._bytes_of for character in name):
                return bytes(self._bytes_of[character] for character in name)
        return self._behind_itself(token).encode()

    def _behind_itself(self, token: int) -> str:
        """With its space: some decoders cut it off where nothing comes before."""
        decode = partial(self.tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
        with self._lock:
            once, twice = str(decode([token])), str(decode([token, token]))
        return twice[len(once) :] if twice.startswith(once) else once

    def token_text(self, token: int) -> str:
        """The text of one token; bytes that are no whole character are written ``bytes:\\xNN``, as OpenAI does."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @cached_property
    def _bytes_of(self) -> dict[str, int]:
        """The byte that each character of a byte-level vocabulary stands for; empty for other vocabularies."""
        if not isinstance(self.tokenizer.backend_tokenizer.decoder, ByteLevel):
            return {}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        assert set(letters) == set(ByteLevelInput.alphabet())
        return letters


def turns_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them."""
    return [_turn(number, message) for number, message in enumerate(messages)]


def _turn(number: int, message: ChatMessage) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise Fault(400, f"message {number + 1} has no content", param=f"messages.{number}.content")
    check_text(f"message {number + 1}", message.text)
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    if message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return turn
