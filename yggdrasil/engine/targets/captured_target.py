"""The target of CUDA graphs: ranking, verification, acceptance and commit in one launch.

The host writes a few integers before a step and reads one small vector after it; in between the device does not wait
for the host. Ranking the tree is part of verification, so the verify width is chosen before drafting.

Dims: W verified nodes, H hidden size.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yggdrasil.acceptance.sampler import Sampler, TokenLogprobs, no_token_possible, read_logprobs
from yggdrasil.acceptance.sampling import MAX_TOP_LOGPROBS
from yggdrasil.acceptance.tensor_sampling import SamplingKind
from yggdrasil.drafters.next_drafts import NextDrafts
from yggdrasil.engine.targets.sampled_captures import SampledCaptures, finish
from yggdrasil.engine.targets.steps import VerifyStep
from yggdrasil.engine.targets.target import Outcome, PromptReader, not_finite
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.graphs import Capture
from yggdrasil.runtime.passes import Readback
from yggdrasil.runtime.runner import ModelRunner
from yggdrasil.scheduling.stages import Schedule
from yggdrasil.tree.host_tree import HostTree
from yggdrasil.tree.token_tree import TokenTree, rank_nodes


def check_capturable(schedule: Schedule) -> None:
    """Check that steps captured as CUDA graphs support a schedule (the order and variants of an iteration's stages).

    Raises:
        YggdrasilError: the schedule accepts on the host.
    """
    if schedule.variants["accept"] == "host":
        raise YggdrasilError(
            "captured steps, which a GPU runs, accept on the device and cannot run the stage accept=host; take a plan "
            "with accept=device, such as calibrate --device cuda writes"
        )


class CapturedTarget(PromptReader):
    """Target whose steps are CUDA graphs, with acceptance on the device. It has the interface of ``TargetModel``."""

    ranks_nodes = True  # verification writes ``order``, so the verify width is chosen before drafting
    next_drafts: NextDrafts | None = None  # set by ``assemble`` if the drafter is a ``LevelDrafter``

    def __init__(
        self, runner: ModelRunner, tree: TokenTree, verify_widths: Sequence[int], prefill_widths: Sequence[int]
    ) -> None:
        assert runner.recorder is not None
        super().__init__(runner, tree, prefill_widths)
        self._hidden_words = runner.loaded.hidden_size // 2
        most = max(1, *verify_widths)
        words = 2 + 4 * most + 1 + self._hidden_words + (1 + 2 * MAX_TOP_LOGPROBS) * most
        self._readback = Readback(words, runner.loaded.device)
        self._kind: SamplingKind | None = None  # None: greedy, without logits processors
        self._sampler: Sampler | None = None  # of a request with log-probabilities, a constraint or bad words
        self._is_stuck = False  # no token may follow the request's last one
        self._masks: list[npt.NDArray[np.uint8]] | None = None  # tokens allowed after each row of the last pass
        self._verify_widths = [width for width in verify_widths if width > 1]  # width 1 is a plain step
        self.host_tree = HostTree(tree, runner.recorder)  # of drafters on the host, written before a pass
        self.sampled = SampledCaptures(runner, tree, self.order, self._start.tensor, most)
        self.captures: dict[tuple[str, int], Capture] = {}
        for width in self.prefill_widths:
            self.captures["prefill", width] = runner.recorder.capture(partial(self._read_one, "prefill", width))
        self.captures["plain", 1] = runner.recorder.capture(partial(self._read_one, "plain", 1))
        for width in self._verify_widths:
            inputs = [self._start.tensor, self.order[:width], *tree.tensors()]
            runner.define("verify", width, VerifyStep(runner.call), inputs)
            self.captures["verify", width] = runner.recorder.capture(partial(self._verify, width))

    def set_sampling(self, kind: SamplingKind | None, sampler: Sampler | None = None) -> list[Capture]:
        """Set how later requests choose tokens on the device, and return the new CUDA graphs that this needs.

        The caller must prepare these before the next request.

        Args:
            kind: variant of sampling in the graphs; None decodes greedily, without logits processors.
            sampler: receives tokens and log-probabilities of the request and has its grammar and bad words; None if the
                request needs none of these.
        """
        self._kind, self._sampler, self._is_stuck = kind, sampler, False
        if kind is None:
            return []
        self.define_logits_steps(self._verify_widths)
        return self.sampled.add(kind, [1, *self._verify_widths])

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Iterator[Outcome]:
        """Run the prompt ``tokens`` (token ids) from index ``start`` on, in chunks, and yield an outcome for each.

        KV entries of the first ``start`` tokens, fewer than all, must be in the cache. The last outcome has the first
        generated token, chosen as ``set_sampling`` says.
        """
        for outcome, logits in self.prefill_with_logits(tokens, start):
            if self._kind is not None and self.length == len(tokens):
                yield outcome._replace(tokens=[self._first(self._kind, logits)])
            else:
                yield outcome

    def _first(self, kind: SamplingKind, logits: Tensor) -> int:
        """Sample the first token of a request from ``logits`` [1, V]."""
        if kind.is_masked:
            self._write_masks(((0,), (0,), (0,), (1,)))
        packed = self._readback.read(self.sampled.first(kind, logits, self.length))
        token = int(packed[3])
        self._note([0], [token], packed[6:], 1)
        return token

    def prefill_with_logits(self, tokens: Sequence[int], start: int = 0) -> Iterator[tuple[Outcome, Tensor]]:
        """Run the prompt ``tokens`` from index ``start`` on, in chunks, and yield (outcome, logits [1, V]) for each.

        KV entries of the first ``start`` tokens, fewer than all, must be in the cache. The logits are those after the
        chunk's last token. The last outcome has the argmax token after the prompt.

        Raises:
            YggdrasilError: a logit is not finite.
        """
        for width, count in self._chunks(tokens, start):
            packed, logits, *others = self._launch("prefill", width)
            outputs = packed, *others
            self.runner.note_kept(count)
            self._keep_states(len(tokens))
            rows = list(range(count))
            # Cloned, because the next chunk overwrites them.
            layers = {layer: states.clone() for layer, states in self._layers(outputs, slice(count)).items()}
            yield self._outcome(outputs[0], 1)._replace(rows=rows, layers=layers), logits

    def plain(self, token: int) -> Outcome:
        """Run a pass of one row, the last committed token (id ``token``), and return the token chosen after it.

        The outcome has this token and the accepted row 0. The caller must then ``commit`` the row.

        Raises:
            YggdrasilError: a logit is not finite, or no token is possible.
        """
        outputs = self.launch_plain(token)
        outputs = self._readback.wait(outputs[0].numel()), *outputs[1:]
        outcome = self._outcome(outputs[0], 1)
        self._note(outcome.rows, outcome.tokens, self._report(outputs[0], 1), 1)
        return outcome._replace(layers=self._layers(outputs, slice(1)))

    def launch_plain(self, token: int) -> Sequence[Tensor]:
        """Launch a plain step for the token id ``token``, the last committed one, without waiting for the device.

        Returns its outputs, still on the device: the result as ``finish`` packs it, then [1, H] of each layer that a
        drafter reads.
        """
        self._tokens.write(token)
        return self._launch_pass("plain", 1)

    def verify(self, width: int) -> Sequence[Tensor]:
        """Launch one CUDA graph that ranks the tree, verifies its ``width`` best nodes and accepts a path.

        The graph also moves the accepted KV entries. Returns its outputs, still on the device: the result as ``finish``
        packs it, then the output [W, H] of each layer that a drafter reads.
        """
        return self._launch_pass("verify", width)

    def _launch_pass(self, name: str, width: int) -> Sequence[Tensor]:
        if self._is_stuck:
            raise no_token_possible()
        self._start.write(self.length)
        self.runner.note_launch()
        if self._kind is None:
            packed, *layers = self.captures[name, width]()
        else:
            packed, *layers = self.sampled.launch(self._kind, width, self._write_masks)
        self._readback.begin(packed)
        return packed, *layers

    def _write_masks(self, layout: Sequence[Sequence[int]]) -> None:
        """Write to the device's sampling buffers which tokens the grammar and the bad words allow after each row.

        ``layout`` is as in ``Sampler.tree_bits``.
        """
        assert self._sampler is not None
        self._masks = self._sampler.tree_bits(layout, self.vocab_size)
        self.sampled.sampling.write_masks(self._masks)

    def accept(self, outputs: Sequence[Tensor], width: int) -> Outcome:
        """Wait for a verification of ``width`` nodes, and return the tokens and rows that it accepted.

        ``outputs`` is the result of ``verify``.

        Raises:
            YggdrasilError: logits are not finite, or grammar and bad words allow no token.
        """
        packed = self._readback.wait(outputs[0].numel())
        outcome = self._outcome(packed, width)
        nodes = packed[2 + 3 * width : 2 + 4 * width].tolist()
        count = self._note(outcome.rows, outcome.tokens, self._report(packed, width), width)
        rows, tokens = outcome.rows[:count], outcome.tokens[:count]
        outcome = outcome._replace(rows=rows, tokens=tokens, nodes=[nodes[row] for row in rows])
        accepted = outputs[0][2 : 2 + count]  # on the device, so that indexing copies nothing to it
        return outcome._replace(layers=self._layers(outputs, accepted))

    def accept_on_host(self, outputs: Sequence[Tensor], width: int, tree: TokenTree) -> Outcome:
        """Raise YggdrasilError: CUDA graphs accept on the device only."""
        raise YggdrasilError("captured steps accept on the device; take a plan with accept=device")

    def guesses(self, outputs: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor]:
        """Return each verified row's node, and the token that the target chooses after it, [W] int64 each.

        ``outputs`` is the result of ``verify``. The returned tensors stay on the device.
        """
        choices, nodes = outputs[0][2 + 2 * width : 2 + 4 * width].view(2, width)
        return nodes, choices

    def commit(self, rows: Sequence[int]) -> None:
        """Count the accepted ``rows`` as committed; the pass has already moved their KV entries."""
        self.runner.note_kept(len(rows))

    def _launch(self, name: str, width: int) -> Sequence[Tensor]:
        """Replay a CUDA graph. Return (packed result, copied to the host, *layers, still on the device)."""
        self.runner.note_launch()
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

    def _report(self, packed: Tensor, width: int) -> Tensor:
        """Return the part of a packed result that begins with its log-probabilities."""
        return packed[2 + 4 * width + 1 + self._hidden_words :]

    def _note(self, rows: Sequence[int], tokens: Sequence[int], words: Tensor, width: int) -> int:
        """Give the request's sampler the accepted tokens, up to the end of the text, and their log-probabilities.

        Return the number of accepted tokens. After a row that no token may follow, none is accepted: the text may end
        there, and otherwise the next pass raises the error.

        Raises:
            YggdrasilError: no token is allowed after the first row.
        """
        sampler, num_top = self._sampler, None if self._kind is None else self._kind.num_top
        if sampler is None:
            return len(tokens)
        found: list[TokenLogprobs] | None = None
        if num_top is not None and sampler.params.logprobs is not None:
            num_top = min(num_top, self.vocab_size)
            found = read_logprobs(words, width, num_top, rows, tokens, sampler.params.logprobs)
        for number, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if sampler.has_ended:
                break
            if sampler.has_masks and self._masks is not None and not sampler.can_choose(self._masks[row]):
                if number == 0:
                    raise no_token_possible()
                self._is_stuck = True
                return number
            sampler.note(token, None if found is None else found[number])
        return len(tokens)

    def _layers(self, outputs: Sequence[Tensor], rows: Tensor | slice) -> dict[int, Tensor]:
        wanted = self.runner.call.hidden_layers
        return {layer: states[rows] for layer, states in zip(wanted, outputs[1:], strict=True)}

    # ==== captured ====

    def _read_one(self, name: str, width: int) -> Sequence[Tensor]:
        """Run a prefill or plain step. Return (packed result, *layers), for prefill with logits before the layers."""
        choice, best, hidden, *layers = self.runner.step(name, width)()
        logits, layers = (layers[:1], layers[1:]) if name == "prefill" else ([], layers)
        one, row = torch.ones_like(choice), torch.zeros_like(choice)
        summary = torch.cat([one, torch.isfinite(best).to(torch.int64), row, choice, choice, row])
        rows = torch.arange(width, device=choice.device)
        self.runner.keep_captured(self._start.tensor, rows, self._last.tensor + 1 if name == "prefill" else one)
        return self._packed(summary, one, hidden), *logits, *layers

    def _verify(self, width: int) -> Sequence[Tensor]:
        """Rank, verify, accept and move the accepted rows. Return (packed result, *layers)."""
        order, expected = rank_nodes(self._tree)
        self.order.copy_(order)
        summary, hidden, *layers = self.runner.step("verify", width)()
        self.runner.keep_captured(self._start.tensor, summary[2 : 2 + width], summary[:1])
        return self._packed(summary, expected[width - 1 : width], hidden), *layers

    def _packed(self, summary: Tensor, expected: Tensor, hidden: Tensor) -> Tensor:
        return finish(self.runner, self._start.tensor, summary, expected, hidden, summary[:0])
