"""Target of requests that accept on the host: passes return logits, from which a sampler and a rule choose tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from yggdrasil.acceptance.drawn import DrawnTree
from yggdrasil.acceptance.rules import MatchRule, Rule, accepted_walk
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
    drawn: Callable[[], DrawnTree | None]  # returns the draws of the tree to be accepted; None if nothing was drawn
    fixed_width: int | None = None  # rows of every pass; None: as needed


class LogitTarget:
    """Target whose tokens the host chooses from logits.

    It shares the KV cache and its text with ``target``, which accepts on the device.
    """

    def __init__(self, target: TargetModel | CapturedTarget, tree: TokenTree, verify_widths: Sequence[int]) -> None:
        runner = self.runner = target.runner
        self.order, self.host_tree = target.order, target.host_tree
        self._target, self._tree = target, tree
        self._decision: AcceptanceSetup | None = None
        target.define_logits_steps(verify_widths)
        self.captured: CapturedLogits | None = None
        if runner.recorder is not None:
            self.captured = CapturedLogits(runner, tree, self.order, target.start, verify_widths)
        self.ranks_nodes = self.captured is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the target's vocabulary."""
        return self.runner.call.vocab_size

    def begin(self, decision: AcceptanceSetup) -> None:
        """Set the sampler, acceptance rule and fixed width of the next request."""
        self._decision = decision

    @property
    def length(self) -> int:
        """Number of committed tokens whose KV entries are in the cache: all but the last, the root of the next tree."""
        return self._target.length

    @property
    def text(self) -> KeptText:
        """The committed tokens; all but the last have KV entries in the cache. The engine appends accepted tokens."""
        return self._target.text

    @property
    def figures(self) -> RepetitionFigures:
        """Numbers on how the text repeats earlier parts of itself, computed on demand."""
        return self._target.figures

    def prepare_cache(self, num_tokens: int) -> None:
        """Prepare the KV cache for a text of at most ``num_tokens`` tokens, prompt and answer."""
        self._target.prepare_cache(num_tokens)

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Iterator[Outcome]:
        """Run the prompt ``tokens`` (token ids) from index ``start`` on, in chunks, and yield an outcome for each.

        KV entries of the first ``start`` tokens, fewer than all, must be in the cache. The last outcome has the first
        generated token, which the request's sampler chooses.
        """
        for outcome, logits in self._target.prefill_with_logits(tokens, start):
            if self.length == len(tokens):
                last = logits[0] if self.captured is None else logits[0].cpu()
                choice = self._current.sampler.choose(last)
                self._current.sampler.push(choice.token, last)
                outcome = outcome._replace(tokens=[choice.token])
            yield outcome

    def plain(self, token: int) -> Outcome:
        """Run the last committed token (id ``token``), and return the token that the sampler chooses after it.

        The outcome has this token and the accepted row 0. The caller must then ``commit`` the row.

        Raises:
            YggdrasilError: a logit is not finite, or no token is possible.
        """
        decision = self._current
        if decision.fixed_width is not None:
            self._tree.plant(token)
            _, logits, hidden, *layers = self.run_tree(decision.fixed_width)
        else:
            logits, hidden, *layers = self._run_plain(token)
        if decision.sampler.is_shaped:  # else ``choose`` checks them
            _check_finite(logits[0])
        choice = decision.sampler.choose(logits[0])
        decision.sampler.push(choice.token, logits[0])
        return Outcome([choice.token], [0], hidden, self._layers([state[:1] for state in layers]))

    def verify(self, width: int) -> Sequence[Tensor]:
        """Run the first ``width`` nodes of ``order``, the tree's best, through the target; see ``run_tree``.

        A request of fixed width always runs that number of rows.
        """
        return self.run_tree(self._current.fixed_width or width)

    def accept(self, outputs: Sequence[Tensor], width: int) -> Outcome:
        """Accept a path of the verified tree by the request's rule and sampler.

        Return the path's tokens, rows and hidden states. ``outputs`` is the result of ``verify``. The outcome's
        ``rows`` omit rows that passes of width 1 have already committed. They count from the end of the text committed
        so far, as ``commit`` expects.

        Raises:
            YggdrasilError: logits are not finite, no token is possible, or the rule does not take this kind of drafts.
        """
        layout, logits, hidden, *layers = outputs
        decision = self._current
        tree = VerifiedTree.of(layout.tolist(), logits, decision.drawn())
        replays = _Replays(self, tree)
        tree.replay = replays.decide
        walk = accepted_walk(decision.rule, tree, decision.sampler)
        if not isinstance(decision.rule, MatchRule) or decision.sampler.is_shaped:  # else ``choose`` checks them
            _check_finite(logits[walk.rows])
        states = [replays.states.get(row, [hidden[row], *(state[row] for state in layers)]) for row in walk.rows]
        kept = [torch.stack([state[i] for state in states]) for i in range(1, 1 + len(layers))]
        rows = [row - replays.committed for row in walk.rows[replays.committed :]]
        nodes = [tree.nodes[row] for row in walk.rows]
        expected = None if self.captured is None else self.captured.expected
        return Outcome(walk.tokens, rows, states[-1][0][None], self._layers(kept), nodes, expected=expected)

    def accept_on_host(self, outputs: Sequence[Tensor], width: int, tree: TokenTree) -> Outcome:
        """Return what ``accept`` returns, which also runs on the host."""
        return self.accept(outputs, width)

    def guesses(self, outputs: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor]:
        """Return each verified row's node, and the argmax token after it, [W] int64 each; sampling may choose another.

        ``outputs`` is the result of ``verify``.
        """
        layout, logits, *_ = outputs
        return layout[0], logits.argmax(-1)

    def commit(self, rows: Sequence[int]) -> None:
        """Move the KV entries of ``rows`` to the slots after the committed tokens, and count them as committed.

        ``rows`` are those of ``Outcome``: ascending row indices of the last pass.
        """
        if self.captured is None:
            self._target.commit(rows)
            return
        self.captured.move_rows(self.length, rows)
        self.runner.keep(rows)

    def run_width_one(self, token: int) -> Sequence[Tensor]:
        """Run the token id ``token`` by a pass of one row, and commit it.

        Returns:
            (logits [1, V], hidden [1, H], [1, H] of each layer that a drafter reads)
        """
        outputs = self._run_plain(token)
        self.commit([0])
        return outputs

    def run_tree(self, width: int) -> Sequence[Tensor]:
        """Run the first ``width`` nodes of ``order``, the tree's best, through the target.

        Returns:
            (rows [4, W] int64: nodes, tokens, parents' rows, existence; logits [W, V]; hidden states [W, H]; [W, H] of
                each layer that a drafter reads)
        """
        self._target.write_position()
        return self.runner.step("verify-logits", width)() if self.captured is None else self.captured.tree(width)

    @property
    def _current(self) -> AcceptanceSetup:
        assert self._decision is not None, "begin comes first"
        return self._decision

    def _run_plain(self, token: int) -> Sequence[Tensor]:
        self._target.write_position(token)
        return self.runner.step("plain-logits", 1)() if self.captured is None else self.captured.plain()

    def _layers(self, layers: Sequence[Tensor]) -> dict[int, Tensor]:
        return dict(zip(self.runner.call.hidden_layers, layers, strict=True))


Target: TypeAlias = TargetModel | CapturedTarget | LogitTarget  # the target of one request; all have one interface


class _Replays:
    """Width-1 passes within one walk: each commits the path so far and reruns its last token alone."""

    def __init__(self, target: LogitTarget, tree: VerifiedTree) -> None:
        self._target, self._tree = target, tree
        self.committed = 0  # rows of the path that are committed in the cache
        self.states: dict[int, list[Tensor]] = {}  # row -> hidden [H], *layers [H]

    def decide(self, rows: Sequence[int]) -> Tensor:
        """Return logits [V] after the last of ``rows``, a path of the verified tree from the root, by a width-1 pass.

        This commits all of ``rows``, the last of them by the width-1 pass. Later rows of the tree are not moved.
        """
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
