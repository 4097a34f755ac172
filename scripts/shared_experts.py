#!/usr/bin/env python3
"""Count the experts that the rows of a tree choose together, and what a choice of trees by their experts would gain.

    OMP_NUM_THREADS=1 scripts/train_mixture.py --out runs/mixture
    OMP_NUM_THREADS=1 scripts/shared_experts.py runs/mixture

Behind places of held-out text the bundled drafter grows Equal-Growth Trees, and the mixture reads all their nodes in
one pass. Of each node its experts are recorded, and whether the mixture's greedy text takes it. Four choices of nodes
are compared on the second half of the text; the first half gives what they know:

- probability: the likeliest nodes, as many as pay at the mean cost of so many rows. This is what the policy does;
- width by experts: the likeliest nodes, as many as pay at the cost of their own experts;
- nodes by experts: the nodes of the highest expected tokens over the cost of their experts, added one by one;
- nodes by predicted experts: likewise, but a node's experts are those that its token chose in other text; the predicted
  cost of a number of rows is right on average.

No time is measured: an iteration costs the bytes that it reads, those of the experts chosen by any row among them.

Dims: L layers, N nodes, E experts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import typer
from torch import Tensor
from train_mixture import TINY
from transformers import AutoModelForCausalLM

from yggdrasil.cli import run_script

Array = npt.NDArray[np.float64]
_BATCH, _PREFIX = 16, 64  # trees of a pass, tokens before a root
_PRIOR = 4.0  # rows of all tokens that a token's own experts are mixed with


class Tree(NamedTuple):
    """A drafted tree and what the mixture made of it. Node 0 is the root."""

    tokens: npt.NDArray[np.int64]  # [N]
    parents: npt.NDArray[np.int64]  # [N]
    edges: Array  # [N] the drafter's log-probabilities of nodes given their parents
    experts: npt.NDArray[np.bool_]  # [L, N, E]
    taken: npt.NDArray[np.bool_]  # [N] whether a node is the greedy choice after its parent


class Prices(NamedTuple):
    """Gigabytes that a pass reads, by published layer sizes."""

    name: str
    experts: float  # all chosen experts of one row, in all layers
    others: float  # attention, routers, shared experts, output layer
    row: float = 0.01  # what one more row adds otherwise, in plain passes
    draft: float = 0.1  # what drafting a tree costs, in plain passes


# MXFP4 experts and 8-bit others (gpt-oss-20b), 4.5 bits of all (others).
PRICES = {
    (32, 4): [Prices("gpt-oss-20b", 24 * 4 * 0.0132, 1.30)],
    (128, 8): [Prices("Qwen3-30B-A3B", 48 * 8 * 0.00265, 0.77)],
    (64, 6): [Prices("Granite-4.0-H-Tiny", 40 * 6 * 0.00133, 0.50)],
    (72, 10): [Prices("Granite-4.0-H-Small", 40 * 10 * 0.00531, 2.82)],
}
ONLY_EXPERTS = Prices("experts alone", 1.0, 0.0, 0.0, 0.0)


# ==== trees ====


def read(model: Any, prefix: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits [B, N, V] of trees behind ``prefix`` [B, P], and a mixture's router logits [B, N, E] by layer.

    Args:
        tokens, parents: [B, N] int64; node 0 is the root, which attends to the prefix.
    """
    batch, size = tokens.shape
    before = prefix.shape[1]
    ancestors = torch.eye(size, dtype=torch.bool).repeat(batch, 1, 1)
    depths = torch.zeros(batch, size, dtype=torch.int64)
    each = torch.arange(batch)
    for node in range(1, size):
        ancestors[:, node] |= ancestors[each, parents[:, node]]
        depths[:, node] = depths[each, parents[:, node]] + 1
    seen = torch.ones(before + size, before + size).tril().bool().repeat(batch, 1, 1)
    seen[:, before:, before:] = ancestors
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    positions = torch.cat([torch.arange(before).repeat(batch, 1), before + depths], dim=1)
    rows = torch.cat([prefix, tokens], dim=1)
    found = model.model(rows, attention_mask=mask, position_ids=positions, use_cache=False, **routing(model))
    routed = [each.view(batch, before + size, -1)[:, before:] for each in getattr(found, "router_logits", ())]
    return model.lm_head(found.last_hidden_state[:, before:]), routed


