"""The target model at run time: prefill, plain steps, verification and commit."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from yggdrasil.acceptance.greedy import walk_greedy
from yggdrasil.engine.targets.steps import PlainLogitsStep, PlainStep, VerifyLogitsStep, VerifyStep
from yggdrasil.errors import YggdrasilError
from yggdrasil.native.direct import VerifiedRows, direct
from yggdrasil.predictor.features import RepetitionFigures
from yggdrasil.runtime.layer_rows import LayerRows
from yggdrasil.runtime.passes import Forward, HostBuffer, ModelCall, PrefillStep, fitting_or_widest
from yggdrasil.runtime.runner import ModelRunner, row_mover
from yggdrasil.tree.token_tree import TokenTree


class Outcome(NamedTuple):
    """Accepted tokens and rows of one target pass."""

    tokens: list[int]  # accepted tokens, then the bonus token
    rows: list[int]  # accepted rows of the pass, the root's first
    states: Tensor  # [R, H] float32, last hidden states of the pass: of all rows, or of the last accepted one
    layers: Mapping[int, Tensor]  # layer -> hidden states of the accepted rows, [len(tokens), H]
    nodes: Sequence[int] = ()  # tree nodes of the accepted rows, the root's first; empty for a plain step
    expected: float | None = None  # tokens expected by the verified nodes' scores, if the device ranked them
    last: int = 0  # row of ``states`` that produced the last token

    @property
    def hidden(self) -> Tensor:
        """The target's hidden state from which the last token was chosen, [H] float32."""
        return self.states[self.last]


class PromptReader(ABC):
    """Base class of targets: cache, ranked nodes and input buffers, with the prefill and plain steps."""

    def __init__(self, runner: ModelRunner, tree: TokenTree, prefill_widths: Sequence[int]) -> None:
        device = runner.loaded.device
        self.runner = runner
        self.text = runner.text
        self.figures = RepetitionFigures()
        self.order = torch.arange(tree.num_nodes, device=device)  # nodes of the tree from best to worst
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
        """Define the steps "plain-logits" and "verify-logits" of ``verify_widths``, which return logits.

        Further calls have no effect.
        """
        runner = self.runner
        if ("plain-logits", 1) in runner.defined:
            return
        inputs = [self._tokens.tensor[:1], self._start.tensor]
        runner.define("plain-logits", 1, PlainLogitsStep(runner.call), inputs)
        verify_step = NativeVerifyLogitsStep if runner.backend == "native" else VerifyLogitsStep
        for width in verify_widths:
            if width > 1:
                inputs = [self._start.tensor, self.order[:width], *self._tree.tensors()]
                runner.define("verify-logits", width, verify_step(runner.call), inputs)

    def write_position(self, token: int | None = None) -> None:
        """Write the number of cached tokens, and the id ``token`` if given, to the input buffers of the next pass."""
        if token is not None:
            self._tokens.write(token)
        self._start.write(self.length)

    @property
    def start(self) -> Tensor:
        """Input buffer [1] int64 of all passes: the number of cached tokens, the first slot that a pass writes."""
        return self._start.tensor

    @property
    def length(self) -> int:
        """Number of committed tokens whose KV entries are in the cache: all but the last, the root of the next tree."""
        return self.text.num_rows

    def prepare_cache(self, num_tokens: int) -> None:
        """Prepare the KV cache for a text of at most ``num_tokens`` tokens, prompt and answer.

        The cache of a long text is backed by huge pages.
        """
        self.runner.prepare_cache(num_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the target's vocabulary."""
        return self.runner.call.vocab_size

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Iterator[Outcome]:
        """Run the prompt ``tokens`` (token ids) from index ``start`` on, in chunks, and yield an outcome for each.

        KV entries of the first ``start`` tokens, fewer than all, must be in the cache. An outcome's ``layers`` are of
        its chunk's tokens. The last outcome has the argmax token after the prompt.
        """
        for outcome, _ in self.prefill_with_logits(tokens, start):
            yield outcome

    @abstractmethod
    def prefill_with_logits(self, tokens: Sequence[int], start: int = 0) -> Iterator[tuple[Outcome, Tensor]]:
        """Run the prompt ``tokens`` from index ``start`` on, in chunks, and yield (outcome, logits [1, V]) for each.

        KV entries of the first ``start`` tokens, fewer than all, must be in the cache. The logits are those after the
        chunk's last token. The last outcome has the argmax token after the prompt.
        """

    def _chunks(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, int]]:
        """Yield (width, number of tokens) of each prefill step after writing its inputs. The caller runs the step."""
        self.text.begin(tokens, start)
        self.prepare_cache(len(tokens))
        while self.length < len(tokens):
            width = fitting_or_widest(self.prefill_widths, len(tokens) - self.length)
            chunk = tokens[self.length : self.length + width]
            self._tokens.write(*chunk)
            self._start.write(self.length)
            self._last.write(len(chunk) - 1)
            yield width, len(chunk)

    def _keep_states(self, length: int) -> None:
        """Copy the recurrent states if at most one chunk of the prompt of ``length`` tokens is left to run."""
        if self.runner.states is not None and length - self.length <= self.prefill_widths[-1]:
            self.runner.states.keep()


