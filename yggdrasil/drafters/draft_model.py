"""Drafter that is a small language model: it grows an Equal-Growth Tree with one compiled step per level.

Dims: W rows of a step, N tree nodes, M calibration knots.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.drafters.level_drafter import LevelDrafter, LevelSteps
from yggdrasil.drafters.protocol import Capabilities, DraftSteps
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.passes import (
    CallStep,
    HostBuffer,
    ModelCall,
    PrefillStep,
    StepModule,
    fitting,
    fitting_or_widest,
)
from yggdrasil.runtime.runner import CapturedMover, ModelRunner, row_mover
from yggdrasil.tree.token_tree import TokenTree, attach_best, likeliest, offer, offer_candidates, plant_root

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
        self._is_waiting = False  # whether ``keep`` has deferred its moves and planting
        self._num_nodes = tree.num_nodes
        self._first_leaf, self._num_leaves = 1, 0  # nodes of the last level, whose KV entries are not computed
        self._text = runner.text  # committed tokens, and how many of them have KV entries
        super().__init__(self.head_widths[0], tree)
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
        self._guesses = Guesses.allocate(max(guess_widths, default=0), tree.candidates, device)
        table = self._guesses.tensors()
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
        self._headed = None

    def pretend_context(self, length: int, token: int) -> None:
        """Act as if ``length`` tokens were cached and the token id ``token`` were the tree's root, to time steps.

        No KV entry is computed, so drafts are arbitrary until the next ``begin``.
        """
        self._finish_keeping()
        self._text.pretend([token] * (length + 1), length)
        self._place.write(length, 1)

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Append committed ``tokens`` (token ids). ``states`` is not used: a draft model reads no hidden states."""
        self._text.tokens.extend(tokens)

    @property
    def _num_certain(self) -> int:
        return len(self._text.tokens)

    def _draft_head(self) -> None:
        """Prefill pending tokens until one head step can read the rest, then run it."""
        self._finish_keeping()
        widest = self.head_widths[-1]
        while len(self._text.tokens) - self._text.num_rows > widest:
            self._prefill(len(self._text.tokens) - self._text.num_rows - widest)
        start = min(
            self._text.num_rows, len(self._text.tokens) - 1
        )  # the root's logits are needed even if its KV entry exists
        pending = self._text.tokens[start:]
        self._tokens.write(*pending)
        self._span.write(start, len(pending))
        self.runner.launch(("head", fitting(self.head_widths, len(pending))))
        self._text.num_rows = len(self._text.tokens)

    def grow(self, width: int, depth: int) -> None:
        """Run ``depth`` draft steps after the head draft.

        Each step attaches the ``width`` best candidates, anywhere in the tree, and all steps but the last run the draft
        model on them. So the nodes of the last step have no KV entries.
        """
        self._first_leaf, self._num_leaves = 1 + (depth - 1) * width, width
        self.levels.run(self.root_position, width, depth, after_work=self._is_waiting)
        self._is_waiting = False

    def read_leaves(self) -> None:
        """Run the draft model on all nodes that the last draft step attached, to write their KV entries to its cache.

        ``grow`` does not run these nodes. A schedule with the stage variant ``tail_draft=ahead`` calls this while the
        target verifies, so that the next head draft need not run an accepted one of them.
        """
        self._place.write(len(self._text.tokens) - 1, self._first_leaf)
        self.runner.launch(("read", self._num_leaves))

    def read_leaf(self, node: int) -> None:
        """Compute the KV entry of ``node`` (its index) if the last draft step attached it; other nodes have one."""
        if node >= self._first_leaf:
            self._place.write(len(self._text.tokens) - 1, node)
            self.runner.launch(("read", 1))

    def guess(self, nodes: Tensor, tokens: Tensor, *, reads_leaves: bool) -> None:
        """Run each possible next root before acceptance, and store its K likeliest successors for ``keep``.

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

        Args:
            nodes: indices of the accepted nodes below the root, in path order.
            guess: row of the last ``guess`` call that became the next root: its KV entry is kept too, and no head draft
                runs. None: no row did.
            at_once: move the entries now; False: with the next draft, where captured CUDA graphs allow it.
        """
        root = len(self._text.tokens) - 1
        rows = list(nodes) if guess is None else [*nodes, self._num_nodes + guess]
        self._text.num_rows = root + 1 + len(rows)
        sources = [root + row for row in rows]
        if guess is not None:
            self._last.write(guess)
            self._note_length(self._text.num_rows)
            self._headed = self._text.num_rows  # committed tokens after the next ``extend``
            if isinstance(self._move, CapturedMover):  # deferred: the next draft's capture begins with it
                self._move.write(sources, root + 1)
                self._is_waiting = True
                if at_once:
                    self._finish_keeping()
                return
            self.runner.step("plant", 1)()
        if rows and rows[-1] > len(rows):  # rows ascend: otherwise each is already at its slot
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

    def _move_and_plant(self) -> Sequence[Tensor]:
        """Move the rows that ``keep`` deferred and plant the root; captured, alone and in drafts."""
        assert isinstance(self._move, CapturedMover)
        self._move.move()
        return self.runner.step("plant", 1)()

    def _finish_keeping(self) -> None:
        """Run the work that ``keep`` deferred, if no draft has run it."""
        if self._is_waiting and self._keep is not None:
            self._is_waiting = False
            self._keep()

    def _prefill(self, count: int) -> None:
        width = fitting_or_widest(self.prefill_widths, count)
        chunk = self._text.tokens[self._text.num_rows : self._text.num_rows + min(count, width)]
        self._tokens.write(*chunk)
        self._span.write(self._text.num_rows)
        self._last.write(len(chunk) - 1)
        self.runner.launch(("prefill", width))
        self._text.num_rows += len(chunk)


