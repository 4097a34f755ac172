"""Drafters ``text`` and ``table`` in one tree: counted continuations, without a model pass.

Contexts of the text are counted as tokens are committed. The table was counted before, on text that the target
generated for its calibration or on shipped text. One n-gram scorer ranks the candidates of text and table, below any
node of the tree.
"""

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path

from torch import Tensor

from yggdrasil.artifacts.memory import trim_heap
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.protocol import Budget, Capabilities, Step
from yggdrasil.drafters.statistics.contexts import LONGEST
from yggdrasil.drafters.statistics.draws import NO_DRAWS, Draws
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.native.direct import Mailbox, NativeStatistics, direct
from yggdrasil.tree.token_tree import TokenTree

POOL_TOKENS = 1 << 17  # the most tokens of earlier requests, about 65 MB of counts
LEAST_PATH = -6.2  # least log-probability of a node's path; a plan's costs may raise it


def table_origin(folder: Path) -> str | None:
    """Return one line that says which text the n-gram table in a predictor's ``folder`` counts.

    Returns None if the folder has no table, or if the table counts text of the folder's own calibration alone.

    Raises:
        ArtifactError: the table is damaged.
    """
    file = folder / TABLE_FILE
    table = Table.load(file) if file.is_file() else None
    return None if table is None or not table.origin else f"n-gram table of {table.origin}"


