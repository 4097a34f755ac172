"""The target model at run time: prefill, plain steps, verification and commit."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from yggdrasil.acceptance.greedy import walk_greedy
from yggdrasil.engine.targets.steps import NativeVerifyStep, PlainLogitsStep, PlainStep, VerifyLogitsStep, VerifyStep
from yggdrasil.errors import YggdrasilError
from yggdrasil.predictor.features import RepetitionFigures
from yggdrasil.runtime.buffers import HostBuffer
from yggdrasil.runtime.kept_text import KeptText
from yggdrasil.runtime.layer_rows import LayerRows
from yggdrasil.runtime.runner import ModelRunner, row_mover
from yggdrasil.runtime.traced import PrefillStep
from yggdrasil.tree.token_tree import TokenTree
from yggdrasil.tree.widths import fitting_or_widest


class Outcome(NamedTuple):
    """Accepted tokens and rows of one target pass."""

    tokens: list[int]  # accepted tokens, then the bonus token
    rows: list[int]  # accepted rows of the pass, the root's first
    states: Tensor  # [R, H] float32, last hidden states of the pass
    layers: Mapping[int, Tensor]  # layer -> hidden states of the accepted rows, [len(tokens), H]
    nodes: Sequence[int] = ()  # tree nodes of the accepted rows, the root's first; empty for a plain step
    expected: float | None = None  # tokens expected by the verified nodes' scores, if the device ranked them
    last: int = 0  # row of ``states`` that produced the last token

    @property
    def hidden(self) -> Tensor:
        """Return the hidden state [H] that produced the last token. Computed on demand, as few policies read it."""
        return self.states[self.last]


class Target(Protocol):
    """Protocol of targets. ``LogitTarget`` accepts on the host, the others on the device."""

    order: Tensor  # [N] int64, nodes of the tree from best to worst
    ranks_nodes: bool  # verification writes ``order`` itself, so the verify width is chosen before drafting

    @property
    def length(self) -> int:
        """Return the number of committed tokens in the cache."""

    def expect(self, num_tokens: int) -> None:
        """Prepare the cache for ``num_tokens`` tokens, prompt and answer: a long text gets huge pages."""

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary."""

    @property
    def text(self) -> KeptText:
        """Return the committed text, to which the engine appends accepted tokens."""

    @property
    def figures(self) -> RepetitionFigures:
        """Return the repetition features of the text, computed on demand."""

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Iterator[Outcome]:
        """Prefill a prompt and yield an outcome per chunk. The last one has the first new token.

        The first ``start`` tokens, fewer than all, must be in the cache already.
        """

    def plain(self, token: int) -> Outcome:
        """Run the last committed token and choose its successor."""

    def verify(self, width: int) -> Sequence[Tensor]:
        """Launch verification of the ``width`` best nodes."""

    def accept(self, outputs: Sequence[Tensor], width: int) -> Outcome:
        """Wait for a verification of ``width`` nodes and return its outcome."""

    def accept_on_host(self, outputs: Sequence[Tensor], width: int, tree: TokenTree) -> Outcome:
        """Return the outcome of a verification; unlike ``accept``, the host finds the accepted path in ``tree``."""

    def guesses(self, outputs: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor]:
        """Return each verified row's node and the likely token after it, [W] int64 each."""

    def commit(self, rows: Sequence[int]) -> None:
        """Move the KV entries of an outcome's rows after the committed text, and count them."""


class PromptReader(ABC):
    """Base of targets: cache, ranked nodes and input buffers, with the prefill and plain steps."""

    def __init__(self, runner: ModelRunner, tree: TokenTree, prefill_widths: Sequence[int]) -> None:
        device = runner.loaded.device
        self.runner = runner
        self.text = runner.text
        self.figures = RepetitionFigures()
        self.order = torch.arange(tree.num_nodes, device=device)
        self._tree = tree
        self.prefill_widths = sorted(prefill_widths)
        self._tokens = HostBuffer(self.prefill_widths[-1], device)
        self._start = HostBuffer(1, device)
        self._last = HostBuffer(1, device)
        for width in self.prefill_widths:
            inputs = [self._tokens.tensor[:width], self._start.tensor, self._last.tensor]
            runner.define("prefill", width, PrefillStep(runner.call), inputs)
        runner.define("plain", 1, PlainStep(runner.call), [self._tokens.tensor[:1], self._start.tensor])

    def define_logits_steps(self, verify_widths: Sequence[int]) -> None:
        """Declare the steps "plain-logits" and "verify-logits", unless they are declared."""
        runner = self.runner
        if ("plain-logits", 1) in runner.defined:
            return
        inputs = [self._tokens.tensor[:1], self._start.tensor]
        runner.define("plain-logits", 1, PlainLogitsStep(runner.call), inputs)
        for width in verify_widths:
            if width > 1:
                inputs = [self._start.tensor, self.order[:width], *self._tree.tensors()]
                runner.define("verify-logits", width, VerifyLogitsStep(runner.call), inputs)

    def write_place(self, token: int | None = None) -> None:
        """Set the length of the text, and a plain step's token, as inputs of the next pass."""
        if token is not None:
            self._tokens.write(token)
        self._start.write(self.length)

    @property
    def start(self) -> Tensor:
        """Return the input [1] int64 that has the length of the text."""
        return self._start.tensor

    @property
    def length(self) -> int:
        """Return the number of committed tokens in the cache."""
        return self.text.num_rows

    def expect(self, num_tokens: int) -> None:
        """Prepare the cache for ``num_tokens`` tokens, prompt and answer: a long text gets huge pages."""
        self.runner.expect(num_tokens)

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        return self.runner.call.vocab_size

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Iterator[Outcome]:
        """Prefill ``tokens`` from ``start`` and yield an outcome per chunk. The last one has the first new token.

        The ``layers`` of an outcome are the hidden states of its chunk.
        """
        for outcome, _ in self.read(tokens, start):
            yield outcome

    @abstractmethod
    def read(self, tokens: Sequence[int], start: int = 0) -> Iterator[tuple[Outcome, Tensor]]:
        """Do what ``prefill`` does, and yield (outcome, logits [1, V] after the chunk)."""

    def _chunks(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, int]]:
        """Yield (width, number of tokens) of each prefill step after writing its inputs. The caller runs the step."""
        self.text.begin(tokens, start)
        self.expect(len(tokens))
        while self.length < len(tokens):
            width = fitting_or_widest(self.prefill_widths, len(tokens) - self.length)
            chunk = tokens[self.length : self.length + width]
            self._tokens.write(*chunk)
            self._start.write(self.length)
            self._last.write(len(chunk) - 1)
            yield width, len(chunk)

    def _keep_states(self, length: int) -> None:
        """Copy the recurrent states after a prompt of ``length`` tokens, and before its last chunk."""
        if self.runner.states is not None and length - self.length <= self.prefill_widths[-1]:
            self.runner.states.keep()


