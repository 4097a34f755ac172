"""Model-free drafters that propose into one tree."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from yggdrasil.drafters.protocol import Budget, Capabilities, Drafter, Step, propose_in
from yggdrasil.tree.token_tree import TokenTree


class DrafterGroup:
    """A drafter that calls each of ``drafters`` in turn: each adds to what those before it have proposed.

    Drafters that read refused rows come last: what they add beside candidates to verify has the nodes that are left.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = sorted(drafters, key=lambda each: each.capabilities.read_choices is not None)
        self.name = " + ".join(drafter.name for drafter in self.drafters)
        all_of = [drafter.capabilities for drafter in self.drafters]
        self._choice_readers = [each.read_choices for each in all_of if each.read_choices is not None]
        self._runner_up_readers = [each.read_runners_up for each in all_of if each.read_runners_up is not None]
        self.capabilities = Capabilities(
            plants_root=True,
            read_choices=self._read_choices if self._choice_readers else None,
            read_runners_up=self._read_runners_up if self._runner_up_readers else None,
        )
        self._last = 0  # certain token

    def begin(self, tokens: Sequence[int]) -> None:
        self._last = tokens[-1] if tokens else 0  # a recorded answer may have no prompt
        for drafter in self.drafters:
            drafter.begin(tokens)

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        self._last = tokens[-1]
        for drafter in self.drafters:
            drafter.extend(tokens, states)

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        first, *others = self.drafters
        propose_in(first, tree, self._last, budget)
        if others:
            budget = budget._replace(from_root=False)
            for drafter in others:
                drafter.propose(tree, budget)

    def cost(self, budget: Budget) -> Sequence[Step]:
        return ()

    def _read_choices(self, tree: TokenTree, nodes: Sequence[int], choices: Sequence[int]) -> None:
        for read in self._choice_readers:
            read(tree, nodes, choices)

    def _read_runners_up(self, tokens: Sequence[int], runners_up: Tensor) -> None:
        for read in self._runner_up_readers:
            read(tokens, runners_up)


def group_of(drafters: Sequence[Drafter]) -> DrafterGroup | None:
    """The group of ``drafters``; None where there are none."""
    return DrafterGroup(drafters) if drafters else None
