"""Example trees: whole iterations of real requests, with what was drafted, verified and accepted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from torch import Tensor

from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.iteration import Iteration
from yggdrasil.reports.facts import TREE_COLUMNS
from yggdrasil.scheduling.executors import Actions, InOrderExecutor
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.token_tree import TokenTree


@dataclass
class Snapshot:
    """A tree after acceptance, before the next one takes its place."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    verified: set[int]
    accepted: list[int]
    bonus: int
    shape: str


@dataclass
class TreeRecorder:
    """Runs stages in order and keeps every drafted tree that is verified; an ``Executor``."""

    tree: TokenTree
    order: Tensor  # [N] int64, nodes from best to worst, where the target reads them
    kept: list[Snapshot] = field(default_factory=list)
    _in_order: InOrderExecutor = field(default_factory=InOrderExecutor)

    def run(self, schedule: Schedule, actions: Actions[Any], state: Any, times: Counter[str]) -> None:
        def accept_and_keep(iteration: Iteration) -> None:
            actions["accept"](iteration)
            if iteration.verifies_tree:
                self.kept.append(self._snapshot(iteration))

        watched = {**actions, "accept": accept_and_keep} if "accept" in actions else actions
        self._in_order.run(schedule, watched, state, times)

    def _snapshot(self, iteration: Iteration) -> Snapshot:
        assert iteration.outcome is not None
        size = self.tree.size
        nodes = sorted(self.order[: iteration.shape.verify_width].tolist())  # by row
        verified = {node for node in nodes if node < size}
        buffers = (self.tree.tokens, self.tree.parents, self.tree.depths, self.tree.scores)
        tokens, parents, depths, scores = (buffer[:size].tolist() for buffer in buffers)
        accepted, bonus = [nodes[row] for row in iteration.outcome.rows], iteration.outcome.tokens[-1]
        shape = " x ".join(map(str, iteration.shape))
        return Snapshot(tokens, parents, depths, scores, verified, accepted, bonus, shape)


def record_trees(
    decoder: Decoder, prompts: Sequence[str | Sequence[int]], each: int = 2, max_new_tokens: int = 32
) -> pd.DataFrame:
    """Trees of ``prompts`` under the decoder's own policy, ``each`` a prompt, those with most accepted.

    Columns are ``TREE_COLUMNS``. Roles are root, accepted, verified (refused by the target) and drafted (pruned before
    verification).
    """
    engine = decoder.assembly.engine
    usual = engine.executor
    rows: list[tuple[object, ...]] = []
    try:
        for number, prompt in enumerate(prompts):
            recorder = engine.executor = TreeRecorder(engine.tree, engine.target.order)
            decoder.generate(prompt, max_new_tokens=max_new_tokens)
            order = sorted(range(len(recorder.kept)), key=lambda i: -len(recorder.kept[i].accepted))
            for iteration in sorted(order[:each]):
                rows += _rows(decoder, number, iteration, recorder.kept[iteration])
    finally:
        engine.executor = usual
    return pd.DataFrame(rows, columns=list(TREE_COLUMNS))


def _rows(decoder: Decoder, prompt: int, iteration: int, snapshot: Snapshot) -> list[tuple[object, ...]]:
    import math

    def role(node: int) -> str:
        if node == 0:
            return "root"
        if node in snapshot.accepted:
            return "accepted"
        return "verified" if node in snapshot.verified else "drafted"

    def text(token: int) -> str:
        return repr(decoder.tokenizer.decode([token]))[1:-1].replace(" ", "␣")  # a space should be seen

    return [
        (
            prompt, iteration, node, snapshot.parents[node] if node else -1, snapshot.depths[node], role(node),
            text(token), math.exp(snapshot.scores[node]), text(snapshot.bonus) if node == 0 else "",
            snapshot.shape,
        )
        for node, token in enumerate(snapshot.tokens)
    ]  # fmt: skip
