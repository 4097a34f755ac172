"""Target of requests that accept on the host: passes return logits, from which a sampler and a rule choose tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yggdrasil.acceptance.drawn import DrawnTree
from yggdrasil.acceptance.rules import Rule
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.acceptance.verified import VerifiedTree
from yggdrasil.engine.targets.captured_logits import CapturedLogits
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.engine.targets.target import Outcome, TargetModel, not_finite
from yggdrasil.predictor.features import RepetitionFigures
from yggdrasil.runtime.kept_text import KeptText
from yggdrasil.tree.token_tree import TokenTree


@dataclass(frozen=True)
class AcceptanceSetup:
    """The sampler, acceptance rule and fixed width of one request."""

    sampler: Sampler
    rule: Rule
    drawn: Callable[[], DrawnTree | None]  # returns the draws of the tree to be accepted
    fixed_width: int | None = None  # rows of every pass; None: as needed


class LogitTarget:
    """Target that shares the cache and text of a ``TargetModel`` or ``CapturedTarget``."""

    def __init__(self, target: TargetModel | CapturedTarget, tree: TokenTree, verify_widths: Sequence[int]) -> None:
        runner = self.runner = target.runner
        self.order = target.order
        self._target, self._tree = target, tree
        self._decision: AcceptanceSetup | None = None
        target.define_logits_steps(verify_widths)
        self.captured: CapturedLogits | None = None
        if runner.recorder is not None:
            self.captured = CapturedLogits(runner, tree, self.order, target.start, verify_widths)
        self.ranks_nodes = self.captured is not None

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        return self.runner.call.vocab_size

    def begin(self, decision: AcceptanceSetup) -> None:
        """Set the sampler and rule of the next request."""
        self._decision = decision

    @property
    def length(self) -> int:
        return self._target.length

    @property
    def text(self) -> KeptText:
        return self._target.text

    @property
    def figures(self) -> RepetitionFigures:
        return self._target.figures

    def expect(self, num_tokens: int) -> None:
        """Prepare the cache for ``num_tokens`` tokens, prompt and answer: a long text gets huge pages."""
        self._target.expect(num_tokens)

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Iterator[Outcome]:
        """Prefill the prompt as a ``TargetModel`` does, and choose the first token."""
        for outcome, logits in self._target.read(tokens, start):
            if self.length == len(tokens):
                last = logits[0] if self.captured is None else logits[0].cpu()
                choice = self._current.sampler.choose(last)
                self._current.sampler.push(choice.token, last)
                outcome = outcome._replace(tokens=[choice.token])
            yield outcome

    def plain(self, token: int) -> Outcome:
        """Run ``token``, the last committed one, and choose its successor."""
        decision = self._current
        if decision.fixed_width is not None:
            self._tree.plant(token)
            _, logits, hidden, *layers = self.run_tree(decision.fixed_width)
        else:
            logits, hidden, *layers = self._run_plain(token)
        _check_finite(logits[0])
        choice = decision.sampler.choose(logits[0])
        decision.sampler.push(choice.token, logits[0])
        return Outcome([choice.token], [0], hidden, self._layers([state[:1] for state in layers]))

    def verify(self, width: int) -> Sequence[Tensor]:
        """Launch verification of the ``width`` best nodes of ``order``; of a fixed-width request, always as many."""
        return self.run_tree(self._current.fixed_width or width)

    def accept(self, outputs: Sequence[Tensor], width: int) -> Outcome:
        """Walk the tree by the request's rule. The outcome's rows are those that are not committed yet."""
        layout, logits, hidden, *layers = outputs
        decision = self._current
        tree = VerifiedTree.of(layout.tolist(), logits, decision.drawn())
        replays = _Replays(self, tree)
        tree.replay = replays.decide
        walk = decision.rule.walk(tree, decision.sampler)
        _check_finite(logits[walk.rows])
        states = [replays.states.get(row, [hidden[row], *(state[row] for state in layers)]) for row in walk.rows]
        kept = [torch.stack([state[i] for state in states]) for i in range(1, 1 + len(layers))]
        rows = [row - replays.committed for row in walk.rows[replays.committed :]]
        nodes = [tree.nodes[row] for row in walk.rows]
        expected = None if self.captured is None else self.captured.expected
        return Outcome(walk.tokens, rows, states[-1][0][None], self._layers(kept), nodes, expected=expected)

    def accept_on_host(self, outputs: Sequence[Tensor], width: int, tree: TokenTree) -> Outcome:
        """Do what ``accept`` does, which is on the host already."""
        return self.accept(outputs, width)

    def guesses(self, outputs: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor]:
        """Return each verified row's node and argmax token; sampling may choose another."""
        layout, logits, *_ = outputs
        return layout[0], logits.argmax(-1)

    def commit(self, rows: Sequence[int]) -> None:
        if self.captured is None:
            self._target.commit(rows)
            return
        self.captured.keep(self.length, rows)
        self.runner.keep(rows)

    def run_width_one(self, token: int) -> Sequence[Tensor]:
        """Run ``token`` by a plain step and commit it. Return (logits [1, V], hidden [1, H], *layers [1, H])."""
        outputs = self._run_plain(token)
        self.commit([0])
        return outputs

    def run_tree(self, width: int) -> Sequence[Tensor]:
        """Verify the ``width`` best nodes. Return the outputs of ``VerifyLogitsStep``."""
        self._target.write_place()
        return self.runner.step("verify-logits", width)() if self.captured is None else self.captured.tree(width)

    @property
    def _current(self) -> AcceptanceSetup:
        assert self._decision is not None, "begin comes first"
        return self._decision

    def _run_plain(self, token: int) -> Sequence[Tensor]:
        self._target.write_place(token)
        return self.runner.step("plain-logits", 1)() if self.captured is None else self.captured.plain()

    def _layers(self, layers: Sequence[Tensor]) -> dict[int, Tensor]:
        return dict(zip(self.runner.call.hidden_layers, layers, strict=True))


class _Replays:
    """Width-1 passes within one walk: each commits the path so far and reruns its last token alone."""

    def __init__(self, target: LogitTarget, tree: VerifiedTree) -> None:
        self._target, self._tree = target, tree
        self.committed = 0  # rows of the path that are committed in the cache
        self.states: dict[int, list[Tensor]] = {}  # row -> hidden [H], *layers [H]

    def decide(self, rows: Sequence[int]) -> Tensor:
        """Return logits [V] after the last of ``rows``, a path from the root. Later rows of the tree are not moved."""
        # Rows are relative to the end of the committed text: row r of the pass is now row r - committed.
        self._target.commit([row - self.committed for row in rows[self.committed : -1]])
        logits, hidden, *layers = self._target.run_width_one(self._tree.tokens[rows[-1]])
        self.committed = len(rows)
        self.states[rows[-1]] = [hidden[0], *(state[0] for state in layers)]
        return logits[0]


def _check_finite(logits: Tensor) -> None:
    # Single infinite logits are valid; a row without a finite maximum, or with NaN, is not.
    if not bool(torch.isfinite(logits.amax(-1)).all()):
        raise not_finite()
