"""Turns committed tokens into text as they arrive, and ends the text exactly where plain decoding would end it."""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from typing import Any, Literal, NamedTuple

from yggdrasil.checkpoints.tokenizer import Tokenizer

_FARTHEST = 16  # the most earlier tokens that are used as context


class IncrementalDetokenizer:
    """Detokeniser of a growing token sequence, piece by piece, after the tokens ``before``.

    A piece ends with a whole character. A byte-fallback decoder decodes consecutive bytes together, so later invalid
    bytes could change earlier characters. Returned pieces then stay as they are, and the bytes become replacement
    characters.
    """

    def __init__(self, tokenizer: Any, *, skip_special: bool, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._before = self._returned = self._last_text(before)  # tokens after which the next piece is decoded
        self._held: list[int] = []  # tokens that no returned piece includes yet
        self._begin()

    def _begin(self) -> None:
        self._ids = list(self._returned)  # tokens that are decoded together for the next piece
        self._prefix, self._prefix_size = "", 0  # text of the first ``_prefix_size`` of ``_ids``, already returned

    def step(self, tokens: list[int]) -> str:
        """Add token ids, and return the text that they complete; "" while the last character is incomplete.

        Tokens of an incomplete character are held until a later call completes it. The concatenated results of calls do
        not depend on how the tokens are divided among the calls.
        """
        # A decoder with byte fallback replaces all bytes of a run in which one is wrong, so the run's end decides.
        if len(tokens) > 1 and "�" in self._decode([*self._ids, *tokens]):
            return "".join(self.step([token]) for token in tokens)
        self._held += tokens
        piece = self._stream_step(tokens)
        if piece is None:  # an earlier piece would have to change
            piece = self.held()
            self._returned, self._held = self._held, []
            self._begin()
            return piece
        if piece:
            self._returned, self._held = self._held, []
        return piece

    def _stream_step(self, tokens: list[int]) -> str | None:
        """Add token ids and return the text that they complete, as ``tokenizers.decoders.DecodeStream`` does.

        The text is "" while the last character is incomplete, and None if text that was returned would have to change.
        """
        if not self._prefix and self._ids and not (text := self._decode(self._ids)).endswith("�"):
            self._prefix, self._prefix_size = text, len(self._ids)
        self._ids += tokens
        text = self._decode(self._ids)
        if text.endswith("�") or len(text.encode()) <= len(self._prefix.encode()):
            return ""
        if not text.startswith(self._prefix):
            return None
        piece = text[len(self._prefix) :]
        self._ids, self._prefix_size = self._ids[self._prefix_size :], len(self._ids) - self._prefix_size
        self._prefix = self._decode(self._ids)
        return piece

    def held(self) -> str:
        """Return the text of the tokens that no returned piece includes yet, as if no more followed."""
        return self._text_after(self._returned, self._held)

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text of all ``tokens`` decoded together, as a continuation of the tokens ``before``."""
        return self._text_after(self._before, tokens)

    def _text_after(self, context: list[int], tokens: Sequence[int]) -> str:
        before, whole = self._decode(context), self._decode([*context, *tokens])
        return whole[len(before) :] if whole.startswith(before) else self._decode(tokens)

    def _last_text(self, tokens: Sequence[int]) -> list[int]:
        """Return the fewest last tokens whose text is not empty and ends with a whole character, or an empty list.

        They are the context of later pieces, because some decoders strip the leading space of a text.
        """
        for count in range(1, min(len(tokens), _FARTHEST) + 1):
            last = list(tokens[-count:])
            text = self._decode(last)
            if (text or count == len(tokens)) and not text.endswith("�"):
                return last
        return []

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=self._skip_special))


FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]


class TextStream:
    """Text of one request: detokenises committed tokens, and checks after each one whether the text ends.

    In a block of accepted tokens the end is found at the same token as in plain decoding. Special tokens are in
    ``text`` only with ``keeps_special``, but stop strings are always matched against the text with special tokens. Text
    that may be the start of a stop string is held back. ``before`` are the tokens whose text is continued; if empty, a
    new text begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_tokens: frozenset[int],
        max_new_tokens: int,
        stop: Sequence[str],
        *,
        include_stop: bool = False,
        before: Sequence[int] = (),
        keeps_special: bool = False,
    ) -> None:
        self._pieces = IncrementalDetokenizer(
            tokenizer.backend_tokenizer, skip_special=not keeps_special, before=before
        )
        self._eos_tokens = eos_tokens
        self._max_new_tokens = max_new_tokens
        self._stop = _StopStrings(tokenizer, stop, before) if stop else None
        self._include_stop = include_stop
        self._released = 0
        self.is_read = True  # whether ``text`` is read before the end; if not, it is only built at the end
        self.most_unread = inf  # the most iterations between two reads, if not is_read
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be added before ``max_new_tokens`` is reached."""
        return self._max_new_tokens - len(self.tokens)

    def push(self, tokens: Sequence[int]) -> int:
        """Add committed token ids until the text ends, and return how many were added; later ones are dropped.

        The text ends after an end token, a stop string or ``max_new_tokens`` tokens, which sets ``finish_reason``. The
        end token is added and counted, but its own text is not in ``text``. After the end, 0 is returned.
        """
        if self._stop is None and self.finish_reason is None:
            return self._push_block(tokens)
        for taken, token in enumerate(tokens):
            if self.finish_reason is not None:
                return taken
            self._push_one(token)
            if self.finish_reason is not None:
                self._flush()
        return len(tokens)

    def _push_block(self, tokens: Sequence[int]) -> int:
        """Add tokens without stop strings: detokenise them in one call, or at the end if ``is_read`` is False."""
        block = list(tokens[: self._max_new_tokens - len(self.tokens)])
        end = None
        if not self._eos_tokens.isdisjoint(block):
            end = next(place for place, token in enumerate(block) if token in self._eos_tokens)
            self.finish_reason = "eos"
        self.tokens += block if end is None else block[: end + 1]
        if self.is_read and (shown := block[:end]):
            self.text += self._pieces.step(shown)
        if end is None and len(self.tokens) >= self._max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self._flush()
        return len(block) if end is None else end + 1

    def _push_one(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._eos_tokens:
            self.finish_reason = "eos"
            return
        self.text += self._pieces.step([token])
        found = self._stop.push(token, len(self.text)) if self._stop is not None else None
        if found is not None:
            self.text = self.text[: found.end if self._include_stop else found.start]
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._max_new_tokens:
            self.finish_reason = "length"

    def release(self) -> str:
        """Return the text since the last call that no later token can change; "" if there is none.

        Before the text ends, a possible start of a stop string is held back.
        """
        end = len(self.text)
        if self.finish_reason is None and self._stop is not None:
            end = self._stop.decided()
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def finish(self, reason: FinishReason) -> None:
        """End the text for a reason other than its tokens: "context" (the context is full) or "cancelled".

        Nothing happens if the text has already ended.
        """
        if self.finish_reason is None:
            self.finish_reason = reason
            self._flush()

    def _flush(self) -> None:
        """Add the text of an incomplete last character, so that the text is what the tokens decode to."""
        if self.finish_reason == "stop":  # the text was cut: nothing follows
            return
        tokens = self.tokens[:-1] if self.finish_reason == "eos" else self.tokens
        whole = self._pieces.whole(tokens)
        self.text = whole if whole.startswith(self.text) else self.text + self._pieces.held()


class _Found(NamedTuple):
    """The range of a stop string in the visible text, in characters."""

    start: int
    end: int


class _StopStrings:
    """Matcher of stop strings in the text with special tokens, with positions mapped to the visible text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], before: Sequence[int]) -> None:
        self._pieces = IncrementalDetokenizer(tokenizer.backend_tokenizer, skip_special=False, before=before)
        self._stop = list(stop)
        self._longest = max(map(len, stop))
        self._text = ""  # with special tokens
        self._ends: list[tuple[int, int]] = [(0, 0)]  # per token: (length of this text, of the visible text) after it

    def push(self, token: int, shown: int) -> _Found | None:
        """Add a token to the searched text.

        Return the range of a stop string in the visible text if one is complete, else None. ``shown`` is the length in
        characters of the visible text (without hidden special tokens) after this token.
        """
        start = max(0, len(self._text) - self._longest + 1)
        self._text += self._pieces.step([token])
        self._ends.append((len(self._text), shown))
        places = [(place, text) for text in self._stop if (place := self._text.find(text, start)) >= 0]
        if not places:
            return None
        place, text = min(places)
        return _Found(self._shown(place), self._shown(place + len(text)))

    def decided(self) -> int:
        """Return the length in characters of the visible text's part in which no stop string can begin any more."""
        for size in range(min(self._longest - 1, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(text.startswith(tail) for text in self._stop):
                return self._shown(len(self._text) - size)
        return self._ends[-1][1]

    def _shown(self, place: int) -> int:
        """Map a position to the visible text, by its distance from the end of its token.

        The distance is from the end, because the first visible token may lack its leading space.
        """
        index = bisect_right(self._ends, place, key=lambda ends: ends[0]) - 1
        (_, least), (after, most) = self._ends[index], self._ends[min(index + 1, len(self._ends) - 1)]
        return max(least, most - (after - place))
