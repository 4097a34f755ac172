"""Drafters ``text``, ``table`` and ``recycling`` in one tree: continuations that were counted, and runners-up.

They need no model pass. The text's contexts are counted as tokens become certain; the table's were counted in the
target's own text when it was calibrated; recycling keeps what the target found likeliest after each token that it
verified (Token Recycling, arXiv 2408.08696). Candidates of all compete for the tree's nodes by one scorer, below any
node, drafted ones too.
"""

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

from torch import Tensor

from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.protocol import Budget, Capabilities, Step
from yggdrasil.drafters.statistics.portable import LEAST_PATH, LONGEST, PortableStatistics
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.native import is_native
from yggdrasil.native.direct import Mailbox, NativeStatistics, direct
from yggdrasil.policy.objective import UNBOUNDED, StoppingBound
from yggdrasil.tree.token_tree import TokenTree

SCORER_FILE, TABLE_FILE = "scorer.safetensors", "table.safetensors"
POOL_TOKENS = 1 << 17  # of earlier requests, at most; some 65 MB of counts


def table_origin(folder: Path) -> str | None:
    """One line on the n-gram table in a predictor's ``folder``: how much it counts and where it comes from.

    None where the folder has no table, or one that its own calibration counted.
    """
    file = folder / TABLE_FILE
    table = Table.load(file) if file.is_file() else None
    return (
        None
        if table is None or not table.origin
        else f"n-gram table of {table.num_tokens:,} tokens from {table.origin}"
    )


