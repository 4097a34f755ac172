"""Base class of drafters with compiled steps: head draft and levels; the steps of a draft model.

Dims: W rows of a step, N tree nodes, M calibration knots, R possible next roots, C stored candidates of each root.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from yggdrasil.acceptance.coins import draw_key
from yggdrasil.drafters.passed_rows import PassedRows
from yggdrasil.drafters.protocol import Budget, Capabilities, Step
from yggdrasil.drafters.statistics.draws import NOTHING_DRAWN, draft_weights
from yggdrasil.runtime.graphs import Capture, Launch
from yggdrasil.runtime.passes import CallStep, HostBuffer, ModelCall, StepModule
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import (
    TokenTree,
    attach_best,
    likeliest,
    num_considered,
    offer,
    offer_candidates,
    plant_root,
)


class LevelSteps:
    """Runner of the draft steps after the head draft: the steps "grow" and "finish" of ``runner``, by width.

    Each step attaches nodes; all but the last ("finish") find candidates below them. One CUDA graph runs all on a GPU.

    Args:
        place: [2] int64 input of the steps: the root's position or slot, and the index of a level's first node.
        before: optional work that a draft may begin with, in the same CUDA graph.
    """

    def __init__(self, runner: ModelRunner, place: HostBuffer, before: Launch | None = None) -> None:
        self._runner, self._place, self._before = runner, place, before
        self._captures: dict[tuple[int, int, bool], Capture] = {}

    def run(self, root: int, width: int, depth: int, *, after_work: bool = False) -> None:
        """Run ``depth`` draft steps of ``width`` nodes each. The nodes of the last step get no candidates.

        Args:
            root: position or cache slot of the tree's root.
            after_work: on a GPU, first run the constructor's ``before``, as part of the graph; on a CPU, not used.
        """
        if self._runner.recorder is not None:
            self._place.write(root)
            self.capture(width, depth, after_work=after_work)()
            return
        grow = self._runner.step("grow", width)
        for level in range(depth - 1):
            self._place.write(root, 1 + level * width)
            grow()
        self._place.write(root, 1 + (depth - 1) * width)
        self._runner.step("finish", width)()

    def capture(self, width: int, depth: int, *, after_work: bool = False) -> Capture:
        """Return the CUDA graph of ``depth`` draft steps of ``width`` nodes each, captured in the first call.

        Args:
            after_work: the graph begins with the constructor's ``before``, if any.
        """
        found = self._captures.get((width, depth, after_work))
        if found is None:
            assert self._runner.recorder is not None
            levels = self.work(width, depth)

            def run() -> Sequence[Tensor]:
                if after_work and self._before is not None:
                    self._before()
                return levels()

            found = self._captures[width, depth, after_work] = self._runner.recorder.capture(run)
        return found

    def work(self, width: int, depth: int) -> Launch:
        """Return a function that runs ``depth`` draft steps of ``width`` nodes each, to be called in a CUDA graph."""
        grow, finish = self._runner.step("grow", width), self._runner.step("finish", width)
        first = self._place.tensor[1:]

        def levels() -> Sequence[Tensor]:
            first.fill_(1)
            for _ in range(depth - 1):
                grow()
                first.add_(width)
            return finish()

        return levels

    def captures(self, depths: Sequence[int]) -> Iterator[Capture]:
        """Yield the CUDA graphs of drafts of each of ``depths`` draft steps, and of all other steps of the runner.

        Prepare them between requests, because preparing a graph runs it once.
        """
        for name, width in self._runner.defined:
            if name == "grow":
                for depth in depths:
                    yield self.capture(width, depth)
                    if self._before is not None:
                        yield self.capture(width, depth, after_work=True)
            elif name != "finish":
                yield self._runner.captured((name, width))


class LevelDrafter(ABC):
    """Base class of drafters that grow, level by level, the one token tree for which their steps were compiled.

    A schedule may run the head draft early (``head``). Otherwise ``propose`` runs it. On a GPU, ``next_work`` drafts
    below tokens that the host does not know yet.

    Args:
        head_width: rows of the head draft in the result of ``cost``.
        tree: the token tree to grow.
        most_read: the most tokens, bonus token included, that the head draft of ``next_work`` reads.
    """

    levels: LevelSteps
    runner: ModelRunner
    capabilities: Capabilities

    def __init__(self, head_width: int, tree: TokenTree, most_read: int) -> None:
        self._head_width, self.most_read = head_width, most_read
        self._headed: int | None = None  # committed tokens at the last head draft; None if the tree has grown since
        self._next: Budget | None = None  # budget of drafts that run below tokens which the host does not know yet
        self._grown: Budget | None = None  # budget of the tree that these drafts have grown below the root
        self._tree, self._draw_weights = tree, NOTHING_DRAWN

    def follow_draws(self, seed: int | None, temperature: float) -> None:
        """Rank candidates by the random draws that the target will make with ``seed`` at ``temperature`` (above 0).

        Args:
            seed: None for a greedy target; ``temperature`` is not used then.
        """
        weights = NOTHING_DRAWN if seed is None else draft_weights(temperature)
        if weights != self._draw_weights:
            self._draw_weights = weights
            assert self._tree.draw_weights is not None
            self._tree.draw_weights.copy_(torch.tensor(weights))
        if seed is not None and self._tree.draws is not None:
            self._tree.draws[0] = draw_key(seed)

    def head(self) -> None:
        """Run the head draft: the drafter runs the committed tokens that it has not run yet.

        The last committed token becomes the tree's root, and its candidates join the pool. No node is attached. Nothing
        is run if the drafts of ``next_work`` include this head draft.
        """
        if self._grown is None:
            self._note_length(self.num_certain)
            self._draft_head()
            self._headed = self.num_certain

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Run the head draft, which plants the root, if it has not run, then ``budget.depth`` draft steps.

        Each draft step attaches ``budget.width`` nodes. Nothing is run if drafts of ``next_work`` have grown this tree.
        ``tree`` must be the tree for which the steps were compiled, and ``budget.width`` must be a compiled width, not
        None.
        """
        assert budget.width is not None, "steps attach a fixed number of nodes"
        grown, self._grown = self._grown, None
        if grown is not None:
            self._headed = None  # the tree has grown since
        if grown != budget:
            self.head_once()
            self.grow(budget.width, budget.depth)

    def head_once(self) -> None:
        """Run the head draft unless ``head`` has run it for the current root. A second call runs it again."""
        if self._headed != self.num_certain:
            self.head()
        self._headed = None

    # ==== drafts below tokens that the host does not know yet ====

    def note_next(self, budget: Budget) -> None:
        """Note that drafts of ``next_work`` are launched; the next ``extend`` gets the tokens that the drafts read."""
        self._next = budget

    def has_grown(self, budget: Budget) -> bool:
        """Return whether drafts of ``next_work`` have grown the tree of ``budget`` below the last committed token."""
        return self._grown == budget

    def next_work(self, passed: PassedRows, width: int, depth: int) -> Launch:
        """Return a function that runs a head draft on the tokens that a pass commits, then ``depth`` draft steps.

        The function is to be called in a CUDA graph. When the graph is launched, ``is_current`` must be True, and the
        caller must then call ``note_next``.

        Args:
            passed: the pass's accepted rows, of which at most ``most_read`` are read.
            width: nodes that a draft step attaches.
        """
        head, levels = self._next_head(passed), self.levels.work(width, depth)

        def run() -> Sequence[Tensor]:
            if self._tree.draws is not None:  # the target's draws depend on positions
                self._tree.draws[1:].copy_(passed.root())
            head()
            return levels()

        return run

    def _has_read(self, count: int) -> bool:
        """Return whether drafts of ``next_work`` have read the ``count`` tokens that were just committed."""
        self._grown, self._next = self._next, None
        if count > self.most_read:
            self._grown = None
        if self._grown is not None:
            self._headed = self.num_certain
        return self._grown is not None

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """Whether all committed tokens have been read, and no work on them is deferred."""

    @abstractmethod
    def _next_head(self, passed: PassedRows) -> Launch:
        """Return a function that runs ``next_work``'s head draft and writes the root's position for the draft steps."""

    def _note_length(self, num_certain: int) -> None:
        """Note the number of committed tokens at the next root: the target's draws depend on positions."""
        if self._draw_weights is not NOTHING_DRAWN and self._tree.draws is not None:
            self._tree.draws[1] = num_certain - 1

    def cost(self, budget: Budget) -> Sequence[Step]:
        """Return the steps of a proposal with ``budget``: head, a grow step per draft step but the last, finish."""
        width = budget.width or 1
        levels = [Step("grow", width)] * (budget.depth - 1)
        return [Step("head", self._head_width), *levels, Step("finish", width)]

    @property
    @abstractmethod
    def num_certain(self) -> int:
        """Return the number of committed tokens of the request."""

    @abstractmethod
    def _draft_head(self) -> None:
        """Run the steps of the head draft. Called by ``head``."""

    @property
    def root_position(self) -> int:
        """Position or cache slot of the tree's root, an input of the draft steps; 0 if these steps do not use it."""
        return 0

    def captures(self, depths: Sequence[int]) -> Iterator[Capture]:
        """Yield the CUDA graphs that drafts of each of ``depths`` draft steps launch. Prepare them between requests."""
        return self.levels.captures(depths)

    def grow(self, width: int, depth: int) -> None:
        """Run ``depth`` draft steps after the head draft.

        Each draft step attaches the ``width`` best candidates, anywhere in the tree.
        """
        self.levels.run(self.root_position, width, depth)


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
        """Run W tokens at any positions, write their KV entries to ``caches``, and return ``(logits [W, V],)``.

        ``mask`` [W, T] bool covers the slots from ``offsets[0]`` on; all rows attend to all earlier slots. The KV
        entries are written from slot ``offsets[1]`` on.
        """
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
        rows: [R] int64 indices into ``nodes`` whose logits are computed; None computes all.
    """
    offsets = torch.cat([root, root + first])
    positions = root + tree.depths[nodes]
    return call(weights, caches, tree.tokens[nodes], positions, tree.ancestors[nodes], offsets, rows).logits


class HeadStep(CallStep[ModelCall]):
    """Run the newly committed tokens (padded to W), make the last one the tree's root, and add its top-k candidates.

    Tokens before the root may have no KV entry, or a KV entry at a tree slot. For a memory-bound model, recomputing all
    of these tokens costs about as much as one token, and saves moving cache rows.
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
    """Attach the W best candidates, run the draft model on them, and add their top-k continuations to the pool."""

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

    The KV entry of row r is written to slot root + N + r, after the slots of the tree. The top-k candidates are written
    to ``edges`` and ``candidates``, not into the tree.
    """

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        place: Tensor,  # [1] int64: the root's position
        nodes: Tensor,  # [W] int64
        tokens: Tensor,  # [W] int64, the drafted successor of each node
        edges: Tensor,  # [W, C] float32, output: log-probabilities of the first ``num_considered`` columns
        candidates: Tensor,  # [W, C] int64, output: token ids
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        rows = torch.arange(nodes.shape[0], device=nodes.device)
        mask = torch.cat([tree.ancestors[nodes], rows[:, None] == rows], dim=1)  # [W, N + W]
        offsets = torch.cat([place, place + tree.num_nodes])
        positions = place + tree.depths[nodes] + 1
        logits = self._call(weights, caches, tokens.clone(), positions, mask, offsets).logits
        count = num_considered(tree, edges.shape[1])
        found = likeliest(logits, count)
        edges[:, :count] = found[0]
        candidates[:, :count] = found[1]
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
        edges: Tensor,  # [R, C] float32
        candidates: Tensor,  # [R, C] int64
        *tree_buffers: Tensor,
    ) -> tuple[Tensor]:
        tree = TokenTree(*tree_buffers)
        plant_root(tree, tokens[row])
        count = num_considered(tree, edges.shape[1])
        offer(tree, torch.zeros_like(row), edges[row, :count], candidates[row, :count], knots)
        return (row.clone(),)