class StatisticsDrafter:
    """Drafter that grows the tree of the most probable counted continuations, best first, until it is full.

    If ``is_public_pool`` is set to True, the counts of earlier requests are kept until they exceed ``POOL_TOKENS``
    tokens; then all counts are dropped.

    Raises:
        YggdrasilError: the native library, which counts n-grams, is missing.
    """

    def __init__(self, scorer: NGramScorer, table: Table | None = None) -> None:
        if not is_native():
            raise YggdrasilError("n-gram statistics need the native library: install a C++ compiler, or draft by ngram")
        self.is_public_pool = False
        self.capabilities = Capabilities(plants_root=True)
        self._least_path = LEAST_PATH
        self.set_scorer(scorer, table)

    @classmethod
    def load(cls, folder: Path, options: StatisticsOptions) -> "StatisticsDrafter":
        """Load a calibration's n-gram scorer and, if ``options.table``, its n-gram table from ``folder``.

        Raises:
            YggdrasilError: a file is missing or damaged, or the native library is missing.
        """
        table = Table.load(folder / TABLE_FILE) if options.table else None
        drafter = cls(NGramScorer.load(folder / SCORER_FILE), table)
        del table  # its arrays take as much memory as what drafting keeps of them
        trim_heap()
        return drafter

    def set_scorer(self, scorer: NGramScorer, table: Table | None) -> None:
        """Replace the n-gram scorer and the n-gram table (None removes the table), and forget text and draws."""
        self.name = "text" if table is None else "text + table"
        self._counts = _Counts(*scorer.tensors())
        self._counts.leave_out_below(self._least_path)
        self._draws = NO_DRAWS
        self.has_table = table is not None
        if table is not None:
            self.set_table(table)
        self._grown: TokenTree | None = None  # the tree whose buffers ``grow`` uses
        self._filled: TokenTree | None = None  # the tree whose buffers ``fill`` uses
        self._text: list[int] = []  # the current text as far as it is counted
        self._pending: list[int] = []  # committed tokens that are not counted yet
        self._pooled = 0  # counted tokens of earlier texts

    def set_table(self, table: Table) -> None:
        """Draft from the static n-gram table ``table``, which replaces an earlier table; counts of the text stay."""
        self._counts.set_table(*table.tensors())

    def leave_out_below(self, likely: float) -> None:
        """Set the least probability (0 to 1) with which the path of a drafted node must be accepted.

        At the plan's costs it does not pay to verify less probable nodes. Values below exp(``LEAST_PATH``), about
        0.002, set the default exp(``LEAST_PATH``).
        """
        self._least_path = max(LEAST_PATH, log(likely)) if likely > 0.0 else LEAST_PATH
        self._counts.leave_out_below(self._least_path)

    def follow_draws(self, seed: int | None, temperature: float) -> None:
        """Rank candidates by the random draws that the target will make with ``seed`` at ``temperature`` (above 0).

        Args:
            seed: None for a greedy target; ``temperature`` is not used then.
        """
        draws = NO_DRAWS if seed is None else Draws.of(seed, temperature)
        if draws != self._draws:
            self._draws = draws
            self._counts.follow_draws(*draws)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a request with the committed ``tokens`` (token ids).

        If ``tokens`` do not continue the last text, all counts are dropped; with ``is_public_pool`` only if they exceed
        ``POOL_TOKENS`` tokens.
        """
        known = len(self._text)
        if self._text != list(tokens[:known]):
            self._pooled += known
            if not self.is_public_pool or self._pooled > POOL_TOKENS:
                self._counts.forget()
                self._pooled = 0
            self._text, known = [], 0
        self._pending = list(tokens[known:])

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Append committed ``tokens`` (token ids). ``states`` is not used."""
        self._pending.extend(tokens)

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach the likeliest continuations, at most ``budget.depth`` levels, to ``tree``, which must be on the host.

        If ``budget.is_first``, the tree is first replaced by its root, the last committed token. Otherwise another
        drafter has grown the tree: the nodes stay, with scores from both estimates, and the remaining room is filled
        with continuations and with candidates that the other drafter has not attached. ``budget.width`` is not used.
        """
        if budget.is_first:
            self._propose_alone(tree, budget)
            return
        if tree is not self._filled:
            self._filled = tree
            self._counts.set_fill_buffers(*tree.node_tensors(), tree.pool_tokens, tree.pool_scores)
        self._count()
        self._counts.fill(budget.depth, len(self._text) - 1)

    def _propose_alone(self, tree: TokenTree, budget: Budget) -> None:
        if tree is not self._grown:
            self._grown = tree
            self._counts.set_grow_buffers(*tree.node_tensors())
        root = len(self._text) + len(self._pending) - 1
        self._counts.grow(self._pending, budget.depth, root)
        self._text += self._pending
        self._pending = []

    def cost(self, budget: Budget) -> Sequence[Step]:
        """Return no steps: n-gram statistics need no model pass."""
        return ()

    def features(self, path: Sequence[int]) -> Tensor:
        """Return n-gram counts of the candidates for the token after the text and ``path``, [n, 1 + 2 K] int64.

        Columns: the candidate's id, its count after each of the K = 9 contexts, and the count of each context. The
        contexts are the last 1 to 6 tokens, counted in the text (16 candidates each at most), then the last 1 to 3,
        counted in the static table. Committed tokens that are not counted yet are counted first.

        Args:
            path: token ids that follow the text.
        """
        self._count()
        rows: Tensor = self._counts.features([*self._text[-LONGEST:], *path])
        return rows

    def _count(self) -> None:
        # Deferred to the next draft, because a request's last tokens may lie after its end, and are then not counted.
        if self._pending:
            self._counts.append(self._pending)
            self._text += self._pending
            self._pending = []


def default_statistics(_: StatisticsOptions | None = None) -> StatisticsDrafter:
    """Return a drafter for an uncalibrated target, with counts of the request's text only and the default scorer.

    The argument is not used.
    """
    return StatisticsDrafter(NGramScorer.default(with_table=False))


class _Counts(NativeStatistics):
    """The native counts, with ``grow`` and ``fill`` as calls of plain C functions."""

    _MOST = 128  # the most tokens passed in the buffer of one call

    def __init__(self, *weights: Tensor) -> None:
        super().__init__(*weights)
        self._mail, self._grow = Mailbox(3 + self._MOST), direct("grow", self)
        self._fill_mail, self._fill = Mailbox(2), direct("fill", self)

    def set_grow_buffers(self, *buffers: Tensor) -> None:
        """Register the node buffers of a tree (``TokenTree.node_tensors``), to which each later ``grow`` writes."""
        super().set_grow_buffers(*buffers, self._mail.tensor)

    def grow(self, certain: Sequence[int], depth: int, root: int) -> int:
        numbers = self._mail.numbers
        if len(certain) > self._MOST:
            self.append(certain)
            certain = ()
        numbers[0], numbers[1], numbers[2] = depth, root, len(certain)
        for index, token in enumerate(certain, 3):
            numbers[index] = token
        if (size := self._grow()) < 0:
            raise RuntimeError("there is no text to grow a tree from")
        return size

    def set_fill_buffers(self, *buffers: Tensor) -> None:
        """Set the buffers of ``fill``: ``TokenTree.node_tensors``, then the tree's pool_tokens and pool_scores."""
        super().set_fill_buffers(*buffers, self._fill_mail.tensor)

    def fill(self, depth: int, root: int) -> int:
        """Extend a tree that another drafter has grown below the text's last token with the best continuations.

        Below a node that the drafter has run, whose candidates are in the pool, the two estimates are averaged, each
        weighted by the sum of its probabilities. Elsewhere the higher estimate of a token is used. The drafter's nodes
        get new scores.

        Args:
            depth: the most levels of the tree below the root.
            root: index of the root in the text.

        Returns:
            The number of nodes, root included.

        Raises:
            RuntimeError: there is no text.
        """
        numbers = self._fill_mail.numbers
        numbers[0], numbers[1] = depth, root
        if (size := self._fill()) < 0:
            raise RuntimeError("there is no text to fill a tree from")
        return size
