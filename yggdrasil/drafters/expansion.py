"""A draft model driven from the host: k-ary trees of top-k tokens, and sampled trees with their distributions.

``ExpansionDrafter`` copies a row of logits per node to the host, so it is slower than ``DraftModel``, whose steps stay
on the device. The class serves acceptance rules that need these logits, and comparisons.

Dims: W rows of a step, N tree nodes, V vocabulary of the target.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from yggdrasil.acceptance.coins import Coins
from yggdrasil.acceptance.drawn import DrawKind, DrawnTree, draw_children
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.drafters.level_drafter import RowsStep
from yggdrasil.drafters.protocol import Budget, Capabilities, Step
from yggdrasil.runtime.passes import HostBuffer, fitting
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree

_ORDER_STEP = 1e-3  # score difference between siblings: scores depend on the structure only, never on the tokens


class ExpansionDrafter:
    """Drafter that gives every node of level i ``expansion[i]`` children, as in SpecInfer.

    If ``prepare`` sets a ``kind``, the children are sampled from the draft model's distribution, processed like the
    target's, and ``drawn`` records the draws. Otherwise the children are the top-k tokens and ``drawn`` is None. The
    runner may be shared with a ``DraftModel``, one request at a time. Every node must be verified: dropping a sampled
    child because of its token would bias the output.
    """

    capabilities = Capabilities()

    def __init__(self, runner: ModelRunner, tree: TokenTree, widths: Sequence[int], vocab_size: int) -> None:
        device = runner.loaded.device
        self.name = f"model {runner.loaded.name}, level by level"
        self.drawn: DrawnTree | None = None
        self._runner, self._vocab_size = runner, vocab_size
        self.widths = sorted(widths)
        self._tokens, self._positions = (HostBuffer(self.widths[-1], device) for _ in range(2))
        self._offsets = HostBuffer(2, device)
        self._masks = {
            width: torch.zeros(width, tree.num_nodes, dtype=torch.bool, device=device) for width in self.widths
        }
        for width, mask in self._masks.items():
            inputs = [self._tokens.tensor[:width], self._positions.tensor[:width], mask, self._offsets.tensor]
            runner.define("rows", width, RowsStep(runner.call), inputs)
        self._text = runner.text

    def prepare(self, sampler: Sampler, expansion: Sequence[int], kind: DrawKind | None) -> None:
        """Set how the next request drafts.

        Args:
            sampler: processes the draft model's logits like the target's.
            expansion: entry i is the number of children of each node at depth i: (2, 2, 1) drafts 2, 4 and 4 nodes.
            kind: how children are sampled; None takes the top-k tokens.
        """
        self._sampler, self._expansion, self._kind = sampler, tuple(expansion), kind

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a request with the committed ``tokens`` (token ids).

        KV entries of the prefix shared with the last request stay.
        """
        self._text.begin(tokens, self._text.shared(tokens))

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Append committed ``tokens`` (token ids). ``states`` is not used."""
        self._text.tokens.extend(tokens)

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach the tree that ``prepare`` set, cut after ``budget.depth`` levels, to ``tree``, which has only a root.

        ``budget.width`` is not used.
        """
        self._read_text()
        self._grow(tree, budget.depth)

    def cost(self, budget: Budget) -> Sequence[Step]:
        """Return ``budget.depth`` steps, one per level, of ``budget.width`` rows each (1 row if the width is None)."""
        return [Step("rows", budget.width or 1)] * budget.depth

    def _read_text(self) -> None:
        """Run the committed tokens that have no KV entry, and in any case the root, whose logits are needed."""
        start = min(self._text.num_rows, len(self._text.tokens) - 1)
        while start < len(self._text.tokens):
            chunk = self._text.tokens[start : start + self.widths[-1]]
            numbers = torch.arange(len(chunk))
            causal = numbers <= numbers[:, None]  # no ``tril``: its threads wait awake and slow down the pass
            logits = self._read(chunk, range(start, start + len(chunk)), causal, start, start)
            start += len(chunk)
        self._text.num_rows = len(self._text.tokens)
        self._rows = {0: logits[-1]}
        self.drawn = None if self._kind is None else DrawnTree(self._kind)

    def _grow(self, tree: TokenTree, depth: int) -> None:
        root = len(self._text.tokens) - 1
        coins = self._sampler.coins("draft")
        paths: dict[int, list[int]] = {0: []}
        frontier = [0]
        for level, count in enumerate(self._expansion[:depth]):
            attached: list[int] = []
            for node in frontier:
                for order, token in enumerate(self._children(node, paths[node], count, coins)):
                    child = tree.attach(node, token, -_ORDER_STEP * (1 + order))
                    paths[child] = [*paths[node], token]
                    attached.append(child)
            frontier = attached
            if level + 1 < min(depth, len(self._expansion)):
                self._read_level(tree, frontier, root)

    def _children(self, node: int, path: Sequence[int], count: int, coins: Coins) -> list[int]:
        """Return at most ``count`` distinct tokens below ``node``. Draws are recorded in ``drawn``."""
        if path and self._sampler.ends(path[-1]):
            return []
        if self.drawn is None or self._kind is None:
            return _likeliest(self._sampler.scores(self._rows[node], path), count)
        law = self._sampler.distribution(self._rows[node], path)
        if law is None:
            return []
        self.drawn.draws[node] = draws = draw_children(law, count, self._kind, coins)
        return list(dict.fromkeys(draws.tokens))

    def _read_level(self, tree: TokenTree, nodes: Sequence[int], root: int) -> None:
        for start in range(0, len(nodes), self.widths[-1]):
            part = list(nodes[start : start + self.widths[-1]])
            logits = self._read(
                tree.tokens[part].tolist(), (root + tree.depths[part]).tolist(), tree.ancestors[part], root,
                root + part[0],
            )  # fmt: skip
            self._rows.update(zip(part, logits, strict=True))

    def _read(self, tokens: Sequence[int], positions: Sequence[int], mask: Tensor, context: int, first: int) -> Tensor:
        """Run ``tokens`` and return logits [len(tokens), V] on the CPU.

        KV entries are written to slots ``first`` onwards. ``mask`` [len(tokens), T] covers the slots from ``context``.
        """
        count = len(tokens)
        width = fitting(self.widths, count)
        buffer = self._masks[width]
        buffer.zero_()
        buffer[:count, : mask.shape[1]] = mask
        for row in range(count, width):  # padding attends only to itself
            buffer[row, min(first - context + row, buffer.shape[1] - 1)] = True
        self._tokens.write(*tokens)
        self._positions.write(*positions)
        self._offsets.write(context, first)
        logits: Tensor = self._runner.step("rows", width)()[0][:count].cpu()  # children are sampled on the host
        # Tokens that only the target's vocabulary has are never drafted.
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits.clone()


def _likeliest(scores: Tensor, count: int) -> list[int]:
    best = scores.topk(min(count, scores.shape[0]))
    return [t for t, score in zip(best.indices.tolist(), best.values.tolist(), strict=True) if score > float("-inf")]
