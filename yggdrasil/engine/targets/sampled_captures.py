"""Target passes as CUDA graphs that choose and accept tokens by a request's sampling parameters and rule.

A pass is one launch. With a grammar or bad words there are three launches (ranking, pass and acceptance), so that the
host computes the tokens allowed after each row while the pass runs.

Dims: W rows of a pass, V vocabulary, H hidden size, K top-k tokens.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from yggdrasil.acceptance.tensor_sampling import SamplingKind, SamplingTensors
from yggdrasil.engine.targets.steps import AcceptStep, layout_of, rows_of
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.passes import Readback
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.tree.token_tree import TokenTree, rank_nodes

WriteMasks = Callable[[Sequence[Sequence[int]]], None]  # takes rows of a layout: nodes, tokens, parents, existence


class SampledCaptures:
    """CUDA graphs of target passes that sample and accept on the device, by sampling kind and width.

    A sampling kind is a combination of rule and logits processors that has its own graphs. The graphs run the steps
    "plain-logits" and "verify-logits", and one "accept" step per kind.

    Args:
        order: [N] int64, receives the ranked nodes.
        start: [1] int64, the root's position.
        most: the largest number of rows of a pass.
    """

    def __init__(self, runner: ModelRunner, tree: TokenTree, order: Tensor, start: Tensor, most: int) -> None:
        assert runner.recorder is not None
        device, hidden_size = runner.loaded.device, runner.loaded.hidden_size
        self._runner, self._tree, self._order, self._start = runner, tree, order, start
        self._recorder = runner.recorder
        self._root = torch.zeros(1, dtype=torch.int64, device=device)  # node of a plain step
        self._hidden = torch.zeros(most, hidden_size, dtype=torch.float32, device=device)
        self._expected = torch.ones(1, dtype=torch.float32, device=device)
        self._most = most
        self._layout = Readback(4 * most, device)
        self._captures: dict[tuple[str, int], Capture] = {}

    @cached_property
    def sampling(self) -> SamplingTensors:
        """Return the device buffers of a request's sampling parameters, allocated on first access."""
        return SamplingTensors(self._runner.call.vocab_size, self._runner.loaded.device, self._most)

    @cached_property
    def _logits(self) -> Tensor:
        """Return the buffer of a pass's logits [most, V] float32."""
        size = self._most, self._runner.call.vocab_size
        return torch.zeros(size, dtype=torch.float32, device=self._runner.loaded.device)

    def add(self, kind: SamplingKind, widths: Sequence[int]) -> list[Capture]:
        """Define the CUDA graphs of a sampling kind for passes of ``widths`` rows. Return the new ones.

        The caller must prepare (run once) the new ones in order.
        """
        new: dict[tuple[str, int], Capture] = {}
        for width in widths:
            accept = self._name(kind)
            if (accept, width) in self._captures:
                continue
            chosen = self._root if width == 1 else self._order[:width]
            inputs = [self._logits[:width], self._start, chosen, *self._tree.tensors(), *self.sampling.inputs]
            self._runner.define(accept, width, AcceptStep(kind), inputs)
            works = {accept: partial(self._accept, kind, width)}
            if kind.is_masked:
                works = {"rank": partial(self._rank, width), "pass": partial(self._pass, width), **works}
            else:
                works = {accept: partial(self._whole, kind, width)}
            for name, work in works.items():
                if (name, width) not in self._captures:
                    new[name, width] = self._captures[name, width] = self._recorder.capture(work)
        return list(new.values())

    def launch(self, kind: SamplingKind, width: int, write_masks: WriteMasks) -> Sequence[Tensor]:
        """Launch a pass over the ``width`` best nodes of the tree; width 1 is a plain step.

        Returns its outputs on the device: the result as ``finish`` packs it, then [W, H] of each layer that a drafter
        reads.

        Args:
            kind: sampling kind, for which ``add`` has defined the graphs.
            write_masks: writes the allowed tokens. It is called only if ``kind.is_masked``, while the pass runs, with
                the rows' nodes, tokens, parents and existence.
        """
        accept = self._captures[self._name(kind), width]
        if not kind.is_masked:
            return accept()
        (layout,) = self._captures["rank", width]()
        self._layout.begin(layout)
        layers = self._captures["pass", width]()
        write_masks(self._layout.wait(4 * width).view(4, width).tolist())
        return *accept(), *layers

    def first(self, kind: SamplingKind, logits: Tensor, position: int) -> Tensor:
        """Choose a request's first token from the prefill's last logits [1, V].

        Args:
            position: index of the first token in the text: the number of prompt tokens.

        Returns:
            Int64 values on the device: the summary [6] of a pass with one accepted row (see ``VerifyStep``), then the
                bits of the log-probabilities.
        """
        root = torch.full((1,), position - 1, device=logits.device)
        others = [*self._tree.tensors(), *self.sampling.inputs]
        summary, words = AcceptStep(kind)([], [], logits.float(), root, self._root, *others)
        self.sampling.count(summary[3:4], torch.ones_like(root, dtype=torch.bool))
        return torch.cat([summary, words])

    @staticmethod
    def _name(kind: SamplingKind) -> str:
        return f"accept{kind.name}"

    # ==== captured ====

    def _whole(self, kind: SamplingKind, width: int) -> Sequence[Tensor]:
        self._rank(width)
        layers = self._pass(width)
        return *self._accept(kind, width), *layers

    def _rank(self, width: int) -> Sequence[Tensor]:
        """Rank the tree's nodes. Return (layout of the pass [4 * W],)."""
        if width == 1:
            return (torch.cat([self._root, self._root, self._root, self._root + 1]),)
        order, expected = rank_nodes(self._tree)
        self._order.copy_(order)
        self._expected.copy_(expected[width - 1 : width])
        return (layout_of(rows_of(self._order[:width], self._tree)).flatten(),)

    def _pass(self, width: int) -> Sequence[Tensor]:
        """Run the pass, keep what acceptance reads, and return the layers."""
        step = self._runner.step("plain-logits", 1) if width == 1 else self._runner.step("verify-logits", width)
        logits, hidden, *layers = step()[0 if width == 1 else 1 :]
        self._logits[:width].copy_(logits)
        self._hidden[:width].copy_(hidden)
        return layers

    def _accept(self, kind: SamplingKind, width: int) -> Sequence[Tensor]:
        """Choose and accept tokens, and move the accepted rows. Return (packed result,)."""
        summary, words = self._runner.step(self._name(kind), width)()
        packed = finish(self._runner, self._start, summary, self._expected, self._hidden, words)
        self._runner.keep_captured(self._start, summary[2 : 2 + width], summary[:1])
        if kind.shapes or kind.rule == "relaxed":
            is_accepted = torch.arange(width, device=summary.device) < summary[:1]
            self.sampling.count(summary[2 + width : 2 + 2 * width], is_accepted)
        return (packed,)


def finish(
    runner: ModelRunner, start: Tensor, summary: Tensor, expected: Tensor, hidden: Tensor, words: Tensor
) -> Tensor:
    """Move the KV entries of a pass's accepted rows to the slots after the committed tokens, and pack its result.

    The result is one int64 vector: ``summary``, the bits of ``expected`` as float64, the bits of the last accepted row
    of ``hidden``, and ``words``.

    Args:
        start: [1] int64 cache slot of the pass's first row.
        summary: [2 + 4W] int64, as ``VerifyStep`` returns it.
        expected: [1] expected tokens.
        hidden: [>= W, H] float32 hidden states of the rows.
        words: int64 bits of log-probabilities; may be empty.
    """
    width = (summary.shape[0] - 2) // 4
    count, rows = summary[:1], summary[2 : 2 + width]
    if width > 1:
        torch.ops.yggdrasil.keep_rows(runner.cache.rows(), start, rows, count)
    last = hidden.index_select(0, rows.index_select(0, count - 1))
    bits = expected.to(torch.float64).view(torch.int64), last.view(torch.int64).flatten()
    return torch.cat([summary, *bits, words])
