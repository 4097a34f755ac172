"""The target model of captured steps: ranking, verification, acceptance and commit in one launch.

The host writes a few integers before a step and reads one small vector after it; the device does not wait for it in
between. Ranking the tree is part of verification, so the verify width is chosen before drafting.

Dims: W verified nodes, H hidden size.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from yggdrasil.acceptance.tensor_sampling import SamplingKind, SamplingTensors, choose
from yggdrasil.engine.targets.steps import SampledPlainStep, SampledVerifyStep, VerifyStep
from yggdrasil.engine.targets.target import Outcome, PromptReader, RowsWithRunnersUp, not_finite
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.buffers import Readback
from yggdrasil.runtime.forward import NUM_RUNNERS_UP
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.growth import rank_nodes
from yggdrasil.tree.token_tree import TokenTree


def check_capturable(schedule: Schedule) -> None:
    """Check that captured steps support ``schedule``.

    Raises:
        YggdrasilError: the schedule accepts on the host.
    """
    if schedule.variants["accept"] == "host":
        raise YggdrasilError(
            "captured steps, which a GPU runs, accept on the device and cannot run the stage accept=host; take a plan "
            "with accept=device, such as calibrate --device cuda writes"
        )


class CapturedTarget(PromptReader):
    """Target of the backend "cudagraph", with the interface of ``TargetModel``."""

    ranks_nodes = True

    def __init__(
        self, runner: ModelRunner, tree: TokenTree, verify_widths: Sequence[int], prefill_widths: Sequence[int]
    ) -> None:
        assert runner.recorder is not None
        super().__init__(runner, tree, prefill_widths)
        self._hidden_words = runner.loaded.hidden_size // 2
        most = max(1, *verify_widths)
        words = 2 + 4 * most + 1 + self._hidden_words + (2 + NUM_RUNNERS_UP) * most
        self._readback = Readback(words, runner.loaded.device)
        self._recorder = runner.recorder
        self._kind: SamplingKind | None = None  # None: greedy, without logits processors
        self._verify_widths = [width for width in verify_widths if width > 1]  # width 1 is a plain step
        self.captures: dict[tuple[str, int], Capture] = {}
        for width in self.prefill_widths:
            self.captures["prefill", width] = self._recorder.capture(partial(self._read_one, "prefill", width))
        self.captures["plain", 1] = self._recorder.capture(partial(self._read_one, "plain", 1))
        for width in self._verify_widths:
            inputs = [self._start.tensor, self.order[:width], *tree.tensors()]
            runner.define("verify", width, VerifyStep(runner.call), inputs)
            self.captures["verify", width] = self._recorder.capture(partial(self._verify, "verify", width))

    @cached_property
    def sampling(self) -> SamplingTensors:
        """Return the sampling parameters' buffers on the device, created on first use."""
        return SamplingTensors(self.vocab_size, self.runner.loaded.device)

    def choose_by(self, kind: SamplingKind | None) -> list[Capture]:
        """Set how later requests choose tokens. Return the captures of a new kind, which must be prepared first."""
        self._kind = kind
        if kind is None or ("plain" + kind.name, 1) in self.captures:
            return []
        plain, verify, others = "plain" + kind.name, "verify" + kind.name, self.sampling.tensors()
        call, recorder = self.runner.call, self._recorder
        inputs = [self._tokens.tensor[:1], self._start.tensor, *others]
        self.runner.define(plain, 1, SampledPlainStep(call, kind), inputs)
        new = {(plain, 1): recorder.capture(partial(self._read_one, plain, 1, kind))}
        for width in self._verify_widths:
            inputs = [self._start.tensor, self.order[:width], *self._tree.tensors(), *others]
            self.runner.define(verify, width, SampledVerifyStep(call, kind), inputs)
            new[verify, width] = recorder.capture(partial(self._verify, verify, width, kind))
        self.captures |= new
        return list(new.values())

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Iterator[Outcome]:
        for outcome, logits in self.read(tokens, start):
            if self._kind is not None and self.length == len(tokens):
                yield outcome._replace(tokens=[self._first(self._kind, logits)])
            else:
                yield outcome

    def _first(self, kind: SamplingKind, logits: Tensor) -> int:
        """Sample the first token of a request from ``logits`` [1, V]."""
        position = torch.full((1,), self.length, device=logits.device)
        choice = choose(kind, logits, position, None, self.sampling.tensors())
        self.sampling.count(choice, torch.ones_like(choice))
        return int(self._readback.read(choice)[0])

    def read(self, tokens: Sequence[int], start: int = 0) -> Iterator[tuple[Outcome, Tensor]]:
        for width, count in self._chunks(tokens, start):
            packed, logits, *others = self._launch("prefill", width)
            outputs = packed, *others
            self.text.num_rows += count
            rows = list(range(count))
            # Cloned, because the next chunk overwrites them.
            layers = {layer: states.clone() for layer, states in self._layers(outputs, slice(count)).items()}
            yield self._outcome(outputs[0], 1)._replace(rows=rows, layers=layers), logits

    def plain(self, token: int) -> Outcome:
        """Run ``token``, the last committed one, and choose its successor."""
        outputs = self.launch_plain(token)
        outputs = self._readback.wait(outputs[0].numel()), *outputs[1:]
        seen = self._seen(outputs[0], 1, [token])
        return self._outcome(outputs[0], 1)._replace(layers=self._layers(outputs, slice(1)), seen=seen)

    def launch_plain(self, token: int) -> Sequence[Tensor]:
        """Launch a plain step without waiting for it."""
        self._tokens.write(token)
        self._start.write(self.length)
        packed, *layers = self.captures[self._step("plain"), 1]()
        self._readback.begin(packed)
        return packed, *layers

    def verify(self, width: int) -> Sequence[Tensor]:
        """Launch ranking, verification, acceptance and commit of the ``width`` best nodes. ``accept`` waits for it."""
        self._start.write(self.length)
        packed, *layers = self.captures[self._step("verify"), width]()
        self._readback.begin(packed)
        return packed, *layers

    def accept(self, outputs: Sequence[Tensor], width: int) -> Outcome:
        """Wait for verification and return its outcome."""
        packed = self._readback.wait(outputs[0].numel())
        outcome = self._outcome(packed, width)
        nodes = packed[2 + 3 * width : 2 + 4 * width].tolist()
        outcome = outcome._replace(nodes=[nodes[row] for row in outcome.rows])
        seen = self._seen(packed, width)
        return outcome._replace(layers=self._layers(outputs, outcome.rows), seen=seen)

    def accept_on_host(self, outputs: Sequence[Tensor], width: int, tree: TokenTree) -> Outcome:
        """Raise YggdrasilError: captured steps accept on the device."""
        raise YggdrasilError("captured steps accept on the device; take a plan with accept=device")

    def guesses(self, outputs: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor]:
        """Return each verified row's node and the target's token after it, [W] int64 each, on the device."""
        return _nodes_and_choices(outputs[0], width)

    def read_choices(self, outputs: Sequence[Tensor], width: int) -> tuple[list[int], list[int]]:
        """Return what ``guesses`` returns, as lists. Call this after ``accept``."""
        nodes, choices = _nodes_and_choices(self._readback.wait(outputs[0].numel()), width)
        return nodes.tolist(), choices.tolist()

    def commit(self, rows: Sequence[int]) -> None:
        """Count the accepted rows, which the device has already moved."""
        self.text.num_rows += len(rows)

    def _step(self, name: str) -> str:
        return name if self._kind is None else name + self._kind.name

    def _launch(self, name: str, width: int) -> Sequence[Tensor]:
        """Replay a capture and copy its packed result to the host: the only transfer from the device per iteration."""
        packed, *layers = self.captures[name, width]()
        return self._readback.read(packed), *layers

    def _outcome(self, packed: Tensor, width: int) -> Outcome:
        words = 2 + 4 * width
        count, finite, *rest = packed[:words].tolist()
        if not finite:
            raise not_finite()
        expected = packed[words : words + 1].view(torch.float64)
        hidden = packed[words + 1 : words + 1 + self._hidden_words].view(torch.float32).clone()[None]
        return Outcome(rest[width : width + count], rest[:count], hidden, {}, expected=float(expected))

    def _seen(self, packed: Tensor, width: int, tokens: list[int] | None = None) -> RowsWithRunnersUp | None:
        """Return every existing row's token and top-k tokens from the packed result; None if not computed."""
        if not self.gives_runners_up:
            return None
        found = packed[2 + 4 * width + 1 + self._hidden_words :].clone()
        read, exist, runners_up = found[:width], found[width : 2 * width].bool(), found[2 * width :].view(width, -1)
        return RowsWithRunnersUp(read[exist].tolist() if tokens is None else tokens, runners_up[exist])

    def _layers(self, outputs: Sequence[Tensor], rows: list[int] | slice) -> dict[int, Tensor]:
        wanted = self.runner.call.hidden_layers
        return {layer: states[rows] for layer, states in zip(wanted, outputs[1:], strict=True)}

    # ==== captured ====

    def _read_one(self, name: str, width: int, kind: SamplingKind | None = None) -> Sequence[Tensor]:
        """Run a prefill or plain step. Return (packed result, *layers), for prefill with logits before the layers."""
        choice, best, hidden, *layers = self.runner.step(name, width)()
        if kind is not None and kind.shapes:
            self.sampling.count(choice, torch.ones_like(choice))
        logits, layers = (layers[:1], layers[1:]) if name == "prefill" else ([], layers)
        one, row = torch.ones_like(choice), torch.zeros_like(choice)
        summary = torch.cat([one, torch.isfinite(best).to(torch.int64), row, choice, choice, row])
        return _pack(summary, one, hidden, self._runners_up(row, one, layers)), *logits, *layers

    def _verify(self, name: str, width: int, kind: SamplingKind | None = None) -> Sequence[Tensor]:
        """Rank, verify, accept and move the accepted rows. Return (packed result, *layers)."""
        order, expected = rank_nodes(self._tree)
        self.order.copy_(order)
        summary, hidden, *layers = self.runner.step(name, width)()
        count, rows = summary[:1], summary[2 : 2 + width]
        if kind is not None and kind.shapes:
            self.sampling.count(summary[2 + width : 2 + 2 * width], torch.arange(width, device=count.device) < count)
        torch.ops.yggdrasil.keep_rows(self.runner.cache.rows(), self._start.tensor, rows, count)
        last = rows.index_select(0, count - 1)
        nodes = summary[2 + 3 * width :]
        exist = torch.isfinite(self._tree.scores[nodes]).to(torch.int64)
        runners_up = self._runners_up(self._tree.tokens[nodes], exist, layers)
        return _pack(summary, expected[width - 1 : width], hidden.index_select(0, last), runners_up), *layers

    def _runners_up(self, tokens: Tensor, exist: Tensor, layers: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows' tokens [W], existence [W] and flattened top-k tokens [W * K]; empty if not computed."""
        return [tokens, exist, layers[-1].flatten()] if self.gives_runners_up else []


def _nodes_and_choices(packed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    choices, nodes = packed[2 + 2 * width : 2 + 4 * width].view(2, width)
    return nodes, choices


def _pack(summary: Tensor, expected: Tensor, hidden: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Pack results into one int64 vector: summary [2 + 4W], bits of ``expected`` as float64 and of ``hidden`` [1, H].

    ``others`` are appended.
    """
    words = expected.to(torch.float64).view(torch.int64), hidden.contiguous().view(torch.int64).flatten()
    return torch.cat([summary, *words, *others])