class Guesses(NamedTuple):
    """Table of possible next roots: R drafted successors of verified nodes, each with its K candidates."""

    nodes: Tensor  # [R] int64, the node that each token follows
    tokens: Tensor  # [R] int64
    edges: Tensor  # [R, K] float32, the drafter's log-probabilities
    candidates: Tensor  # [R, K] int64

    @classmethod
    def allocate(cls, rows: int, candidates: int, device: torch.device) -> "Guesses":
        """Allocate zeros for ``rows`` possible roots with ``candidates`` candidates each."""

        def integers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        edges = torch.zeros(rows, candidates, dtype=torch.float32, device=device)
        return cls(integers(rows), integers(rows), edges, integers(rows, candidates))

    def tensors(self) -> list[Tensor]:
        """Return the buffers, not copies, in field order: nodes, tokens, edges, candidates."""
        return list(self)


def identity_knots() -> Tensor:
    """Return an acceptance calibration, [128] float32, under which acceptance equals the drafter's probability.

    Probabilities below exp(-12) count as exp(-12).
    """
    return torch.linspace(-12.0, -1e-4, 128)


class RowsStep(CallStep[ModelCall]):
    """Forward pass over W tokens at any positions of the text or the tree."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        positions: Tensor,  # [W] int64
        mask: Tensor,  # [W, T] bool over the slots from offsets[0] on
        offsets: Tensor,  # [2] int64: context length, first slot written
    ) -> tuple[Tensor]:
        """Run W tokens at any positions and return ``(logits [W, V],)``; their KV entries are written to the cache."""
        return (self._call(weights, caches, tokens, positions, mask, offsets).logits,)


def read_nodes(
    call: ModelCall,
    weights: list[Tensor],
    caches: list[Tensor],
    tree: TokenTree,
    root: Tensor,
    first: Tensor,
    nodes: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """Run the draft model on W attached tree nodes and return their logits, [W, V], or [R, V] of ``rows`` only.

    Each node attends to the tokens before the root and to its ancestors, itself included. The KV entry of node i is
    written to slot ``root`` + i.

    Args:
        call: the model as a function of ``weights`` and ``caches``, the model's tensors and KV caches.
        tree: the tree with N nodes, node 0 is the root.
        root: [1] int64 index of the root among the request's tokens.
        first: [1] int64 index of the first node that is run.
        nodes: [W] int64 consecutive node indices from ``first`` on.
        rows: [R] int64 indices into ``nodes`` whose logits are computed; None: all.
    """
    offsets = torch.cat([root, root + first])
    positions = root + tree.depths[nodes]
    return call(weights, caches, tree.tokens[nodes], positions, tree.ancestors[nodes], offsets, rows).logits


class HeadStep(CallStep[ModelCall]):
    """Run the newly committed tokens (padded to W), make the last one the tree's root, and add its top-k candidates.

    Tokens before the root may have no KV entry, or one at a tree slot. For a memory-bound model, recomputing all of
    them costs about as much as one token, and saves moving cache rows.
    """

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        span: Tensor,  # [2] int64: position of the first row, number of rows without padding
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        start, count = span[:1], span[1:]
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        last = count - 1
        mask = rows[:, None] >= rows[None, :]
        offsets = start.expand(2).contiguous()
        logits = self._call(weights, caches, tokens, start + rows, mask, offsets, last).logits
        plant_root(tree, tokens[last])
        offer_candidates(tree, torch.zeros_like(last), logits, knots)
        return (last,)


class GrowStep(CallStep[ModelCall]):
    """Attach the W best candidates, run them through the draft model, offer their top-k continuations."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: the root's position, index of the first new node
        rows: Tensor,  # [W] int64; only its size is used
        knots: Tensor,  # [M] float32
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        root, first = place[:1], place[1:]
        nodes = attach_best(tree, first, rows.shape[0])
        logits = read_nodes(self._call, weights, caches, tree, root, first, nodes)
        offer_candidates(tree, nodes, logits, knots)
        return (nodes,)


