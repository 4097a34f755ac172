"""Choose the next token of a request, given its committed tokens and the target's logits.

Plain decoding and all acceptance rules on the host use this class, so they agree by construction. Steps that accept on
the device choose by argmax (``engine/targets/steps.py``) or compute the same scores (``tensor_sampling.py``).

Dims: V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.acceptance.coins import Choice, Coins, FloatArray, Purpose, SeededCoins, best_of
from yggdrasil.acceptance.grammar import Grammar
from yggdrasil.acceptance.processors import Processors, completing_tokens
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.errors import YggdrasilError


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one generated token, from the unprocessed logits at temperature 1."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # (token, log-probability) of the most probable tokens, highest first


class Sampler:
    """Sampling state of one request: its prompt, committed tokens, log-probabilities and random numbers."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        processors: Processors,
        coins: SeededCoins,
        capacity: int,
        *,
        eos: frozenset[int] = frozenset(),
        grammar: Grammar | None = None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """``bad_words`` limit only ``tree_bits``; ``capacity`` is the most tokens of the text and a tree's path."""
        self.params = params
        self.grammar = grammar
        self._bad_words = bad_words
        self.tokens: list[int] = []  # generated so far
        self.logprobs: list[TokenLogprobs] = []
        self._processors = processors
        self._coins = coins
        self._draws = not params.is_greedy and params.typical_p == 1.0  # first try to draw by one native call
        self._eos = eos
        self._length = len(prompt)
        # [1, capacity]: the text, followed by a path of the tree while ``scores`` runs.
        self._ids = torch.zeros(1, capacity, dtype=torch.int64)
        self._ids[0, : len(prompt)] = torch.tensor(list(prompt))
        self._text = self._ids[0].numpy()  # the same memory: to write one number through PyTorch takes 40 microseconds

    @property
    def position(self) -> int:
        """Index of the next token in the text, prompt included."""
        return self._length

    @property
    def has_ended(self) -> bool:
        """Whether the last generated token is an end-of-text token."""
        return bool(self.tokens) and self.tokens[-1] in self._eos

    def ends(self, token: int) -> bool:
        """Return whether ``token`` is an end-of-text token."""
        return token in self._eos

    def coins(self, purpose: Purpose) -> Coins:
        """Return the random decisions for the next token, which begin again in every call.

        ``purpose`` is "target" for the target's choices, "draft" for sampled drafts.
        """
        return self._coins.at(self._length, purpose)

    def choose(self, row: Tensor) -> Choice:
        """Choose the token after the committed text from the target's logits ``row``, [V]; it is not committed.

        Equal calls give equal choices. The result's margin is the lead over the second best token, in logits.

        Raises:
            YggdrasilError: a score is not finite, or no token is possible.
        """
        shaped = self._shaped(row, ())
        if self._draws and (drawn := self._coins.choose(shaped, self.params, self._length)) is not None:
            return Choice(drawn.token, drawn.margin * self.params.temperature)
        scores = self._truncated(shaped).numpy()
        _check_finite(scores)
        if scores.max() == -np.inf:
            raise no_token_possible()
        if self.params.is_greedy:
            return best_of(scores.astype(np.float64))
        choice = self.coins("target").draw(scores)
        return Choice(choice.token, choice.margin * self.params.temperature)

    def scores(self, row: Tensor, tail: Sequence[int] = ()) -> Tensor:
        """Return the processed logits, [V] float32 on the CPU, of the token after the committed text and ``tail``.

        Penalties, logits processors and the grammar are applied, then, unless decoding is greedy, temperature, top-k,
        top-p, min-p and typical-p. Impossible tokens have -inf.

        Args:
            row: [V] the target's logits after the last token of ``tail``; not changed.
            tail: tokens of a tree's path that are not committed; penalties and grammar count them as text.

        Raises:
            YggdrasilError: a logits processor returned other things than scores of the row's shape.
        """
        return self._truncated(self._shaped(row, tail))

    @property
    def is_shaped(self) -> bool:
        """Whether logits are changed before temperature and truncation: by penalties, processors or the grammar."""
        return bool(self._processors.shaping) or self.grammar is not None

    def _shaped(self, row: Tensor, tail: Sequence[int]) -> Tensor:
        """Return ``row`` [V] on the CPU after penalties, logits processors and the grammar; unchanged without any."""
        if not self.is_shaped:
            return row.cpu()
        end = self._length + len(tail)
        if tail:
            self._ids[0, self._length : end] = torch.tensor(list(tail))
        ids = self._ids[:, :end]
        scores = row.to("cpu", torch.float32, copy=True)[None]
        for process in self._processors.shaping:
            scores = _checked(process, process(ids, scores), scores)
        if self.grammar is not None:
            allowed = self.grammar.mask([*self.tokens, *tail], row.shape[0])
            scores = scores.masked_fill(~allowed, float("-inf"))
        return scores[0]

    def _truncated(self, shaped: Tensor) -> Tensor:
        """Return ``shaped`` [V] as float32 scores after temperature and truncation; not changed in place."""
        scores = (shaped if self.is_shaped else shaped.to(torch.float32, copy=True))[None]
        for process in self._processors.truncating:
            scores = process(self._ids, scores)  # truncation reads no token ids
        return scores[0]

    def distribution(self, row: Tensor, tail: Sequence[int] = ()) -> FloatArray | None:
        """Return the probabilities, [V] float64, with which a token is drawn after the committed text and ``tail``.

        They are the softmax of ``scores``; with greedy decoding the best token has probability 1. The result is None if
        no token is possible, because all scores are -inf.

        Args:
            row: [V] the target's logits after the last token of ``tail``.
            tail: tokens of a tree's path that are not committed; penalties and grammar count them as text.

        Raises:
            YggdrasilError: a score is NaN or +inf.
        """
        scores = _as_array(self.scores(row, tail))
        _check_finite(scores)
        best = scores.max()
        if best == -np.inf:
            return None
        if self.params.is_greedy:
            probabilities = np.zeros_like(scores)
            probabilities[scores.argmax()] = 1.0
            return probabilities
        weights = np.exp(scores - best)
        law: FloatArray = weights / weights.sum()
        return law

    @property
    def has_masks(self) -> bool:
        """Whether the request has a grammar or bad words, so that ``tree_bits`` may forbid tokens."""
        return self.grammar is not None or bool(self._bad_words)

    def tree_bits(self, layout: Sequence[Sequence[int]], vocab_size: int) -> list[npt.NDArray[np.uint8]]:
        """Return for each row of a tree pass which tokens the grammar and the bad words allow after it.

        Args:
            layout: four columns with one entry per row: node, token, parent's row, and 1 if the row is no padding. Row
                0 is the root, the last committed token.

        Returns:
            A [ceil(V / 8)] uint8 array per row. Bit t % 8 of byte t // 8 is set if token t is allowed.
        """
        _, tokens, parents, exist = layout
        if self.grammar is not None:
            found = self.grammar.tree_bits(self.tokens, layout, vocab_size)
        else:
            found = [np.full(-(-vocab_size // 8), 255, dtype=np.uint8)] * len(tokens)
        if not self._bad_words:
            return found
        paths = [self._ids[0, : self._length].tolist()]
        for row in range(len(tokens)):
            if row:
                paths.append([*paths[parents[row]], tokens[row]])
            if exist[row]:
                found[row] = found[row].copy()
                for token in completing_tokens(self._bad_words, paths[row]):
                    found[row][token >> 3] &= 255 ^ (1 << (token & 7))
        return found

    def can_choose(self, bits: npt.NDArray[np.uint8]) -> bool:
        """Return whether a token of ``bits``, an entry of ``tree_bits``, may follow the committed text.

        End tokens may not follow before ``min_new_tokens`` tokens.
        """
        if len(self.tokens) >= self.params.min_new_tokens:
            return bool(bits.any())
        allowed = bits.copy()
        for token in self._eos:
            allowed[token >> 3] &= 255 ^ (1 << (token & 7))
        return bool(allowed.any())

    def push(self, token: int, row: Tensor) -> None:
        """Append ``token`` to the committed text, and record its log-probabilities if the request wants them.

        The log-probabilities follow from ``row`` [V], the target's unprocessed logits after the text before ``token``.
        A token that the grammar forbids is not detected here.
        """
        self.note(token, None if self.params.logprobs is None else logprobs_of(token, row, self.params.logprobs))

    def note(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append ``token``, which a step on the device chose, to the committed text.

        ``logprobs`` are its log-probabilities, or None if the request wants none.
        """
        self._text[self._length] = token
        self._length += 1
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)


def _checked(process: object, given: object, before: Tensor) -> Tensor:
    """Return the scores ``given`` by a processor in the dtype of ``before``.

    Raises:
        YggdrasilError: they have another shape than ``before``.
    """
    if not isinstance(given, Tensor) or given.shape != before.shape:
        kind = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        name = getattr(process, "__name__", type(process).__name__)
        raise YggdrasilError(f"the logits processor {name} returned {kind}, not scores of shape {tuple(before.shape)}")
    return given.to(before.dtype)


def _check_finite(scores: npt.NDArray[np.floating[Any]]) -> None:
    """Raise YggdrasilError if a score is NaN or +infinity; -infinity marks an impossible token."""
    # The comparison is false for NaN too.
    if not scores.max() < np.inf:
        raise YggdrasilError(
            "the scores to choose from are not finite (NaN or infinity): the target's weights are damaged or overflow "
            "in this dtype (decode with --dtype float32), or a logits processor or bias is at fault"
        )


def _as_array(scores: Tensor) -> FloatArray:
    array: FloatArray = scores.double().numpy()
    return array


def logprobs_of(token: int, row: Tensor, count: int) -> TokenLogprobs:
    """Return the log-probabilities of ``token`` and of the ``count`` most probable tokens, highest first.

    Args:
        row: [V] unprocessed logits from which ``token`` was chosen.
    """
    values = row.to("cpu", torch.float32).log_softmax(-1)
    best = values.topk(min(count, values.shape[0]))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(token, float(values[token]), top)


def read_logprobs(
    words: Tensor, width: int, num_top: int, rows: Sequence[int], tokens: Sequence[int], count: int
) -> list[TokenLogprobs]:
    """Unpack the log-probabilities that ``logprob_words`` has packed, and return those of each committed token.

    Args:
        words: [width * (1 + 2 num_top)] int64, in the memory of the host.
        width: rows of the pass.
        num_top: top log-probabilities packed per row.
        rows: rows after which tokens were committed.
        tokens: the committed tokens, one per entry of ``rows``.
        count: top log-probabilities to return per token, at most ``num_top``.
    """
    size = width * num_top
    values = words[: width + size].view(torch.float64)
    own, top = values[:width].tolist(), values[width:].view(width, num_top)
    best = words[width + size : width + 2 * size].view(width, num_top)
    return [
        TokenLogprobs(token, own[row], list(zip(best[row, :count].tolist(), top[row, :count].tolist(), strict=True)))
        for row, token in zip(rows, tokens, strict=True)
    ]


def no_token_possible() -> YggdrasilError:
    """Return the error to raise if a request's constraint, bad words and processors together forbid every token."""
    return YggdrasilError(
        "no token may follow: the constraint, bad_words, min_new_tokens and logits processors together forbid all; "
        "relax one"
    )
