"""Records acceptance traces: the trees that a drafter drafts at every position of the target's own text."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from yggdrasil.drafters.protocol import Budget, Drafter
from yggdrasil.engine.assembly import Assembly
from yggdrasil.predictor.features import repetition_figures
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree

HIDDEN_CHUNK = 128


def record_document(
    assembly: Assembly, drafter: Drafter, prompt: Sequence[int], generated: Sequence[int], document: int
) -> TraceSet:
    """Record the drafter's trees of every draft width at the generated positions of one document.

    With ``text`` = ``prompt`` + ``generated``, the tree of position p has the root ``text[p]`` and drafts
    ``text[p + 1:]``. Its features are the depth predictor's: the hidden state from which the root was chosen, the
    text's repetition, the root's candidates. The last ``max_depth`` generated positions are not recorded, because they
    are too close to the end for a whole tree.

    Args:
        assembly: target and drafter; its token tree is overwritten.
        drafter: the assembly's draft model or head.
        prompt: token ids of the prompt.
        generated: token ids of the target's answer.
        document: number of the document in the traces.
    """
    text = [*prompt, *generated]
    max_depth, tree = assembly.shapes.max_depth, assembly.engine.tree
    positions = range(len(prompt), len(text) - max_depth)
    hidden, layers = hidden_states_of(assembly.target, text[: positions.stop])
    columns: dict[int, list[dict[str, np.ndarray]]] = {width: [] for width in assembly.shapes.draft_widths}
    head: list[np.ndarray] = []
    steps = drafter.capabilities.steps
    assert steps is not None, "only drafters with compiled steps are recorded"
    known = 1 if drafter.capabilities.layers else positions.start + 1  # tokens that are read without hidden states
    drafter.begin(text[:known])
    with torch.inference_mode():
        for position in positions:
            certain = text[known : position + 1]
            if certain:  # each with the states before it
                drafter.extend(certain, {layer: state[known - 1 : position] for layer, state in layers.items()})
            known = position + 1
            for width, rows in columns.items():
                steps.head()
                if len(head) == len(rows):
                    head.append(tree.root_guesses().numpy())
                drafter.propose(tree, Budget(max_depth, width))
                on_host = TokenTree(*(buffer.cpu() for buffer in tree.tensors()))
                row = _tree_row(on_host, max_depth * width, text[position + 1 : position + 1 + max_depth])
                rows.append(row | _offered_row(on_host, 1 + (max_depth - 1) * width))
    stacked = {
        width: {name: np.stack([row[name] for row in rows]) for name in rows[0]} for width, rows in columns.items()
    }
    return TraceSet(
        hidden=hidden[positions.start - 1 : positions.stop - 1].numpy(),
        repetition=repetition_figures(text[: positions.stop], positions.start),
        head=np.stack(head),
        document=np.full(len(positions), document, dtype=np.int64),
        position=np.arange(positions.start, positions.stop, dtype=np.int64),
        root=np.array(text[positions.start : positions.stop], dtype=np.int32),
        **{name: {width: part[name] for width, part in stacked.items()} for name in _FIELDS},
    )


_FIELDS = (
    "scores", "depth", "hit", "edge_log_probability", "parent", "token", "offered_token", "offered_fall",
)  # fmt: skip


def _tree_row(tree: TokenTree, size: int, continuation: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the arrays of the first ``size`` nodes below the root (see ``TraceSet``), in the order of attachment."""
    nodes = slice(1, 1 + size)
    exists = np.isfinite(tree.scores[nodes].numpy())
    tokens, depths, parents = tree.tokens.numpy(), tree.depths.numpy(), tree.parents.numpy()
    truth = np.array([-1, *continuation])  # the target's token at each depth; the root has none
    matches = tokens == truth[np.minimum(depths, len(continuation))]
    matches[0] = True
    hits = ~(tree.ancestors[nodes].numpy() & ~matches[None, :]).any(axis=1)
    return {
        "scores": np.where(exists, tree.scores[nodes].numpy(), -np.inf).astype(np.float32),
        "depth": np.where(exists, depths[nodes], 0).astype(np.int8),
        "hit": hits & exists,
        "edge_log_probability": np.where(exists, tree.edges[nodes].numpy(), 0.0).astype(np.float32),
        "parent": np.where(exists, parents[nodes] - 1, -1).astype(np.int16),
        "token": np.where(exists, tokens[nodes], 0).astype(np.int32),
    }


def _offered_row(tree: TokenTree, read: int) -> dict[str, np.ndarray]:
    """Return the candidates below the first ``read`` nodes that no draft step attached (see ``TraceSet``)."""
    tokens, scores = (
        pool.view(tree.num_nodes, tree.candidates)[:read].numpy() for pool in (tree.pool_tokens, tree.pool_scores)
    )
    exists, above = np.isfinite(scores), tree.scores[:read, None].numpy()
    return {
        "offered_token": np.where(exists, tokens, 0).astype(np.int32),
        "offered_fall": np.where(exists, scores - np.where(exists, above, 0.0), -np.inf).astype(np.float32),
    }


@torch.inference_mode()
def hidden_states_of(runner: ModelRunner, text: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the target's hidden states for every token of ``text``.

    The first element is the last hidden states, [len(text), H] float32 on the CPU. The second maps layers that a
    drafter reads to their states, [len(text), H] in the model's dtype and on its device. The model runs eagerly, on
    chunks of ``text``.
    """
    device = runner.loaded.device
    states: list[Tensor] = []
    layers: dict[int, list[Tensor]] = {layer: [] for layer in runner.call.hidden_layers}
    for forward in runner.read(torch.tensor(text, device=device), HIDDEN_CHUNK):
        states.append(forward.hidden.float().cpu())
        for layer, state in zip(runner.call.hidden_layers, forward.layers, strict=True):
            layers[layer].append(state)
    return torch.cat(states), {layer: torch.cat(parts) for layer, parts in layers.items()}


def concatenate(parts: Sequence[TraceSet]) -> TraceSet:
    """Concatenate the positions of several acceptance traces, in order."""
    arrays = [part.to_arrays() for part in parts]
    return TraceSet.from_arrays({name: np.concatenate([array[name] for array in arrays]) for name in arrays[0]})
