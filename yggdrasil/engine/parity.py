"""Compares the logits of wide passes over trees with the logits of width-1 passes over the same tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.targets.logit_target import LogitTarget
from yggdrasil.engine.targets.target import TargetModel
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.runtime.parity import (
    LayerDivergence,
    Mismatch,
    ParityReport,
    differences,
    mismatches,
    summarise_width,
    tolerance_of,
)
from yggdrasil.tree.token_tree import TokenTree


class ProbeText(NamedTuple):
    """The token ids of a prompt, with an id for reports."""

    id: str
    tokens: Sequence[int]


class Worst(NamedTuple):
    """The position with the largest logit difference between a pass of ``width`` rows and a width-1 pass."""

    difference: float
    text: ProbeText
    continuation: list[int]
    width: int
    position: int  # index in ``continuation``


@torch.inference_mode()
def measure_parity(
    assembly: Assembly,
    texts: Sequence[ProbeText],
    num_tokens: int,
    on_progress: Callable[[float], None] = lambda _: None,
) -> tuple[ParityReport, list[Mismatch]]:
    """Compare the logits of passes of every verify width with the logits of width-1 passes, on greedy tokens.

    Width-1 passes generate ``num_tokens`` greedy tokens after each text, which wide passes then verify. Wide passes
    continue from their own keys and values, as decoding does, so accumulated drift is included.

    Args:
        on_progress: receives the fraction done, 0 to 1.

    Returns:
        The report of the differences, and, by ascending width, one ``Mismatch`` per index of a text at which a wide
            pass and a width-1 pass choose different tokens.

    Raises:
        YggdrasilError: a text with its tokens is too long for the context, or the steps are CUDA graphs.
    """
    engine = assembly.engine
    longest = max(len(text.tokens) for text in texts)
    if longest + num_tokens > engine.max_length:
        raise YggdrasilError(
            f"--max-new-tokens {num_tokens} does not fit behind a prompt of {longest} tokens in the context of "
            f"{engine.max_length}; give less, or keep less of prompts with --max-prompt-tokens"
        )
    widths = [width for width in assembly.shapes.verify_widths if width > 1]
    if not isinstance(engine.target, TargetModel):
        raise YggdrasilError("captured steps, which a GPU runs, are not probed for parity; probe on the CPU")
    logits = assembly.logit_target
    probe = _Probe(logits, engine.target, engine.tree)
    distances: dict[int, list[Tensor]] = {width: [] for width in widths}
    flips: dict[int, list[Mismatch]] = {width: [] for width in widths}
    worst: Worst | None = None
    for count, text in enumerate(texts):
        reference, continuation = probe.decode(text.tokens, num_tokens)
        for step, width in enumerate(widths):
            found = probe.verify(text.tokens, continuation, width)
            distances[width].append(differences(reference, found))
            flips[width] += mismatches(text.id, width, reference, found)
            position = int(distances[width][-1].argmax())
            difference = float(distances[width][-1][position])
            if worst is None or difference > worst.difference:
                worst = Worst(difference, text, continuation, width, position)
            on_progress((count + (step + 1) / len(widths)) / len(texts))
    figures = [summarise_width(width, torch.cat(distances[width]), flips[width]) for width in widths]
    loaded = assembly.target.loaded
    is_apart = worst is not None and worst.difference > 0
    report = ParityReport(
        model=loaded.name, dtype=str(loaded.dtype).removeprefix("torch."),
        kernels="native" if is_native() else "portable", threads=loaded.num_threads, prompts=len(texts),
        widths=figures, tolerance=tolerance_of(figures),
        worst=probe.layer_divergence(worst) if is_apart and worst is not None else [],
        worst_position=f"{worst.text.id}, token {worst.position}, width {worst.width}" if is_apart and worst else "",
    )  # fmt: skip
    return report, [flip for width in widths for flip in flips[width]]


class _Probe:
    """Runner of the same tokens by width-1 passes and as trees. P is the number of compared positions."""

    def __init__(self, logits: LogitTarget, target: TargetModel, tree: TokenTree) -> None:
        self._logits, self._model, self._tree = logits, target, tree

    def decode(self, prompt: Sequence[int], count: int) -> tuple[Tensor, list[int]]:
        """Decode ``count`` (at least 1) greedy tokens after ``prompt`` by width-1 passes.

        Return (logits [count, V] from which they were chosen, their ids).
        """
        self._read(prompt)
        rows: list[Tensor] = []
        tokens = [prompt[-1]]
        for _ in range(count):
            rows.append(self._logits.run_width_one(tokens[-1])[0][0].clone())
            tokens.append(int(rows[-1].argmax()))
        return torch.stack(rows), tokens[1:]

    def verify(self, prompt: Sequence[int], continuation: Sequence[int], width: int) -> Tensor:
        """Return logits [P, V] after each token of ``continuation``, from passes over trees of ``width`` nodes.

        A path of each tree is a part of the continuation. Wrong tokens fill its other nodes.
        """
        self._read(prompt)
        text = [prompt[-1], *continuation]
        rows: list[Tensor] = []
        while len(rows) < len(continuation):
            path = self._plant(text[len(rows) :], width, len(rows))
            _, logits, *_ = self._logits.run_tree(width)
            rows.extend(logits[path].clone())
            self._logits.commit(path)
        return torch.stack(rows[: len(continuation)])

    def layer_divergence(self, worst: Worst) -> list[LayerDivergence]:
        """Return how far the hidden states of a tree pass and of width-1 passes differ in each layer, at ``worst``.

        Each layer's entry has the largest absolute difference, and its ratio to the largest absolute state of the
        width-1 pass. Both passes run eagerly.
        """
        runner = self._model.runner
        layers = range(runner.loaded.num_layers)
        call = runner.call_reading(list(layers))
        text = [worst.text.tokens[-1], *worst.continuation]
        first = worst.position - worst.position % _path_length(worst.width)
        self._read([*worst.text.tokens[:-1], *text[:first], 0])
        root, tree = self._model.length, self._tree
        path = self._plant(text[first:], worst.width, first)
        nodes = torch.arange(worst.width)
        caches = runner.cache.tensors()
        offsets = torch.tensor([root, root])
        mask = tree.ancestors[: worst.width, : worst.width].contiguous()  # operators take dense masks
        wide = call(runner.weights, caches, tree.tokens[nodes], root + tree.depths[nodes], mask, offsets).layers
        place = worst.position - first
        for step in range(place + 1):
            at = torch.tensor([root + step])
            one = torch.ones(1, 1, dtype=torch.bool)
            token = torch.tensor([text[first + step]])
            narrow = call(runner.weights, caches, token, at, one, at.expand(2).contiguous()).layers
        found = []
        for layer in layers:
            expected = narrow[layer][0].float()
            distance = float((wide[layer][path[place]].float() - expected).abs().max())
            found.append(LayerDivergence(layer, distance, distance / float(expected.abs().max())))
        return found

    def _read(self, prompt: Sequence[int]) -> None:
        """Prefill all of ``prompt`` but its last token."""
        for _ in self._model.prefill(prompt[:-1]):
            pass

    def _plant(self, text: Sequence[int], width: int, seed: int) -> list[int]:
        """Build a tree with ``text`` as one path from the root. Return the path's nodes, which are also its rows."""
        tree, vocab_size = self._tree, self._model.runner.call.vocab_size
        self._model.order.copy_(torch.arange(tree.num_nodes))
        generator = torch.Generator().manual_seed(seed)
        wrong = torch.randint(0, vocab_size, (width,), generator=generator).tolist()
        tree.plant(text[0])
        length = min(_path_length(width), len(text))
        path, others = [0], width - length
        for i, token in enumerate(text[1:length]):
            if others > 0:  # a wrong sibling first, so that accepted rows are not contiguous
                tree.attach(path[-1], wrong[i] if wrong[i] != token else (token + 1) % vocab_size, -1.0)
                others -= 1
            path.append(tree.attach(path[-1], token, -1.0))
        leaf = path[-1]
        for i in range(others):  # a wrong branch below the end of the path
            leaf = tree.attach(leaf, wrong[-1 - i], -1.0)
        return path


def _path_length(width: int) -> int:
    return max(2, width // 2)
