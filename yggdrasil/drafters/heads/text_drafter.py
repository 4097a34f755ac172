"""Base class of drafters whose head has a KV cache: accepted tokens, cached rows and hidden states still to be read."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from yggdrasil.drafters.level_drafter import LevelDrafter
from yggdrasil.drafters.protocol import Capabilities, DraftSteps
from yggdrasil.native import is_native
from yggdrasil.native.direct import Mailbox, direct, native_state_rows
from yggdrasil.runtime.layer_rows import LayerRows
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree


class WaitingStates:
    """A queue of the target's hidden states that the head has not read yet.

    Hidden states of ``layers`` are concatenated to rows of S channels and stored in ``buffer`` [n, S], which the head's
    step reads. Rows that exceed the buffer, such as a prompt's, are stored separately until the head drafts.
    """

    def __init__(self, layers: Sequence[int], buffer: Tensor) -> None:
        self._layers, self._buffer = list(layers), buffer
        self._early: list[Tensor] = []  # [.., S] each, earlier rows than those in the buffer
        self._here = 0  # unread rows in the buffer
        self._last = 0  # index of the buffer's row that was read last
        self._keep: Callable[[], int] | None = None
        if is_native() and buffer.device.type == "cpu":
            self._mail = Mailbox(2 + len(self._layers) + len(buffer))
            self._rows = native_state_rows(buffer, len(self._layers), self._mail.tensor)
            self._keep = direct("keep", self._rows)

    def __len__(self) -> int:
        return self._here + sum(map(len, self._early))

    def clear(self) -> None:
        """Remove all queued hidden states."""
        self._early, self._here = [], 0

    def cut(self, count: int) -> None:
        """Keep only the first ``count`` queued hidden states."""
        whole, self._early = self._early, []
        for part in whole:
            self._early += [part[:count]] if count else []
            count -= min(count, len(part))
        self._here = min(self._here, count)

    def add(self, hidden: Mapping[int, Tensor], count: int) -> None:
        """Append the hidden states that arrived with ``count`` tokens to the queue.

        Args:
            hidden: layer -> [count, H]; row i is the hidden state of the token before the i-th of these tokens.
        """
        if self._here and self._here + count > len(self._buffer):
            self._early.append(self._buffer[: self._here].clone())
            self._here = 0
        if count > len(self._buffer):
            self._early.append(self._beside_each_other(hidden))
            return
        if not self._added_natively(hidden):
            self._buffer[self._here : self._here + count] = self._beside_each_other(hidden)
        self._here += count

    def take(self, states: Tensor) -> None:
        """Write ``states`` [n, S] to the start of the buffer, within a CUDA graph that reads them there.

        The caller must call ``note_taken`` once the number of accepted rows among ``states`` is known.
        """
        self._buffer[: len(states)].copy_(states)

    def note_taken(self, count: int) -> None:
        """Note that a step has read the first ``count`` rows that ``take`` wrote. The queue must be empty."""
        self._last = count - 1

    def requeue_last(self) -> None:
        """Put the hidden state that was read last back into the empty queue, for the next head draft."""
        if self._last:
            self._buffer[0] = self._buffer[self._last]
        self._here = 1

    def chunks(self) -> Iterator[int]:
        """Empty the queue part by part: write the next rows to the start of the buffer, and yield their number.

        The caller must read these rows before it takes the next number. An empty queue yields 0 once.
        """
        if self._early:
            whole = torch.cat([*self._early, self._buffer[: self._here]])
            self.clear()
            for part in whole.split(len(self._buffer)):
                self._buffer[: len(part)] = part
                self._last = len(part) - 1
                yield len(part)
            return
        count, self._here = self._here, 0
        self._last = count - 1
        yield count

    def _beside_each_other(self, hidden: Mapping[int, Tensor]) -> Tensor:
        return torch.cat([hidden[layer] for layer in self._layers], dim=-1)

    def _added_natively(self, hidden: Mapping[int, Tensor]) -> bool:
        """Copy the rows into the buffer with one native call; return whether that was possible."""
        if self._keep is None or not isinstance(hidden, LayerRows):
            return False
        numbers, place = self._mail.numbers, 2
        numbers[0], numbers[1] = self._here, len(hidden.rows)
        for layer in self._layers:
            states = hidden.whole[layer]
            if states.dtype != self._buffer.dtype or not states.is_contiguous():
                return False
            numbers[place] = states.data_ptr()
            place += 1
        for row in hidden.rows:
            numbers[place] = row
            place += 1
        return self._keep() == 0


class TextHeadDrafter(LevelDrafter):
    """Base class of drafters whose head has a KV cache. The first token is not cached: no hidden state precedes it."""

    def __init__(
        self,
        runner: ModelRunner,
        waiting: WaitingStates,
        layers: tuple[int, ...],
        knots: Tensor,
        head_width: int,
        tree: TokenTree,
        most_read: int,
    ) -> None:
        super().__init__(head_width, tree, most_read)
        self.runner = runner
        self.knots = knots
        self._waiting = waiting
        self._text = runner.text  # accepted tokens; the first token, which no hidden state precedes, is the ``lead``
        steps = DraftSteps(runner, knots, self.head, self.pretend_context)
        self.capabilities = Capabilities(layers=layers, steps=steps, plants_root=True, num_kept=self._num_kept)

    @property
    def num_waiting(self) -> int:
        """Number of queued hidden states, whose tokens are not cached; 0 if the cache holds another text by now."""
        is_current = len(self._waiting) == len(self._text.tokens) - self._text.num_rows
        return len(self._waiting) if is_current else 0

    @property
    def num_certain(self) -> int:
        """Number of committed tokens of the request."""
        return 1 + len(self._text.tokens)

    @property
    def is_current(self) -> bool:
        """Whether all accepted tokens are cached, so that no hidden state is queued."""
        return self._text.num_rows == len(self._text.tokens)

    def _num_kept(self, tokens: Sequence[int]) -> int:
        """Return the length of the prefix of ``tokens`` whose hidden states are cached or queued."""
        if not self._text.lead or tuple(tokens[:1]) != self._text.lead:
            return 0
        return 1 + self._text.shared(tokens, self.num_waiting)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a request with ``tokens`` (token ids, at least one), which are the whole prompt or its beginning.

        KV entries and queued hidden states of the prefix that ``tokens`` share with the previous request's text are
        kept, and all others are dropped. ``extend`` then passes the rest of the prompt, with the hidden states.
        """
        kept = max(self._num_kept(tokens) - 1, 0)
        num_rows = min(kept, self._text.num_rows)
        self._waiting.cut(kept - num_rows)
        self._text.begin(tokens[1:], num_rows, tokens[:1])
        self._headed = self._next = self._grown = None

    def pretend_context(self, length: int, token: int) -> None:
        """Act as if ``length`` tokens were cached and the token id ``token`` were the tree's root, to time steps.

        No cache entry is computed, so drafts are arbitrary until the next ``begin``.
        """
        self._next = self._grown = None
        self._text.pretend([token] * length, length - 1)
        self._waiting.clear()
        self._waiting.requeue_last()

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Append committed ``tokens`` (token ids) and queue the hidden states that precede them.

        Args:
            states: for each layer that the head reads, hidden states [len(tokens), H]; row i is the hidden state of the
                token before ``tokens[i]``.
        """
        self._text.tokens.extend(tokens)
        if self._has_read(len(tokens)):
            self._waiting.note_taken(len(tokens))
            self._text.num_rows = len(self._text.tokens)
        else:
            self._waiting.add(states, len(tokens))