class TargetModel(PromptReader):
    """Target that verifies one tree after the text in its cache, with acceptance in its steps."""

    ranks_nodes = False  # the engine writes ``order`` and may choose the verify width after drafting
    host_tree = None  # all drafters grow the tree that the steps read

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

    def prefill_with_logits(self, tokens: Sequence[int], start: int = 0) -> Iterator[tuple[Outcome, Tensor]]:
        """Run the prompt ``tokens`` from index ``start`` on, in chunks, and yield (outcome, logits [1, V]) for each.

        KV entries of the first ``start`` tokens, fewer than all, must be in the cache. The logits are those after the
        chunk's last token. The last outcome has the argmax token after the prompt.

        Raises:
            YggdrasilError: a logit is not finite.
        """
        for width, count in self._chunks(tokens, start):
            choice, best, hidden, logits, *layers = self.runner.step("prefill", width)()
            _check_finite(best)
            rows = list(range(count))
            self.runner.keep(rows)
            self._keep_states(len(tokens))
            yield Outcome([int(choice)], rows, hidden, self._layers(layers, rows)), logits

    def plain(self, token: int) -> Outcome:
        """Run a pass of one row, the last committed token (id ``token``), and return the argmax token after it.

        The outcome has this token and the accepted row 0. The caller must then ``commit`` the row.

        Raises:
            YggdrasilError: a logit is not finite.
        """
        self._tokens.write(token)
        self._start.write(self.text.num_rows)
        choice, best, hidden, *layers = self.runner.step("plain", 1)()
        _check_finite(best)
        return Outcome(choice.tolist(), [0], hidden, self._layers(layers, [0]))

    def verify(self, width: int) -> Sequence[Tensor]:
        """Run the first ``width`` nodes of ``order``, the tree's best, through the target.

        Returns:
            Summary [2 + 4W] int64 as ``VerifyStep`` returns it, hidden states [W, H], [W, H] of each layer that a
                drafter reads.
        """
        self._start.write(self.text.num_rows)
        return self.runner.step("verify", width)()

    def accept(self, outputs: Sequence[Tensor], width: int) -> Outcome:
        """Return the tokens and rows that a verification of ``width`` nodes accepted.

        ``outputs`` is the result of ``verify``.

        Raises:
            YggdrasilError: logits are not finite.
        """
        summary, hidden, *layers = outputs
        count, finite, *rest = summary.tolist()
        if not finite:
            raise not_finite()
        rows, nodes = rest[:count], rest[3 * width :]
        tokens = rest[width : width + count]
        path = [nodes[row] for row in rows]
        return Outcome(tokens, rows, hidden, self._layers(layers, rows), path, last=rows[-1])

    def accept_on_host(self, outputs: Sequence[Tensor], width: int, tree: TokenTree) -> Outcome:
        """Return what ``accept`` returns, but find the path of the target's argmax tokens on the host.

        ``outputs`` is the result of ``verify`` for ``width`` nodes of ``tree``, and is copied to the host.

        Raises:
            YggdrasilError: logits are not finite.
        """
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
        """Return each verified row's node, and the token that the target chooses after it, [W] int64 each.

        ``outputs`` is the result of ``verify``. The returned tensors stay on its device.
        """
        summary = outputs[0]
        return summary[2 + 3 * width :], summary[2 + 2 * width : 2 + 3 * width]

    def commit(self, rows: Sequence[int]) -> None:
        """Move the KV entries of ``rows`` to the slots after the committed tokens, and count them as committed.

        ``rows`` are those of ``Outcome``: ascending row indices of the last pass.
        """
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
    """Return, not raise, the YggdrasilError for logits that are NaN or infinite."""
    return YggdrasilError(
        "the target's logits are not finite (NaN or infinity): its weights are damaged or overflow in this dtype; "
        "check the checkpoint or decode with --dtype float32"
    )


