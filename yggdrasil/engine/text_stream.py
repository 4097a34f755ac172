"""Text of a growing token sequence, and where it must end: exactly where plain decoding ends."""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from typing import Literal, NamedTuple

import tokenizers
from tokenizers.decoders import DecodeStream

from yggdrasil.checkpoints.tokenizer import Tokenizer

_FARTHEST = 16  # tokens before, in which a letter is looked for


class IncrementalDetokenizer:
    """Text of tokens, piece by piece, as they come behind the text ``before`` them.

    A piece ends with a whole character. Where later bytes belong to none and would change those before, too (a decoder
    that falls back to bytes takes all in a row as one), what was told stands and they are replacement characters.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special: bool, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._before = self._told = self._last_text(before)  # what the next piece follows
        self._held: list[int] = []  # tokens that no piece has told yet
        self._begin()

    def _begin(self) -> None:
        self._stream = DecodeStream(ids=self._told, skip_special_tokens=self._skip_special)

    def step(self, tokens: list[int]) -> str:
        """The piece that more tokens complete, which may be none."""
        self._held += tokens
        try:
            piece = self._stream.step(self._tokenizer, tokens) or ""
        except Exception:  # noqa: BLE001  (it has no narrower one for text that would have to change)
            piece = self.held()
            self._told, self._held = self._held, []
            self._begin()
            return piece
        if piece:
            self._told, self._held = self._held, []
        return piece

    def held(self) -> str:
        """Text of the tokens that is in no piece yet, if no more tokens follow."""
        return self._behind(self._told, self._held)

    def whole(self, tokens: Sequence[int]) -> str:
        """All text of these tokens, if they are all that there are."""
        return self._behind(self._before, tokens)

    def _behind(self, told: list[int], tokens: Sequence[int]) -> str:
        before, whole = self._decode(told), self._decode([*told, *tokens])
        return whole[len(before) :] if whole.startswith(before) else self._decode(tokens)

    def _last_text(self, tokens: Sequence[int]) -> list[int]:
        """As few of the last tokens as have text that ends with a whole character, or all: some decoders cut off a
        space that nothing comes before.
        """
        for count in range(1, min(len(tokens), _FARTHEST) + 1):
            last = list(tokens[-count:])
            text = self._decode(last)
            if (text or count == len(tokens)) and not text.endswith("�"):
                return last
        return []

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=self._skip_special)


FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]


class TextStream:
    """Decodes tokens as they become certain and looks for the end after each one.

    A block of accepted tokens is fed one by one, so an end inside the block is seen at the same token as in plain
    decoding. Special tokens show in ``text`` with ``keeps_special`` alone, but stop strings are always looked for
    where they do. Text that could still become part of a stop string is held back until it is decided. ``before``
    are tokens whose text it goes on from; without them it begins as a text of its own does.
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
        self.is_read = True  # while it grows; else there is none before its end
        self.most_unread = inf  # iterations in a row, where it is not
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still be taken."""
        return self._max_new_tokens - len(self.tokens)

    def push(self, tokens: Sequence[int]) -> int:
        """Take certain tokens until the text ends; returns how many were taken."""
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
        """Where no stop string can end the text, all are decoded in one go, or not before the end."""
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
        """New text that is final: all of it once the end was found, else all but a possible start of a stop string."""
        end = len(self.text)
        if self.finish_reason is None and self._stop is not None:
            end = self._stop.decided()
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece

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
        whole = self._pieces.whole(tokens)
        self.text = whole if whole.startswith(self.text) else self.text + self._pieces.held()


class _Found(NamedTuple):
    """Where a stop string stands in the text that is shown."""

    start: int
    end: int


class _StopStrings:
    """Looks for stop strings in the text with its special tokens, and says where that is in the text without."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], before: Sequence[int]) -> None:
        self._pieces = IncrementalDetokenizer(tokenizer.backend_tokenizer, skip_special=False, before=before)
        self._stop = list(stop)
        self._longest = max(map(len, stop))
        self._text = ""  # special tokens included
        self._ends: list[tuple[int, int]] = [(0, 0)]  # after each token: of this text, of the shown one

    def push(self, token: int, shown: int) -> _Found | None:
        """One more token, with which the shown text is ``shown`` long; the stop string that is complete now."""
        start = max(0, len(self._text) - self._longest + 1)
        self._text += self._pieces.step([token])
        self._ends.append((len(self._text), shown))
        places = [(place, text) for text in self._stop if (place := self._text.find(text, start)) >= 0]
        if not places:
            return None
        place, text = min(places)
        return _Found(self._shown(place), self._shown(place + len(text)))

    def decided(self) -> int:
        """Length of the shown text that no stop string can begin in any more."""
        for size in range(min(self._longest - 1, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(text.startswith(tail) for text in self._stop):
                return self._shown(len(self._text) - size)
        return self._ends[-1][1]

    def _shown(self, place: int) -> int:
        """The place in the shown text: as far before the end of its own token, within what that shows.

        From the end, since text that nothing shown comes before may lack its first space.
        """
        index = bisect_right(self._ends, place, key=lambda ends: ends[0]) - 1
        (_, least), (after, most) = self._ends[index], self._ends[min(index + 1, len(self._ends) - 1)]
        return max(least, most - (after - place))
