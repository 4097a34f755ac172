"""Text of tokens as they come, behind the text that they go on from."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_FARTHEST = 16  # tokens before, in which a letter is looked for


class Pieces:
    """Pieces of text that make up what the tokens add to the text ``before`` them.

    A piece ends with a whole character. Where later bytes belong to none and would change those before, too (a decoder
    that falls back to bytes takes all in a row as one), what was told stands and they are replacement characters.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, before: Sequence[int] = ()) -> None:
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
        """Text of the tokens that no piece has told, if there are to be no more."""
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
