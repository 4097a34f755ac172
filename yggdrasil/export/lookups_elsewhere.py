"""What the look-ups of vLLM and SGLang draft, played over recorded text as those of llama-server are."""

from collections import Counter
from collections.abc import Sequence

from yggdrasil.export.lookups import Occurrences


class PromptLookUp:
    """vLLM's ``ngram``: the ``draft`` tokens behind the first place of the longest last n-gram seen before."""

    def __init__(self, least: int, most: int, draft: int) -> None:
        self._sizes, self._draft = range(most, least - 1, -1), draft

    def begin(self, prompt: Sequence[int]) -> None:
        self._places = {size: Occurrences(size) for size in self._sizes}

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        for size in self._sizes:
            starts = self._places[size].of_end(text)
            if len(starts) > 1:
                return text[starts[0] + size : starts[0] + size + self._draft]
        return []

    def settle(self, drafted: int, accepted: int) -> None:
        pass


class SuffixDecoding:
    """vLLM's ``suffix``, by the request's own text: the likeliest path behind each matched length, the best of them.

    A path goes on with the commonest next token while its share of the places is at least ``least_share``, for at most
    ``factor`` times the matched tokens and ``most`` in all. Answers to earlier requests are not played.
    """

    def __init__(self, most: int, factor: float, least_share: float, tree_depth: int) -> None:
        self._most, self._factor, self._least, self._depth = most, factor, least_share, tree_depth

    def begin(self, prompt: Sequence[int]) -> None:
        self._followed: dict[int, list[int]] = {}
        self._known = 0

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        for place in range(self._known, len(text) - 1):  # places of each token that has a continuation
            self._followed.setdefault(text[place], []).append(place)
        self._known = max(self._known, len(text) - 1)
        best: tuple[float, Sequence[int]] = (0.0, [])
        places, matched = list(self._followed.get(text[-1], [])), 1
        while places and matched < self._depth:
            length = min(self._most, int(self._factor * matched), self._depth - matched)
            best = max(best, self._path(text, places, length), key=lambda found: found[0])
            matched += 1
            if matched > len(text):
                break
            wanted = text[-matched]
            places = [place for place in places if place - matched + 1 >= 0 and text[place - matched + 1] == wanted]
        return best[1]

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def _path(self, text: Sequence[int], places: Sequence[int], length: int) -> tuple[float, Sequence[int]]:
        """What follows most often behind ``places``, and the sum of its tokens' shares."""
        whole, score, path, here = len(places), 0.0, list[int](), list(places)
        for step in range(1, length + 1):
            following = Counter(text[place + step] for place in here if place + step < len(text))
            if not following:
                break
            token, count = following.most_common(1)[0]
            if count / whole < self._least:
                break
            path.append(token)
            score += count / whole
            here = [place for place in here if place + step < len(text) and text[place + step] == token]
        return score, path


class TrieChain:
    """SGLang's ``NGRAM`` without branches: what followed the longest known suffix the last time, within the trie."""

    def __init__(self, draft: int, trie_depth: int) -> None:
        self._draft, self._depth = draft, trie_depth

    def begin(self, prompt: Sequence[int]) -> None:
        self._places: dict[int, list[int]] = {}
        self._known = 0

    def draft(self, text: Sequence[int]) -> Sequence[int]:
        for place in range(self._known, len(text) - 1):
            self._places.setdefault(text[place], []).append(place)
        self._known = max(self._known, len(text) - 1)
        longest, where = 0, -1
        for place in reversed(self._places.get(text[-1], [])):
            matched = self._matched(text, place)
            if matched > longest:
                longest, where = matched, place
        return text[where + 1 : where + 1 + min(self._draft, self._depth - longest)] if longest else []

    def settle(self, drafted: int, accepted: int) -> None:
        pass

    def _matched(self, text: Sequence[int], place: int) -> int:
        """How many tokens up to ``place`` are those at the end of ``text``; room for one more in the trie is kept."""
        most = min(self._depth - 1, place + 1)
        return next((n for n in range(1, most) if text[place - n] != text[-1 - n]), most)