class TargetModel(PromptReader):
    """Target that verifies one tree after the text in its cache, with acceptance in its steps."""

    ranks_nodes = False  # the engine writes ``order`` and may choose the verify width after drafting

    def __init__(
        self, runner: ModelRunner, tree: TokenTree, verify_widths: Sequence[int], prefill_widths: Sequence[int]
    ) -> None:
        super().__init__(runner, tree, prefill_widths)
        self._move = row_mover(runner.cache)
        verify_step = NativeVerifyStep if runner.backend == "native" else VerifyStep
        for width in verify_widths:
            if width == 1:  # width 1 is a plain step
                continue
            inputs = [self._start.tensor, self.order[:width], *tree.tensors()]
            runner.define("verify", width, verify_step(runner.call), inputs)

    def read(self, tokens: Sequence[int], start: int = 0) -> Iterator[tuple[Outcome, Tensor]]:
        for width, count in self._chunks(tokens, start):
            choice, best, hidden, logits, *layers = self.runner.step("prefill", width)()
            _check_finite(best)
            rows = list(range(count))
            self.runner.keep(rows)
            self._keep_states(len(tokens))
            yield Outcome([int(choice)], rows, hidden, self._layers(layers, rows)), logits

    def plain(self, token: int) -> Outcome:
        """Run ``token``, the last committed one, and choose its successor. ``commit`` must follow."""
        self._tokens.write(token)
        self._start.write(self.text.num_rows)
        choice, best, hidden, *layers = self.runner.step("plain", 1)()
        _check_finite(best)
        return Outcome(choice.tolist(), [0], hidden, self._layers(layers, [0]))

    def verify(self, width: int) -> Sequence[Tensor]:
        """Launch verification of the ``width`` best nodes of ``order``. ``accept`` returns the outcome."""
        self._start.write(self.text.num_rows)
        return self.runner.step("verify", width)()

    def accept(self, outputs: Sequence[Tensor], width: int) -> Outcome:
        """Return the outcome of a verification."""
        summary, hidden, *layers = outputs
        count, finite, *rest = summary.tolist()
        if not finite:
            raise not_finite()
        rows, nodes = rest[:count], rest[3 * width :]
        tokens = rest[width : width + count]
        path = [nodes[row] for row in rows]
        return Outcome(tokens, rows, hidden, self._layers(layers, rows), path, last=rows[-1])

    def accept_on_host(self, outputs: Sequence[Tensor], width: int, tree: TokenTree) -> Outcome:
        """Return the outcome of a verification; unlike ``accept``, the host finds the accepted path in ``tree``."""
        summary, hidden, *layers = outputs
        values = summary.tolist()
        if not values[1]:
            raise not_finite()
        choices, nodes = values[2 + 2 * width : 2 + 3 * width], values[2 + 3 * width :]
        tokens, parents = tree.tokens[nodes].tolist(), tree.parents[nodes].tolist()
        exists = torch.isfinite(tree.scores[nodes]).tolist()
        rows = walk_greedy(nodes, tokens, parents, exists, choices)
        chosen = [choices[row] for row in rows]
        path = [nodes[row] for row in rows]
        return Outcome(chosen, rows, hidden, self._layers(layers, rows), path, last=rows[-1])

    def guesses(self, outputs: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor]:
        """Return each verified row's node and the target's token after it, [W] int64 each, on the device."""
        summary = outputs[0]
        return summary[2 + 3 * width :], summary[2 + 2 * width : 2 + 3 * width]

    def commit(self, rows: Sequence[int]) -> None:
        """Move the KV entries of the accepted rows after the committed text, and count them."""
        text = self.text
        if rows and rows[-1] >= len(rows):  # rows ascend: else each is already at its slot
            self._move([text.num_rows + row for row in rows], text.num_rows)
        self.runner.keep(rows)

    def _layers(self, layers: Sequence[Tensor], rows: Sequence[int]) -> Mapping[int, Tensor]:
        """Return the hidden states of ``rows`` by layer, for drafters."""
        return LayerRows(self.runner.call.hidden_layers, layers, rows) if layers else {}


def _check_finite(best: Tensor) -> None:
    (value,) = best.tolist()  # faster than item(), which goes through PyTorch's dispatcher
    if value != value or value in (float("inf"), float("-inf")):
        raise not_finite()


def not_finite() -> YggdrasilError:
    """Return the error for logits that are NaN or infinite."""
    return YggdrasilError(
        "the target's logits are not finite (NaN or infinity): its weights are damaged or overflow in this dtype; "
        "check the checkpoint or decode with --dtype float32"
    )
