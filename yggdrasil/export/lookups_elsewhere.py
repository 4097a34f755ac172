"""Simulations of the lookups of vLLM and SGLang, from their documentation and code."""

from collections import Counter
from collections.abc import Sequence

from yggdrasil.export.lookups import Occurrences


class PromptLookUp:
    """vLLM's ``ngram``: drafts the tokens after the first occurrence of the text's longest repeated last n-gram.

    N-grams have ``least`` to ``most`` tokens; at most ``draft`` tokens are drafted.
    """

    def __init__(self, least: int, most: int, draft: int) -> None:
        self._sizes, self._draft = range(most, least - 1, -1), draft

    def begin(self, prompt: Sequence[int]) -> None:
        self._positions = {size: Occurrences(size) for size in self._sizes}

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        for size in self._sizes:
            starts = self._positions[size].of_last_ngram(text)
            if len(starts) > 1:
                return text[starts[0] + size : starts[0] + size + self._draft]
        return []

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class SuffixDecoding:
    """vLLM's ``suffix``, over one request's text: drafts the path with the greatest sum of token shares.

    Each match length gives one path: the most frequent next token is appended while its share of all matches is at
    least ``least_share``. A path has at most ``factor`` times the matched tokens, and at most ``most``; match and path
    together have at most ``tree_depth`` tokens. Answers to earlier requests are not simulated.
    """

    def __init__(self, most: int, factor: float, least_share: float, tree_depth: int) -> None:
        self._most, self._factor, self._least, self._depth = most, factor, least_share, tree_depth

    def begin(self, prompt: Sequence[int]) -> None:
        self._followed: dict[int, list[int]] = {}
        self._known = 0

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        for position in range(self._known, len(text) - 1):  # positions of each token that has a continuation
            self._followed.setdefault(text[position], []).append(position)
        self._known = max(self._known, len(text) - 1)
        best: tuple[float, Sequence[int]] = (0.0, [])
        positions, matched = list(self._followed.get(text[-1], [])), 1
        while positions and matched < self._depth:
            length = min(self._most, int(self._factor * matched), self._depth - matched)
            best = max(best, self._path(text, positions, length), key=lambda found: found[0])
            matched += 1
            if matched > len(text):
                break
            wanted = text[-matched]
            positions = [
                position
                for position in positions
                if position - matched + 1 >= 0 and text[position - matched + 1] == wanted
            ]
        return best[1]

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def _path(self, text: Sequence[int], positions: Sequence[int], length: int) -> tuple[float, Sequence[int]]:
        """Return (sum of the tokens' shares, tokens) of the most frequent path after ``positions``."""
        whole, score, path, here = len(positions), 0.0, list[int](), list(positions)
        for step in range(1, length + 1):
            following = Counter(text[position + step] for position in here if position + step < len(text))
            if not following:
                break
            token, count = following.most_common(1)[0]
            if count / whole < self._least:
                break
            path.append(token)
            score += count / whole
            here = [position for position in here if position + step < len(text) and text[position + step] == token]
        return score, path


class TrieChain:
    """SGLang's ``NGRAM`` without branches: drafts the tokens after the last occurrence of the longest known suffix.

    At most ``draft`` tokens are drafted; suffix and draft together have at most ``trie_depth`` tokens.
    """

    def __init__(self, draft: int, trie_depth: int) -> None:
        self._draft, self._depth = draft, trie_depth

    def begin(self, prompt: Sequence[int]) -> None:
        self._positions: dict[int, list[int]] = {}
        self._known = 0

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        for position in range(self._known, len(text) - 1):
            self._positions.setdefault(text[position], []).append(position)
        self._known = max(self._known, len(text) - 1)
        longest, where = 0, -1
        for position in reversed(self._positions.get(text[-1], [])):
            matched = self._matched(text, position)
            if matched > longest:
                longest, where = matched, position
        return text[where + 1 : where + 1 + min(self._draft, self._depth - longest)] if longest else []

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def _matched(self, text: Sequence[int], position: int) -> int:
        """Return how many tokens that end at ``position`` equal the end of ``text``, at most ``trie_depth - 1``."""
        most = min(self._depth - 1, position + 1)
        return next((n for n in range(1, most) if text[position - n] != text[-1 - n]), most)
