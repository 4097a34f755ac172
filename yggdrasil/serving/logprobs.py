"""Converts log-probabilities to OpenAI's formats, for chat completions and for completions."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.serving.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from yggdrasil.serving.tokenization import Texts


def chat_logprobs(texts: Texts, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return the ``logprobs`` object of a chat reply: one entry per token, with its bytes and its alternatives."""
    return ChatLogprobs(content=[_chat_entry(texts, entry) for entry in entries])


def _chat_entry(texts: Texts, entry: TokenLogprobs) -> ChatLogprob:
    own = _top(texts, entry.token, entry.logprob)
    return ChatLogprob(**own.model_dump(), top_logprobs=[_top(texts, *each) for each in entry.top])


def _top(texts: Texts, token: int, logprob: float) -> TopLogprob:
    return TopLogprob(token=texts.token_text(token), logprob=logprob, bytes=list(texts.token_bytes(token)))


class CompletionLogprobsWriter:
    """Builds the ``logprobs`` lists of one completion part by part, and tracks the text offset between parts."""

    def __init__(self, texts: Texts, *, has_prompt: bool = False, unshown: int = 0) -> None:
        """Create a builder at text offset ``-unshown``.

        Args:
            has_prompt: whether the first token is the prompt's first, whose log-probability is null.
            unshown: characters at the beginning of the tokens' text that the reply's text omits.
        """
        self._texts = texts
        self._offset = -unshown
        self._letters = getincrementaldecoder("utf-8")("replace")  # a token may end within a UTF-8 character
        self._is_first = has_prompt

    def write(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Return the ``logprobs`` lists of the next tokens of the completion, with one item per token.

        The lists are the tokens' texts, their log-probabilities, their alternatives (text -> log-probability, with the
        token itself) and their offsets, in characters from the start of the reply's text.
        """
        names = [self._texts.token_text(entry.token) for entry in entries]
        tops: list[dict[str, float] | None] = []
        values: list[float | None] = []
        offsets = []
        for name, entry in zip(names, entries, strict=True):
            offsets.append(max(0, self._offset))
            self._offset += len(self._letters.decode(self._texts.token_bytes(entry.token)))
            is_first, self._is_first = self._is_first, False
            values.append(None if is_first else entry.logprob)
            top = {self._texts.token_text(token): value for token, value in entry.top}
            tops.append(None if is_first else {**top, name: entry.logprob})
        return CompletionLogprobs(tokens=names, token_logprobs=values, top_logprobs=tops, text_offset=offsets)
