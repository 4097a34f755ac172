"""The drafter protocol: drafters propose tokens, the target verifies them.

For one request the engine calls ``begin`` once, ``propose`` before a verification, and ``extend`` whenever tokens
become certain. A drafter may keep state of its own, read the target's hidden states, run a model, or look tokens up.
Several drafters propose into one tree (``DrafterGroup``). A drafter never sees the target's output of the current
iteration before the tree is fixed: this keeps every drafter lossless.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.objective import UNBOUNDED, StoppingBound
from yggdrasil.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from yggdrasil.runtime.runner import ModelRunner


class Step(NamedTuple):
    """One step of a proposal, as the cost model prices it."""

    name: str
    width: int  # rows


class Budget(NamedTuple):
    """How much one proposal may add to a tree."""

    depth: int  # levels below the root, at most
    width: int | None = None  # nodes a level, at most; None: as many as the tree has room for
    bound: StoppingBound = (
        UNBOUNDED  # early-stopping bound of the policy; a drafter that grows best first may stop by it
    )
    from_root: bool = True  # no other drafter has proposed below this root yet


class TailDrafts(Protocol):
    """Variants of a drafter's head and tail drafts that a schedule may place (paper section 5.1).

    After ``keep`` the drafter holds a row for every token that ``extend`` then brings, but the last.
    """

    def read_leaves(self) -> None:
        """Read all nodes of the last level."""

    def read_leaf(self, node: int) -> None:
        """Read ``node`` if it was attached and never read."""

    def guess(self, nodes: Tensor, tokens: Tensor, *, reads_leaves: bool) -> None:
        """Read ``tokens[i]`` as the successor of ``nodes[i]``, [W] int64 each, and remember its candidates.

        ``reads_leaves``: read all nodes of the last level first.
        """

    def keep(self, nodes: Sequence[int], guess: int | None, *, at_once: bool) -> None:
        """Keep the rows of accepted ``nodes``, a path below the root.

        Where ``guess`` names the guess that follows the last one and came true, keep its row too and plant it as the
        next root: now where ``at_once``, else before the next draft.
        """


@dataclass(frozen=True)
class DraftSteps:
    """Compiled steps over weights of the drafter's own. Nodes come in the order in which steps attach them."""

    runner: "ModelRunner"
    knots: Tensor  # [M] float32, acceptance by the drafter's probabilities; calibration writes them
    head: Callable[[], None]  # the head draft; ``propose`` runs it where no schedule has done so
    place_at: Callable[[int, int], None]  # stand behind so many tokens, with this root; for timing steps
    tail: TailDrafts | None = None  # None: the next head draft reads all that was accepted


@dataclass(frozen=True)
class Capabilities:
    """Optional inputs and abilities of a drafter; the defaults have none."""

    layers: tuple[int, ...] = ()  # target layers whose outputs `extend` gets; -1 is the input of the output layer
    steps: DraftSteps | None = None
    plants_root: bool = False  # `propose` plants the last certain token itself where ``budget.from_root``
    # How many of a prompt's first tokens need no states any more. None: states of all tokens are needed.
    num_kept: Callable[[Sequence[int]], int] | None = None
    # Reads verified rows, refused ones included: of a tree, ``nodes`` and the tokens that the target chose after them.
    read_choices: Callable[[TokenTree, Sequence[int], Sequence[int]], None] | None = None
    # Reads runners-up: the target's likeliest tokens [len(tokens), K] int64, best first, after each of ``tokens``.
    read_runners_up: Callable[[Sequence[int], Tensor], None] | None = None


class Drafter(Protocol):
    """Proposes candidates into a token tree, each with an estimate of its acceptance."""

    name: str
    capabilities: Capabilities

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a request: these tokens (never empty) are certain; ``extend`` brings the rest of the prompt.

        A drafter may keep its state of the last request's text up to the first token that differs.
        """

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """More tokens are certain. ``states[layer]`` [len(tokens), H] are the target's states before each of them."""

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach candidates below any node of ``tree``, whose root is the last certain token; or none."""

    def cost(self, budget: Budget) -> Sequence[Step]:
        """The steps that such a proposal runs; none for a model-free drafter, which then proposes in every iteration.

        For every budget of one width the steps are of the same kinds, or none.
        """


def is_model_free(drafter: Drafter) -> bool:
    """Whether proposals of ``drafter`` run no step that would have to be priced."""
    return not drafter.cost(Budget(depth=1, width=1))


def propose_in(drafter: Drafter, tree: TokenTree, root: int, budget: Budget) -> None:
    """Let ``drafter`` propose below ``root``, the last certain token."""
    if budget.from_root and not drafter.capabilities.plants_root:
        tree.plant(root)
    drafter.propose(tree, budget)


def check_tree(tree: TokenTree, root: int, vocab_size: int, name: str) -> None:
    """Refuse a tree of the drafter ``name`` that no target could verify below ``root``.

    Raises:
        YggdrasilError: the tree has another root, or a token outside the vocabulary.
    """
    tokens = tree.tokens[: tree.size]
    if not len(tokens) or int(tokens[0]) != root:
        raise YggdrasilError(f"the drafter {name} did not keep token {root}, the last that is certain")
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)].tolist()
    if wrong:
        raise YggdrasilError(f"the drafter {name} attached token {wrong[0]}; the vocabulary ends at {vocab_size - 1}")


def num_kept(drafter: Drafter, tokens: Sequence[int]) -> int:
    """How many of the first ``tokens`` need no states any more: all where the drafter reads none."""
    capabilities = drafter.capabilities
    if not capabilities.layers:
        return len(tokens)
    return 0 if capabilities.num_kept is None else capabilities.num_kept(tokens)


class DrafterGroup:
    """A drafter that calls each of ``drafters`` in turn: each adds to what those before it have proposed.

    Drafters that read rejected rows come last, since nodes that they add for later take only free places.
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
