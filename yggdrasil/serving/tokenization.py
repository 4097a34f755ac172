"""Thread-safe tokenization and detokenization for one decoder."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from yggdrasil.arguments import check_text
from yggdrasil.checkpoints.token_bytes import TokenBytes
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import apply_template
from yggdrasil.serving.errors import Fault, context_fault
from yggdrasil.serving.request_fields import ChatMessage, Tool

# Fill-in-the-middle tokens (prefix, suffix, middle), by model family.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, GPT
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)


def infill_marks(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """Return the ids of the fill-in-the-middle tokens (prefix, suffix, middle); None if the tokenizer has none."""
    vocabulary = tokenizer.get_vocab()
    for marks in _MARKS:
        if all(mark in vocabulary for mark in marks):
            first, second, third = (vocabulary[mark] for mark in marks)
            return first, second, third
    return None


_SPACE = "▁"  # SentencePiece's symbol of a space
_LETTERS = 32  # characters per token of the context: shorter texts are tokenized without a prior size check
# Parameters of transformers' ``apply_chat_template``, which are not template variables.
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
_BEFORE = "☺"  # a character that no tokenizer merges with the following text


class Texts:
    """Tokenizer of a decoder, with checks of prompts against the context length."""

    def __init__(self, decoder: Decoder) -> None:
        self.tokenizer = decoder.tokenizer
        self.limit = decoder.assembly.engine.max_length
        self._decoder = decoder
        self._lock = Lock()
        self._token_bytes = TokenBytes(self.tokenizer, self.tokenizer.backend_tokenizer)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokenise a text of any length; any thread may call it.

        Args:
            special: whether the tokenizer's special tokens, such as BOS, are added.

        Raises:
            YggdrasilError: ``text`` is not valid Unicode.
        """
        check_text("the text", text)
        (found,) = self.tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=special)
        return list(found.ids)

    def check_size(self, texts: Sequence[str]) -> None:
        """Reject a very long prompt before all of it is tokenised.

        Prompts of at most 32 characters per token of the context are not checked.

        Raises:
            Fault: a prefix of the concatenated ``texts`` has more tokens than the context.
        """
        if sum(map(len, texts)) <= _LETTERS * self.limit:
            return
        whole = "\n".join(texts)
        size, least = _LETTERS * self.limit // 2, self.limit + 2 * len(texts)  # merges at boundaries
        while size < len(whole):
            found = len(self.encode(whole[:size], special=False))
            if found > least:
                raise context_fault(found - 2 * len(texts), self.limit, is_whole=False)
            size *= 2

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another text: without BOS or an added leading space."""
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
        """Tokenise a chat in the model's chat template, up to the point at which generation begins.

        Args:
            continues: whether the last message stays open, so that the answer continues it.
            variables: further template variables.

        Raises:
            Fault: the chat is far longer than the context, or ``variables`` has a reserved name.
            YggdrasilError: the chat template fails on these messages.
        """
        functions = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
        wrong = _TAKEN.intersection(variables or ())
        if wrong:
            raise Fault(400, f"chat_template_kwargs cannot set {min(wrong)}", param="chat_template_kwargs")
        self.check_size([message["content"] for message in messages])
        with self._lock:
            return apply_template(self.tokenizer, messages, functions, continues=continues, variables=variables)

    def check(self, tokens: Sequence[int]) -> list[int]:
        """Return ``tokens``, token ids of a prompt, as a list of int that the decoder can decode.

        Raises:
            Fault: the prompt is too long for the context.
            YggdrasilError: the prompt is empty or has an id outside the vocabulary.
        """
        if len(tokens) >= self.limit:
            raise context_fault(len(tokens), self.limit)
        return self._decoder.encode(tokens)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ``tokens``.

        Args:
            skip_special: whether special tokens are left out.

        Raises:
            YggdrasilError: an id is outside the vocabulary.
        """
        size = self._decoder.assembly.target.call.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise YggdrasilError(f"there is no token {wrong}: the vocabulary ends at {size - 1}")
        with self._lock:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that the token id ``token`` adds to a text. They may be part of a UTF-8 character."""
        with self._lock:
            return self._token_bytes(token)

    def token_text(self, token: int) -> str:
        r"""Return the text of one token. Incomplete UTF-8 is written as ``bytes:\xNN``, as OpenAI's API does."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def turns_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return chat messages as dictionaries for chat templates.

    The keys are role ("developer" becomes "system") and content, and, where the message has them, name, tool_call_id
    and tool_calls. The arguments of tool calls are parsed from JSON; invalid JSON stays text.

    Raises:
        Fault: a message has neither content nor tool calls.
        YggdrasilError: a text is not valid Unicode.
    """
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
