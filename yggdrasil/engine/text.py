"""Text of a growing token sequence, and where it must end: exactly where plain decoding ends."""

from collections.abc import Sequence
from typing import Literal

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]


class TextStream:
    """Decodes tokens as they become certain and looks for the end after each one.

    A block of accepted tokens is fed one by one, so an end inside the block is seen at the same token as in plain
    decoding. Text that could still become part of a stop string is held back until it is decided.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_tokens: frozenset[int],
        max_new_tokens: int,
        stop: Sequence[str],
        *,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._eos_tokens = eos_tokens
        self._max_new_tokens = max_new_tokens
        self._stop = [text for text in stop if text]
        self._include_stop = include_stop
        self._longest_stop = max((len(text) for text in self._stop), default=0)
        self._released = 0
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still be taken."""
        return self._max_new_tokens - len(self.tokens)

    def push(self, tokens: Sequence[int]) -> int:
        """Take certain tokens until the text ends; returns how many were taken."""
        for taken, token in enumerate(tokens):
            if self.finish_reason is not None:
                return taken
            self._push_one(token)
            if self.finish_reason is not None:
                self._flush()
        return len(tokens)

    def _push_one(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._eos_tokens:
            self.finish_reason = "eos"
            return
        before = len(self.text)
        self.text += self._stream.step(self._tokenizer, token) or ""
        if self._stop and self._find_stop(max(0, before - self._longest_stop + 1)):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._max_new_tokens:
            self.finish_reason = "length"

    def _find_stop(self, start: int) -> bool:
        found = [(place, text) for text in self._stop if (place := self.text.find(text, start)) >= 0]
        if not found:
            return False
        place, text = min(found)
        self.text = self.text[: place + len(text) if self._include_stop else place]
        return True

    def release(self) -> str:
        """New text that is final: all of it once the end was found, else all but a possible start of a stop string."""
        end = len(self.text)
        if self.finish_reason is None:
            end -= self._undecided()
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def _undecided(self) -> int:
        for size in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(text.startswith(tail) for text in self._stop):
                return size
        return 0

    def finish(self, reason: FinishReason) -> None:
        """End for a reason from outside (context full, cancelled)."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._flush()

    def _flush(self) -> None:
        """Add what was held back because a character was not whole: the text is what the tokens decode to."""
        if self.finish_reason == "stop":  # cut within the text: nothing follows
            return
        tokens = self.tokens[:-1] if self.finish_reason == "eos" else self.tokens
        whole = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if whole.startswith(self.text):
            self.text = whole
