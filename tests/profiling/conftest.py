"""Small trees grown one node at a time, with the text they are checked against."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import pytest

from yggdrasil.profiling.traces import TraceSet

VOCABULARY = 4
MAX_EDGE = float(np.log(1.0 - 1e-4))


class GrownTraces(NamedTuple):
    traces: TraceSet
    tokens: dict[int, list[list[int]]]  # width -> row -> node -> token
    future: list[list[int]]  # row -> what the target really generated next


class MakeTraces(Protocol):
    def __call__(self, lengths: tuple[int, ...] = (9, 4, 12), max_depth: int = 4, seed: int = 0) -> GrownTraces: ...


@dataclass
class Tree:
    scores: list[float] = field(default_factory=list)
    edges: list[float] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)

    def attach(self, score: float, edge: float, parent: int, token: int, future: list[int]) -> None:
        depth = self.depths[parent] + 1 if parent >= 0 else 1
        on_path = self.hits[parent] if parent >= 0 else True
        self.scores.append(score)
        self.edges.append(edge)
        self.parents.append(parent)
        self.depths.append(depth)
        self.tokens.append(token)
        self.hits.append(on_path and token == future[depth - 1])


def grow_tree(random: np.random.Generator, future: list[int], width: int, max_depth: int) -> Tree:
    """Grow an Equal-Growth Tree with a drafter that likes the true token somewhat more than the others."""
    tree = Tree()
    pool: list[tuple[float, float, int, int]] = []  # score, edge, parent, token

    def open_node(node: int) -> None:
        depth = tree.depths[node] if node >= 0 else 0
        weights = random.dirichlet(np.ones(VOCABULARY)) + 1e-3
        weights[future[depth]] += 0.7
        for token, edge in enumerate(np.minimum(np.log(weights / weights.sum()), MAX_EDGE).tolist()):
            pool.append((edge + (tree.scores[node] if node >= 0 else 0.0), edge, node, token))

    open_node(-1)
    for _ in range(max_depth):
        pool.sort(reverse=True)
        taken, pool[:] = pool[:width], pool[width:]
        for candidate in taken:
            tree.attach(*candidate, future)
        for node in range(len(tree.scores) - width, len(tree.scores)):
            open_node(node)
    return tree


@pytest.fixture
def make_traces() -> MakeTraces:
    """Return a maker of traces of a few short documents for widths 1, 2 and 3."""

    def make(lengths: tuple[int, ...] = (9, 4, 12), max_depth: int = 4, seed: int = 0) -> GrownTraces:
        random = np.random.default_rng(seed)
        texts = [random.integers(0, VOCABULARY, size=length + max_depth + 1).tolist() for length in lengths]
        future = [text[at + 1 :] for text, length in zip(texts, lengths, strict=True) for at in range(length)]
        trees = {width: [grow_tree(random, row, width, max_depth) for row in future] for width in (1, 2, 3)}
        traces = TraceSet(
            hidden=random.normal(size=(len(future), 5)).astype(np.float32),
            repetition=random.normal(size=(len(future), 6)).astype(np.float32),
            head=random.normal(size=(len(future), 3)).astype(np.float32),
            document=np.repeat(10 * np.arange(len(lengths)) + 5, lengths),
            position=np.concatenate([np.arange(length) for length in lengths]),
            root=np.array([text[at] for text, length in zip(texts, lengths, strict=True) for at in range(length)]),
            scores={w: np.array([tree.scores for tree in rows], dtype=np.float32) for w, rows in trees.items()},
            depth={w: np.array([tree.depths for tree in rows], dtype=np.int8) for w, rows in trees.items()},
            hit={w: np.array([tree.hits for tree in rows]) for w, rows in trees.items()},
            edge_log_probability={
                w: np.array([tree.edges for tree in rows], dtype=np.float32) for w, rows in trees.items()
            },
            parent={w: np.array([tree.parents for tree in rows], dtype=np.int16) for w, rows in trees.items()},
            token={w: np.array([tree.tokens for tree in rows], dtype=np.int32) for w, rows in trees.items()},
        )
        return GrownTraces(traces, {w: [tree.tokens for tree in rows] for w, rows in trees.items()}, future)

    return make