def routing(model: Any) -> dict[str, bool]:
    """Return the arguments with which a mixture returns its router logits; none of another model."""
    return {"output_router_logits": True} if hasattr(model.config, "num_local_experts") else {}


def draft(drafter: Any, prefix: Tensor, root: Tensor, width: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Grow Equal-Growth Trees of ``depth`` steps of ``width`` nodes; return tokens, parents and edges [B, N]."""
    batch = len(root)
    tokens, parents, edges = root[:, None], torch.zeros_like(root)[:, None], torch.zeros(batch, 1)
    scores, rows = torch.zeros(batch, 1), torch.arange(batch)[:, None]
    taken = torch.zeros(batch, 0, dtype=torch.bool)
    for _ in range(depth):
        logits, _ = read(drafter, prefix, tokens, parents)
        likely, found = logits.float().log_softmax(-1).topk(width, dim=-1)  # [B, N, K]
        size = tokens.shape[1]
        taken = torch.cat([taken, torch.zeros(batch, size * width - taken.shape[1], dtype=torch.bool)], dim=1)
        pool = (scores[:, :, None] + likely).flatten(1).masked_fill(taken, -torch.inf)
        best, entries = pool.topk(width, dim=-1)
        taken = taken.scatter(1, entries, True)
        parents = torch.cat([parents, entries // width], dim=1)
        tokens = torch.cat([tokens, found.flatten(1)[rows, entries]], dim=1)
        edges = torch.cat([edges, likely.flatten(1)[rows, entries]], dim=1)
        scores = torch.cat([scores, best], dim=1)
    return tokens, parents, edges


@torch.no_grad()
def trees(
    mixture: Any, drafter: Any, text: npt.NDArray[np.int64], count: int, width: int, depth: int
) -> Iterator[Tree]:
    """Yield the trees behind ``count`` places of ``text``."""
    places = np.linspace(_PREFIX, len(text) - 1, count).astype(int)
    for batch in np.array_split(places, -(-count // _BATCH)):
        prefix = torch.from_numpy(np.stack([text[place - _PREFIX : place] for place in batch]))
        tokens, parents, edges = draft(drafter, prefix, torch.from_numpy(text[batch]), width, depth)
        logits, routed = read(mixture, prefix, tokens, parents)
        greedy = logits.argmax(-1).gather(1, parents)
        experts = torch.stack([chosen(each, mixture.config.num_experts_per_tok) for each in routed], dim=1)
        for number in range(len(batch)):
            yield Tree(
                tokens[number].numpy(), parents[number].numpy(), edges[number].double().numpy(),
                experts[number].numpy(), (greedy == tokens)[number].numpy(),
            )  # fmt: skip


def chosen(logits: Tensor, count: int) -> Tensor:
    """Return [.., E] bool, True for the ``count`` experts of the highest router ``logits`` [.., E]."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(count, dim=-1).indices, True)


@torch.no_grad()
def routes(mixture: Any, text: npt.NDArray[np.int64], length: int = 256) -> npt.NDArray[np.bool_]:
    """Return [L, T, E] bool, the experts that the rows of ``text`` [T] choose, read in sequences of ``length``."""
    rows = torch.from_numpy(text[: len(text) // length * length]).view(-1, length)
    found = []
    for part in rows.split(8):
        logits = mixture.model(part, use_cache=False, **routing(mixture)).router_logits
        found.append(torch.stack([chosen(each, mixture.config.num_experts_per_tok) for each in logits]))
    return torch.cat(found, dim=1).numpy()


# ==== choices ====


class Known(NamedTuple):
    """What choices know from other places: acceptance by the drafter's probability, experts by token."""

    borders: Array  # of log-probabilities
    shares: Array  # accepted share between two borders
    chances: Array  # [V, L, E] probability that a token's row chooses an expert

    def scores(self, tree: Tree) -> Array:
        """Return [N], the probability that each node's path is accepted; 1 for the root."""
        edge = self.shares[np.searchsorted(self.borders, tree.edges)]
        scores = np.ones(len(edge))
        for node in range(1, len(edge)):
            scores[node] = scores[tree.parents[node]] * edge[node]
        return scores


def learn(known: Sequence[Tree], routed: npt.NDArray[np.bool_], text: npt.NDArray[np.int64], vocabulary: int) -> Known:
    """Fit ``Known`` on trees, and on the experts ``routed`` [L, T, E] of the rows of ``text``."""
    edges = np.concatenate([tree.edges[1:] for tree in known])
    taken = np.concatenate([tree.taken[1:] for tree in known])
    borders = np.quantile(edges, np.linspace(0, 1, 13)[1:-1])
    places = np.searchsorted(borders, edges)
    shares = np.array([taken[places == place].mean() if (places == place).any() else 0.0 for place in range(12)])
    text = text[: routed.shape[1]]
    mean = routed.mean(1)
    counts = np.bincount(text, minlength=vocabulary)
    chances = np.zeros((vocabulary, *mean.shape)) + _PRIOR * mean
    np.add.at(chances, text, routed.transpose(1, 0, 2))
    return Known(borders, shares, chances / (counts + _PRIOR)[:, None, None])


class Costs(NamedTuple):
    """Costs of passes in plain passes, for chances [L, N, E] that nodes choose experts."""

    prices: Prices
    per_row: int  # experts that a row chooses in a layer
    factors: Array | None = None  # by the number of rows, experts that passes read over those predicted; None: 1

    def of(self, absent: Array, rows: int) -> float:
        """Return the cost of a pass of ``rows`` rows; ``absent`` [L, E] is the chance that no row chooses an expert."""
        plain, share = self.prices.experts + self.prices.others, (1 - absent).sum(1).mean() / self.per_row
        share *= 1.0 if self.factors is None else self.factors[rows - 1]
        read = (self.prices.others + self.prices.experts * share) / plain
        return float(read + self.prices.row * (rows - 1) + self.prices.draft)

    def exactly(self, tree: Tree, nodes: Sequence[int]) -> float:
        """Return the cost of a pass over ``nodes``."""
        return self.of(1.0 - tree.experts[:, nodes].any(1), len(nodes))


def fitted(costs: Costs, known: Sequence[Tree], orders: Sequence[npt.NDArray[np.int64]], chances: Array) -> Costs:
    """Return ``costs`` with the factors by which predictions from ``chances`` [V, L, E] are right on average.

    Without them a choice by predictions would differ in the number of rows, whatever the experts.
    """
    sums = np.zeros((2, len(orders[0])))
    for tree, order in zip(known, orders, strict=True):
        absent = (1.0 - chances[tree.tokens[order]]).cumprod(0)  # [N, L, E]
        read = np.logical_or.accumulate(tree.experts[:, order], axis=1)
        sums += [read.sum((0, 2)), (1.0 - absent).sum((1, 2))]
    return costs._replace(factors=sums[0] / sums[1])


def by_probability(scores: Array, mean: Array) -> list[int]:
    """Return the likeliest nodes, as many as pay at the cost ``mean`` [N] of a pass over 1, 2, ... rows."""
    order = np.argsort(-scores, kind="stable")
    return order[: int(np.argmax(scores[order].cumsum() / mean)) + 1].tolist()


def by_experts(tree: Tree, scores: Array, chances: Array, costs: Costs, *, is_ordered: bool) -> list[int]:
    """Return the nodes of the highest expected tokens over cost, of those found by adding one node after another.

    The next node is the likeliest one if ``is_ordered``, else that of the best ratio among children of those there.
    """
    nodes, absent = [0], 1.0 - chances[:, 0]
    best, kept = 1.0 / costs.of(absent, 1), 1
    order = np.argsort(-scores, kind="stable")
    while len(nodes) < len(scores):
        open_nodes = [node for node in range(1, len(scores)) if node not in nodes and tree.parents[node] in nodes]
        total = scores[nodes].sum()
        if is_ordered:
            node = int(order[len(nodes)])
        else:
            ratios = [
                (total + scores[each]) / costs.of(absent * (1 - chances[:, each]), len(nodes) + 1)
                for each in open_nodes
            ]
            node = open_nodes[int(np.argmax(ratios))]
        nodes, absent = [*nodes, node], absent * (1 - chances[:, node])
        if (value := (total + scores[node]) / costs.of(absent, len(nodes))) > best:
            best, kept = value, len(nodes)
    return nodes[:kept]


def accepted(tree: Tree, nodes: Sequence[int]) -> int:
    """Return the tokens that a pass over ``nodes`` gives, the bonus token included."""
    length, node = 1, 0
    while (found := [each for each in nodes if each and tree.parents[each] == node and tree.taken[each]]) != []:
        node, length = found[0], length + 1
    return length


# ==== report ====


def compare(known: Sequence[Tree], other: Sequence[Tree], learned: Known, costs: Costs) -> list[str]:
    """Return rows of a table: rows, tokens and cost of an iteration, and the gain of each choice over the first."""
    size = len(other[0].tokens)
    ordered = [np.argsort(-learned.scores(tree), kind="stable") for tree in known]
    mean = np.array([
        np.mean([costs.exactly(tree, order[:count]) for tree, order in zip(known, ordered, strict=True)])
        for count in range(1, size + 1)
    ])  # fmt: skip
    mean = np.maximum.accumulate(mean)
    likely = fitted(costs, known, ordered, learned.chances)
    names = ("probability", "width by experts", "nodes by experts", "nodes by predicted experts")
    figures: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in names}
    for tree in other:
        scores, exact = learned.scores(tree), tree.experts.astype(float)
        predicted = learned.chances[tree.tokens].transpose(1, 0, 2)
        choices = (
            by_probability(scores, mean), by_experts(tree, scores, exact, costs, is_ordered=True),
            by_experts(tree, scores, exact, costs, is_ordered=False),
            by_experts(tree, scores, predicted, likely, is_ordered=False),
        )  # fmt: skip
        for name, nodes in zip(names, choices, strict=True):
            figures[name].append(
                (len(nodes), accepted(tree, nodes), float(scores[nodes].sum()), costs.exactly(tree, nodes))
            )
    base = np.array(figures["probability"])
    return [_row(costs.prices.name, name, np.array(found), base) for name, found in figures.items()]


def _row(prices: str, name: str, found: Array, base: Array) -> str:
    """Return one row; gains are in percent of the time a token takes, with the deviation of resampled places."""
    random = np.random.default_rng(0)

    def gain(column: int, places: Any) -> float:
        took = [each[places, 3].sum() / each[places, column].sum() for each in (found, base)]
        return float(100 * (1 - took[0] / took[1]))

    whole = slice(None)
    spread = [np.std([gain(each, random.integers(0, len(base), len(base))) for _ in range(200)]) for each in (1, 2)]
    rows, tokens, _, cost = found.mean(0)
    return (
        f"| {prices} | {name} | {rows:.1f} | {tokens:.2f} | {cost:.2f} | {cost / tokens:.3f} "
        f"| {gain(1, whole):.1f} ± {spread[0]:.1f} | {gain(2, whole):.1f} ± {spread[1]:.1f} |"
    )


def counted(found: Sequence[Tree], learned: Known, routed: npt.NDArray[np.bool_], count: int) -> list[str]:
    """Return rows of a table: distinct experts of a layer, in experts of one row, for several numbers of rows."""
    random = np.random.default_rng(0)
    total = routed.shape[2]
    lines = []
    for rows in (2, 4, 8):
        starts = random.integers(0, routed.shape[1] - rows, 500)
        chains = [routed[:, start : start + rows].any(1).sum(1).mean() for start in starts]
        separate = [routed[:, random.integers(0, routed.shape[1], rows)].any(1).sum(1).mean() for _ in starts]
        kept = [np.argsort(-learned.scores(tree), kind="stable")[:rows] for tree in found]
        together = [tree.experts[:, nodes].any(1).sum(1).mean() for tree, nodes in zip(found, kept, strict=True)]
        even = total * (1 - (1 - count / total) ** rows)
        cells = [each / count for each in (np.mean(chains), np.mean(together), np.mean(separate), even)]
        lines.append(f"| {rows} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return lines


def predicted(routed: npt.NDArray[np.bool_], text: npt.NDArray[np.int64], learned: Known, found: Sequence[Tree],
              count: int) -> list[str]:  # fmt: skip
    """Return rows of a table, one a layer: the share of a row's experts that each way predicts."""
    text = text[: routed.shape[1]]
    lines = []
    for layer, rows in enumerate(routed):
        usual = learned.chances.mean(0)[layer].argsort()[-count:]
        own = learned.chances[text, layer].argsort(-1)[:, -count:]
        shares = [
            rows[:, usual].sum() / rows.sum(), np.take_along_axis(rows, own, 1).sum() / rows.sum(),
            (rows[1:] & rows[:-1]).sum() / rows[1:].sum(),
        ]  # fmt: skip
        siblings = [
            (tree.experts[layer, first] & tree.experts[layer, second]).sum() / count
            for tree in found
            for first in range(1, len(tree.tokens))
            for second in range(first + 1, len(tree.tokens))
            if tree.parents[first] == tree.parents[second]
        ]
        lines.append(
            f"| {layer} | " + " | ".join(f"{100 * share:.0f}%" for share in (*shares, np.mean(siblings))) + " |"
        )
    return lines


def main(
    mixture: Annotated[Path, typer.Argument(help="Folder that train_mixture.py wrote.", exists=True, file_okay=False)],
    places: Annotated[int, typer.Option(min=4, help="Places of the text at which trees are drafted.")] = 600,
    width: Annotated[int, typer.Option(min=1, help="Nodes that a draft step attaches.")] = 4,
    depth: Annotated[int, typer.Option(min=1, help="Draft steps.")] = 4,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens from which a token's experts are learned.")] = 20_000,
) -> None:
    """Count the experts of trees and compare choices of their nodes; see the module's text."""
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    drafter = AutoModelForCausalLM.from_pretrained(TINY / "drafter", dtype=torch.float32).eval()
    count = model.config.num_experts_per_tok
    text = np.load(mixture / "held_out.npy")
    half = len(text) // 2
    first, second = text[: min(half, tokens)], text[half : half + min(half, tokens)]
    known, other = (list(trees(model, drafter, part, places // 2, width, depth)) for part in (text[:half], text[half:]))
    routed, tested = routes(model, first), routes(model, second)
    learned = learn(known, routed, first, model.config.vocab_size)
    lines = [
        "| rows | chain of text | tree | rows of other places | even, independent |", "|---|---|---|---|---|",
        *counted(other, learned, tested, count), "",
        "| layer | most frequent experts | by token | row before | sibling |", "|---|---|---|---|---|",
        *predicted(tested, second, learned, other, count), "",
        "| bytes of | choice | rows | tokens | cost | cost of a token | gain, accepted | gain, expected |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for prices in (*PRICES.get((model.config.num_local_experts, count), []), ONLY_EXPERTS):
        lines += compare(known, other, learned, Costs(prices, count))
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    run_script(main, "shared_experts")