class _NativeRows:
    """The rows of a step's passes, in buffers that every pass overwrites."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._rows: VerifiedRows | None = None

    def run(
        self, weights: list[Tensor], caches: list[Tensor], root: Tensor, chosen: Tensor, tree_buffers: Sequence[Tensor]
    ) -> tuple[VerifiedRows, Forward]:
        """Run the nodes ``chosen`` of a tree through the model, as ``read_tree`` does.

        Every call must pass the same buffers as the first.
        """
        if self._rows is None:  # every call has the buffers with which the step was defined
            tree = TokenTree(*tree_buffers)
            self._rows = VerifiedRows(
                chosen, root, (tree.tokens, tree.parents, tree.depths, tree.scores, tree.ancestors)
            )
            self._select, self._accept = direct("select_rows", self._rows), direct("accept_rows", self._rows)
        rows = self._rows
        self._select()
        return rows, self._call(weights, caches, rows.tokens, rows.positions, rows.ancestors, rows.offsets)

    def accept(self) -> None:
        """Write the summary of the last pass from its argmax tokens and their logits."""
        self._accept()


class NativeVerifyStep(VerifyStep):
    """``VerifyStep`` over fixed buffers: selecting and accepting rows are one native call each."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__(call)
        self._native = _NativeRows(call)

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], root: Tensor, chosen: Tensor, *tree_buffers: Tensor
    ) -> tuple[Tensor, ...]:
        """Do what ``VerifyStep.forward`` does, with the same arguments and results.

        Every call must pass the same buffers as the first. The next call overwrites the summary.
        """
        rows, found = self._native.run(weights, caches, root, chosen, tree_buffers)
        best, choices = found.best_tokens()
        rows.best.copy_(best)
        rows.choices.copy_(choices)
        self._native.accept()
        return rows.summary, found.hidden.float(), *found.layers


class NativeVerifyLogitsStep(VerifyLogitsStep):
    """``VerifyLogitsStep`` over fixed buffers: selecting rows is one native call."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__(call)
        self._native = _NativeRows(call)

    def forward(
        self, weights: list[Tensor], caches: list[Tensor], root: Tensor, chosen: Tensor, *tree_buffers: Tensor
    ) -> tuple[Tensor, ...]:
        """Do what ``VerifyLogitsStep.forward`` does, with the same arguments and results.

        Every call must pass the same buffers as the first. The next call overwrites the first result, the rows' layout.
        """
        rows, found = self._native.run(weights, caches, root, chosen, tree_buffers)
        return rows.layout, found.logits, found.hidden.float(), *found.layers
