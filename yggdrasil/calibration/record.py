"""Record acceptance traces: the tree that would have been drafted at every position of the target's own text."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from yggdrasil.drafters.draft_model import DraftModel
from yggdrasil.engine.build import Assembly
from yggdrasil.models.runner import ModelRunner
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.tree.token_tree import TokenTree

HIDDEN_CHUNK = 128


def record_document(
    assembly: Assembly, drafter: DraftModel, prompt: Sequence[int], generated: Sequence[int], document: int
) -> TraceSet:
    """Trees of every draft width at each generated position that has ``max_depth`` tokens after it.

    Position p is the root ``text[p]``: its tree guesses ``text[p + 1:]``; its hidden state is the one that chose it,
    the one the depth predictor reads at run time.
    """
    text = [*prompt, *generated]
    max_depth, tree = assembly.shapes.max_depth, assembly.engine.tree
    positions = range(len(prompt), len(text) - max_depth)
    hidden = hidden_states(assembly.target, text[: positions.stop])
    columns: dict[int, list[dict[str, np.ndarray]]] = {width: [] for width in assembly.shapes.draft_widths}
    drafter.begin(text[: positions.start + 1])
    with torch.inference_mode():
        for position in positions:
            if position > positions.start:
                drafter.extend([text[position]], {})
            for width, rows in columns.items():
                drafter.head(tree)
                drafter.grow(tree, width, max_depth)
                rows.append(_tree_row(tree, width * max_depth, text[position + 1 : position + 1 + max_depth]))
    stacked = {
        width: {name: np.stack([row[name] for row in rows]) for name in rows[0]} for width, rows in columns.items()
    }
    return TraceSet(
        hidden=hidden[positions.start - 1 : positions.stop - 1].numpy(),
        document=np.full(len(positions), document, dtype=np.int64),
        position=np.arange(positions.start, positions.stop, dtype=np.int64),
        **{name: {width: part[name] for width, part in stacked.items()} for name in _FIELDS},
    )


_FIELDS = ("scores", "depth", "hit", "edge_log_probability", "parent")


def _tree_row(tree: TokenTree, num_nodes: int, continuation: Sequence[int]) -> dict[str, np.ndarray]:
    nodes = slice(1, 1 + num_nodes)
    depths, parents = tree.depths[nodes].numpy(), tree.parents[nodes].numpy()
    truth = np.array(continuation)
    matches = np.concatenate([[True], tree.tokens[nodes].numpy() == truth[depths - 1]])
    ancestors = tree.ancestors[: num_nodes + 1, : num_nodes + 1].numpy()
    hits = ~(ancestors & ~matches[None, :]).any(axis=1)
    return {
        "scores": tree.scores[nodes].numpy().copy(),
        "depth": depths.astype(np.int8),
        "hit": hits[1:],
        "edge_log_probability": tree.edges[nodes].numpy().copy(),
        "parent": (parents - 1).astype(np.int16),
    }


@torch.inference_mode()
def hidden_states(runner: ModelRunner, text: Sequence[int]) -> Tensor:
    """The target's state after each token of ``text``, [len(text), H] float32; runs eagerly, a chunk at a time."""
    device = runner.loaded.device
    states = []
    for start in range(0, len(text), HIDDEN_CHUNK):
        tokens = torch.tensor(text[start : start + HIDDEN_CHUNK], device=device)
        rows = torch.arange(len(tokens), device=device)
        mask = rows[:, None] >= rows[None, :]
        offsets = torch.tensor([start, start], device=device)
        forward = runner.call(runner.weights, runner.cache.tensors(), tokens, start + rows, mask, offsets, rows)
        states.append(forward.hidden.float().cpu())
    return torch.cat(states)


def concatenate(parts: Sequence[TraceSet]) -> TraceSet:
    """One set of all documents, in order."""
    arrays = [part.to_arrays() for part in parts]
    return TraceSet.from_arrays({name: np.concatenate([array[name] for array in arrays]) for name in arrays[0]})
