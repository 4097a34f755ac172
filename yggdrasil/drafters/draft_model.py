"""Drafter that is a small language model: it grows an Equal-Growth Tree with one compiled step per level.

Dims: W rows of a step, N tree nodes, M calibration knots.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from yggdrasil.drafters.level_drafter import (
    FinishStep,
    GrowStep,
    GuessStep,
    HeadStep,
    LevelDrafter,
    LevelSteps,
    PlantStep,
    ReadStep,
)
from yggdrasil.drafters.passed_rows import PassedRows
from yggdrasil.drafters.protocol import Capabilities, DraftSteps
from yggdrasil.runtime.graphs import Capture, Launch
from yggdrasil.runtime.passes import HostBuffer, PrefillStep, fitting, fitting_or_widest
from yggdrasil.runtime.runner import CapturedMover, ModelRunner, row_mover
from yggdrasil.tree.token_tree import CONSIDERED, TokenTree

SHORT_HEAD = 4  # rows of the narrow head step, enough for most iterations; a longer accepted path takes the widest one


class DraftModel(LevelDrafter):
    """Drafter over a causal language model that shares the target's tokenizer.

    The KV entry of a committed token is at the slot of its position. Tree node i is at slot root + i, which the next
    tree overwrites.

    Args:
        runner: the draft model with its KV cache.
        tree: the token tree to grow.
        widths: nodes per level for which grow and finish steps are compiled.
        head_width: the most committed tokens that one head step reads.
        prefill_widths: rows for which prefill steps are compiled.
        knots: [M] float32 acceptance calibration: log-acceptance at M draft log-probabilities.
        keeps_rows: compile the steps of tail drafts, after which KV entries of accepted nodes are kept.
        guess_widths: rows for which steps of head drafts before acceptance are compiled.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tree: TokenTree,
        widths: Sequence[int],
        head_width: int,
        prefill_widths: Sequence[int],
        knots: Tensor,
        *,
        keeps_rows: bool = False,
        guess_widths: Sequence[int] = (),
    ) -> None:
        device = runner.loaded.device
        self.name = f"model {runner.loaded.name}"
        self.runner = runner
        self.head_widths = sorted({min(SHORT_HEAD, head_width), head_width, *([1] if keeps_rows else [])})
        self.prefill_widths = sorted(prefill_widths)
        self.knots = knots.to(device)
        self._tokens = HostBuffer(max(head_width, *prefill_widths), device)
        self._span = HostBuffer(2, device)
        self._last = HostBuffer(1, device)
        self._move = row_mover(runner.cache, runner.recorder, max_rows=head_width + 1)
        self._place = HostBuffer(2, device)
        plants = self._move_and_plant if guess_widths and runner.recorder is not None else None
        self.levels = LevelSteps(runner, self._place, plants)
        self._keep = None if plants is None or runner.recorder is None else runner.recorder.capture(plants)
        self._deferred: Literal["", "move", "move and plant"] = ""  # work of ``keep`` that the next draft begins with
        self._heads_after_moves: dict[int, Capture] = {}
        self._num_nodes, self._keeps_rows = tree.num_nodes, keeps_rows and runner.recorder is not None
        self._first_leaf, self._num_leaves = 1, 0  # nodes of the last level, whose KV entries are not computed
        self._text = runner.text  # committed tokens, and how many of them have KV entries
        super().__init__(self.head_widths[0], tree, self.head_widths[-1])
        steps = DraftSteps(runner, self.knots, self.head, self.pretend_context, self)
        self.capabilities = Capabilities(steps=steps, plants_root=True)
        tree_buffers = tree.draft_tensors()
        rows = torch.arange(max(widths), device=device)
        for width in self.prefill_widths:
            inputs = [self._tokens.tensor[:width], self._span.tensor[:1], self._last.tensor]
            runner.define("prefill", width, PrefillStep(runner.call), inputs)
        for width in self.head_widths:
            head_inputs = [self._tokens.tensor[:width], self._span.tensor, self.knots, *tree_buffers]
            runner.define("head", width, HeadStep(runner.call), head_inputs)
        for width in widths:
            inputs = [self._place.tensor, rows[:width]]
            runner.define("grow", width, GrowStep(runner.call), [*inputs, self.knots, *tree_buffers])
            runner.define("finish", width, FinishStep(), [*inputs, *tree_buffers])
        if keeps_rows:
            for width in sorted({1, *widths}):
                inputs = [self._place.tensor, rows[:width], *tree_buffers]
                runner.define("read", width, ReadStep(runner.call), inputs)
        considered = min(CONSIDERED * tree.candidates, runner.loaded.vocab_size)
        table = self._guesses = Guesses.allocate(max(guess_widths, default=0), considered, device)
        for width in guess_widths:
            inputs = [self._place.tensor[:1], *(part[:width] for part in table), *tree_buffers]
            runner.define("guess", width, GuessStep(runner.call), inputs)
        if guess_widths:
            inputs = [self._last.tensor, self.knots, *table[1:], *tree_buffers]
            runner.define("plant", 1, PlantStep(), inputs)

    @property
    def root_position(self) -> int:
        """Index of the tree's root, which is the last committed token, among the request's tokens."""
        return len(self._text.tokens) - 1

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a request with the committed ``tokens`` (token ids).

        KV entries of the prefix shared with the last request stay.
        """
        self._finish_keeping()
        self._text.begin(tokens, self._text.shared(tokens))
        self._headed = self._next = self._grown = None

    def pretend_context(self, length: int, token: int) -> None:
        """Act as if ``length`` tokens were cached and the token id ``token`` were the tree's root, to time steps.

        No KV entry is computed, so drafts are arbitrary until the next ``begin``.
        """
        self._finish_keeping()
        self._next = self._grown = None
        self._text.pretend([token] * (length + 1), length)
        self._place.write(length, 1)

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Append committed ``tokens`` (token ids). ``states`` is not used: a draft model reads no hidden states."""
        self._text.tokens.extend(tokens)
        if (self._next or self._grown) and self._has_read(len(tokens)):  # on a GPU
            self._text.num_rows = len(self._text.tokens)

    @property
    def is_current(self) -> bool:
        """Whether all committed tokens have KV entries, and no work on them is deferred."""
        return self._text.num_rows == len(self._text.tokens) and not self._deferred

    def _next_head(self, passed: PassedRows) -> Launch:
        head = self.runner.step("head", passed.most)

        def run() -> Sequence[Tensor]:
            root, count = passed.root(), passed.count()
            self._tokens.tensor[: passed.most].copy_(passed.tokens())
            self._span.tensor.copy_(torch.cat([root - count + 1, count]))
            self._place.tensor[:1].copy_(root)
            return head()

        return run

    @property
    def num_certain(self) -> int:
        return len(self._text.tokens)

    def _draft_head(self) -> None:
        """Prefill pending tokens until one head step can read the rest, then run it."""
        widest = self.head_widths[-1]
        while len(self._text.tokens) - self._text.num_rows > widest:
            self._finish_keeping()
            self._prefill(len(self._text.tokens) - self._text.num_rows - widest)
        start = min(
            self._text.num_rows, len(self._text.tokens) - 1
        )  # the root's logits are needed even if its KV entry exists
        pending = self._text.tokens[start:]
        self._tokens.write(*pending)
        self._span.write(start, len(pending))
        width = fitting(self.head_widths, len(pending))
        if self._deferred == "move":
            self._deferred = ""
            self._head_after_moves(width)()
        else:
            self._finish_keeping()
            self.runner.launch(("head", width))
        self._text.num_rows = len(self._text.tokens)

    def grow(self, width: int, depth: int) -> None:
        """Run ``depth`` draft steps after the head draft.

        Each step attaches the ``width`` best candidates, anywhere in the tree, and all steps but the last run the draft
        model on them. So the nodes of the last step have no KV entries.
        """
        self._first_leaf, self._num_leaves = 1 + (depth - 1) * width, width
        self.levels.run(self.root_position, width, depth, after_work=self._deferred == "move and plant")
        self._deferred = ""

    def read_leaves(self) -> None:
        """Run the draft model on all nodes that the last draft step attached, to write their KV entries to its cache.

        ``grow`` does not run these nodes. A schedule with the stage variant ``tail_draft=ahead`` calls this while the
        target verifies, so that the next head draft does not run accepted leaves.
        """
        self._place.write(len(self._text.tokens) - 1, self._first_leaf)
        self.runner.launch(("read", self._num_leaves))

    def read_leaf(self, node: int) -> None:
        """Compute the KV entry of ``node`` (an index) if the last draft step attached it; other nodes have entries."""
        if node >= self._first_leaf:
            self._place.write(len(self._text.tokens) - 1, node)
            self.runner.launch(("read", 1))

    def guess(self, nodes: Tensor, tokens: Tensor, *, reads_leaves: bool) -> None:
        """Run each possible next root before acceptance, and store its likeliest successors for ``keep``.

        Args:
            nodes: [W] int64 indices of verified nodes.
            tokens: [W] int64 token ids; ``tokens[i]`` becomes the next root if ``nodes[i]`` is the last accepted node
                and the target chooses this token after it.
            reads_leaves: run ``read_leaves`` first.
        """
        width = nodes.shape[0]
        self._guesses.nodes[:width] = nodes
        self._guesses.tokens[:width] = tokens
        self._place.write(len(self._text.tokens) - 1, self._first_leaf)
        self.runner.launch(*([("read", self._num_leaves)] if reads_leaves else []), ("guess", width))

    def keep(self, nodes: Sequence[int], guess: int | None, *, at_once: bool) -> None:
        """Move the KV entries of accepted nodes to the slots after the root's, so that no later head draft runs them.

        On a GPU the entries move when the next draft begins, unless ``at_once`` is True and ``guess`` is given.

        Args:
            nodes: indices of the accepted nodes below the root, in path order.
            guess: row of the last ``guess`` call that became the next root, or None if no row became the root. This
                row's KV entry is kept too, and the next head draft is not run.
            at_once: make the row ``guess`` the root now, because its candidates are read before the next draft.
        """
        root = len(self._text.tokens) - 1
        rows = list(nodes) if guess is None else [*nodes, self._num_nodes + guess]
        self._text.num_rows = root + 1 + len(rows)
        sources = [root + row for row in rows]
        if guess is not None:
            self._last.write(guess)
            self._note_length(self._text.num_rows)
            self._headed = self._text.num_rows  # committed tokens after the next ``extend``
        must_move = bool(rows) and rows[-1] > len(rows)  # rows ascend: otherwise each is already at its slot
        if isinstance(self._move, CapturedMover):  # deferred: the next draft's capture begins with it
            if guess is not None or must_move:
                self._move.write(sources, root + 1)
                self._deferred = "move" if guess is None else "move and plant"
            if guess is not None and at_once:
                self._finish_keeping()
            return
        if guess is not None:
            self.runner.step("plant", 1)()
        if must_move:
            self._move(sources, root + 1)

    def captures(self, depths: Sequence[int]) -> Iterator[Capture]:
        """Yield the CUDA graphs that drafts of each of ``depths`` draft steps launch, early head drafts included."""
        yield from super().captures(depths)
        defined = self.runner.defined
        for guess in (step for step in defined if step[0] == "guess"):
            for read in (step for step in defined if step[0] == "read"):
                yield self.runner.captured(read, guess)
        if self._keep is not None:
            yield self._keep
        if self._keeps_rows:
            yield from map(self._head_after_moves, self.head_widths)

    def _head_after_moves(self, width: int) -> Capture:
        """Return the capture of the moves that ``keep`` deferred and a head step of ``width`` rows."""
        found = self._heads_after_moves.get(width)
        if found is None:
            mover, recorder = self._move, self.runner.recorder
            assert isinstance(mover, CapturedMover)
            assert recorder is not None

            def run() -> Sequence[Tensor]:
                mover.move()
                return self.runner.step("head", width)()

            found = self._heads_after_moves[width] = recorder.capture(run)
        return found

    def _move_and_plant(self) -> Sequence[Tensor]:
        """Move the rows that ``keep`` deferred and plant the root; captured, alone and in drafts."""
        assert isinstance(self._move, CapturedMover)
        self._move.move()
        return self.runner.step("plant", 1)()

    def _finish_keeping(self) -> None:
        """Run the work that ``keep`` deferred, if no draft has run it."""
        deferred, self._deferred = self._deferred, ""
        if deferred and isinstance(self._move, CapturedMover):
            capture = self._move.capture if deferred == "move" else self._keep
            assert capture is not None
            capture()

    def _prefill(self, count: int) -> None:
        width = fitting_or_widest(self.prefill_widths, count)
        chunk = self._text.tokens[self._text.num_rows : self._text.num_rows + min(count, width)]
        self._tokens.write(*chunk)
        self._span.write(self._text.num_rows)
        self._last.write(len(chunk) - 1)
        self.runner.launch(("prefill", width))
        self._text.num_rows += len(chunk)


class Guesses(NamedTuple):
    """Table of possible next roots: R drafted successors of verified nodes, each with its C likeliest candidates."""

    nodes: Tensor  # [R] int64, the node that each token follows
    tokens: Tensor  # [R] int64 token ids
    edges: Tensor  # [R, C] float32, the drafter's log-probabilities; the first ``num_considered`` columns are used
    candidates: Tensor  # [R, C] int64 token ids

    @classmethod
    def allocate(cls, rows: int, candidates: int, device: torch.device) -> "Guesses":
        """Allocate zeros for ``rows`` possible roots with ``candidates`` candidates each."""

        def integers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        edges = torch.zeros(rows, candidates, dtype=torch.float32, device=device)
        return cls(integers(rows), integers(rows), edges, integers(rows, candidates))


def identity_knots() -> Tensor:
    """Return an acceptance calibration, [128] float32, under which acceptance equals the drafter's probability.

    Probabilities are limited to exp(-12) .. exp(-0.0001).
    """
    return torch.linspace(-12.0, -1e-4, 128)