class StatisticsDrafter:
    """Grows the tree of the likeliest counted continuations, best node first, until it is full.

    ``is_public_pool``: the counts of earlier requests are kept, up to ``POOL_TOKENS``, and then all are dropped.
    """

    def __init__(
        self, scorer: NGramScorer, table: Table | None = None, *, recycles: bool = False, native: bool | None = None
    ) -> None:
        self.is_public_pool, self.recycles = False, recycles
        self.capabilities = Capabilities(plants_root=True, read_runners_up=self.read_runners_up if recycles else None)
        self._make = _NativeStatistics if (is_native() if native is None else native) else PortableStatistics
        self._least_path = LEAST_PATH
        self.learn(scorer, table)

    @classmethod
    def load(cls, folder: Path, options: StatisticsOptions) -> "StatisticsDrafter":
        """Load the scorer and table of a calibration from ``folder``; ArtifactError where one is missing or damaged."""
        table = Table.load(folder / TABLE_FILE) if options.table else None
        return cls(NGramScorer.load(folder / SCORER_FILE), table, recycles=options.recycling)

    def learn(self, scorer: NGramScorer, table: Table | None) -> None:
        """Replace scorer and table; the counts of the text are dropped."""
        names = ["text", *(["table"] if table is not None else []), *(["recycling"] if self.recycles else [])]
        self.name = " + ".join(names)
        self._counts: Any = self._make(*scorer.tensors())
        self._counts.leave_out_below(self._least_path)
        self.has_table = table is not None
        if table is not None:
            self.set_table(table)
        self._grown: TokenTree | None = None  # the tree of ``grow``
        self._filled: TokenTree | None = None  # the drafted tree of ``fill``
        self._text: list[int] = []  # what is counted
        self._pending: list[int] = []  # certain tokens that are not counted yet
        self._pooled = 0  # counted tokens of other texts

    def set_table(self, table: Table) -> None:
        """Replace the table; the counts of the text stay."""
        self._counts.set_table(*table.tensors())

    def leave_out_below(self, likely: float) -> None:
        """Grow no path of a probability below ``likely``: at the plan's costs no pass gains by verifying it."""
        self._least_path = max(LEAST_PATH, log(likely)) if likely > 0.0 else LEAST_PATH
        self._counts.leave_out_below(self._least_path)

    def begin(self, tokens: Sequence[int]) -> None:
        """Where ``tokens`` go on with the counted text, as a chat's next turn does, its counts are kept."""
        known = len(self._text)
        if self._text != list(tokens[:known]):
            self._pooled += known
            if not self.is_public_pool or self._pooled > POOL_TOKENS:
                self._counts.forget()
                self._pooled = 0
            self._text, known = [], 0
        self._pending = list(tokens[known:])

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        self._pending.extend(tokens)

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach the likeliest continuations to ``tree``, which is on the host, best first.

        Stops where ``budget.bound`` shows that no further node can be verified. In a tree that another drafter has
        grown, both estimates are mixed, each weighted by the sum of its probabilities; the remaining nodes go to new
        continuations and to candidates that the other drafter has not attached.
        """
        if budget.from_root:
            self._propose_alone(tree, budget)
            return
        if tree is not self._filled:
            self._filled = tree
            self._counts.fill_in(*tree.node_tensors(), tree.pool_tokens, tree.pool_scores)
        self._count()
        self._counts.fill(budget.depth, budget.bound)

    def _propose_alone(self, tree: TokenTree, budget: Budget) -> None:
        if tree is not self._grown:
            self._grown = tree
            self._counts.grow_in(*tree.node_tensors())
        self._counts.grow(self._pending, budget.depth, budget.bound)
        self._text += self._pending
        self._pending = []

    def cost(self, budget: Budget) -> Sequence[Step]:
        return ()

    def read_runners_up(self, tokens: Sequence[int], runners_up: Tensor) -> None:
        """After ``tokens[i]`` the target found ``runners_up[i]`` likeliest, [len(tokens), K] int64, best first."""
        self._counts.recycle(list(tokens), runners_up)

    def features(self, path: Sequence[int]) -> Tensor:
        """Counts of the candidates behind the text and then ``path``, [n, 2 + 2 K] int64.

        Rows: token, place among the runners-up (0: none), how often it followed each context, how often each was seen.
        """
        self._count()
        rows: Tensor = self._counts.features([*self._text[-LONGEST:], *path])
        return rows

    def _count(self) -> None:
        # Not before: the last tokens of a request, which may lie behind its end, hardly ever come here.
        if self._pending:
            self._counts.append(self._pending)
            self._text += self._pending
            self._pending = []


def default_statistics(*, recycles: bool = False) -> StatisticsDrafter:
    """The drafter before anything is learned of a target: counts of the text alone, and the usual scorer."""
    return StatisticsDrafter(NGramScorer.usual(with_table=False), recycles=recycles)


def untrained(options: StatisticsOptions) -> StatisticsDrafter:
    """The drafter of ``options`` before a calibration, which makes the table."""
    return default_statistics(recycles=options.recycling)


class _NativeStatistics:
    """The native counts; trees are grown and extended by a plain C call."""

    _MOST = 128  # tokens that one call passes in a buffer; a prompt has more

    def __init__(self, *weights: Tensor) -> None:
        self._counts = NativeStatistics(*weights)
        self._bound = UNBOUNDED
        self._mail, self._grow = Mailbox(2 + self._MOST), direct("grow", self._counts)
        self._fill_mail, self._fill = Mailbox(3), direct("fill", self._counts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counts, name)

    def grow_in(self, *buffers: Tensor) -> None:
        """Do what ``PortableStatistics.grow_in`` does."""
        self._counts.grow_in(*buffers, self._mail.tensor)

    def grow(self, certain: Sequence[int], depth: int, bound: StoppingBound) -> int:
        """Do what ``PortableStatistics.grow`` does."""
        numbers = self._mail.numbers
        if bound is not self._bound:
            self._counts.grow_for(*bound.buffer_info())
            self._bound = bound  # kept: they are read where they are
        if len(certain) > self._MOST:
            self._counts.append(certain)
            certain = ()
        numbers[0], numbers[1] = depth, len(certain)
        for place, token in enumerate(certain, 2):
            numbers[place] = token
        if (size := self._grow()) < 0:
            raise RuntimeError("there is no text to grow a tree from")
        return size

    def fill_in(self, *buffers: Tensor) -> None:
        """Do what ``PortableStatistics.fill_in`` does."""
        self._counts.fill_in(*buffers, self._fill_mail.tensor)

    def fill(self, depth: int, bound: StoppingBound) -> int:
        """Do what ``PortableStatistics.fill`` does."""
        numbers = self._fill_mail.numbers
        numbers[0], (numbers[1], numbers[2]) = depth, bound.buffer_info()
        if (size := self._fill()) < 0:
            raise RuntimeError("there is no text to fill a tree from")
        return size