class FinishStep(StepModule):
    """Attach the last level. Its nodes are leaves, so the draft model does not run them."""

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], place: Tensor, rows: Tensor, *tree_buffers: Tensor
    ) -> tuple[Tensor]:
        return (attach_best(TokenTree(*tree_buffers), place[1:], rows.shape[0]),)


class ReadStep(CallStep[ModelCall]):
    """Tail draft: run W attached nodes through the draft model, only for their keys and values."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [2] int64: the root's position, index of the first node
        rows: Tensor,  # [W] int64, 0 .. W-1
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        root, first = place[:1], place[1:]
        nodes = first + rows
        last = rows[-1:].clone()
        read_nodes(self._call, weights, caches, tree, root, first, nodes, last)
        return (nodes,)


class GuessStep(CallStep[ModelCall]):
    """Head draft before acceptance: run a possible successor of each of W nodes.

    The KV entry of row r is written after the tree's, to slot root + N + r. The top-k candidates are written to
    ``edges`` and ``candidates``, not into the tree.
    """

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [1] int64: the root's position
        nodes: Tensor,  # [W] int64
        tokens: Tensor,  # [W] int64, the drafted successor of each node
        edges: Tensor,  # [W, K] float32, output: log-probabilities
        candidates: Tensor,  # [W, K] int64, output: token ids
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        rows = torch.arange(nodes.shape[0], device=nodes.device)
        mask = torch.cat([tree.ancestors[nodes], rows[:, None] == rows], dim=1)  # [W, N + W]
        offsets = torch.cat([place, place + tree.num_nodes])
        positions = place + tree.depths[nodes] + 1
        logits = self._call(weights, caches, tokens.clone(), positions, mask, offsets).logits
        found = likeliest(logits, tree.candidates)
        edges.copy_(found[0])
        candidates.copy_(found[1])
        return (nodes.clone(),)


class PlantStep(StepModule):
    """Plant the accepted successor as the next root, with the candidates that ``GuessStep`` computed for it."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        row: Tensor,  # [1] int64, the accepted successor's row of the table
        knots: Tensor,  # [M] float32
        tokens: Tensor,  # [R] int64
        edges: Tensor,  # [R, K] float32
        candidates: Tensor,  # [R, K] int64
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        plant_root(tree, tokens[row])
        offer(tree, torch.zeros_like(row), edges[row], candidates[row], knots)
        return (row.clone(),)
