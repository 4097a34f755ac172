"""What a drafter is: whoever grows a token tree from what is certain so far.

The engine calls, for one request: ``begin`` once; then for each iteration ``head`` and ``grow``; and ``extend``
whenever tokens become certain. A drafter may keep any state of its own, read the target's hidden states (name the
layers in ``hidden_layers``), run a model, or look things up. Several drafters can grow one tree: each attaches to what
is there. A drafter never sees the current iteration's target output before the tree is fixed, which is what keeps
every drafter lossless.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from yggdrasil.tree.stakes import NO_STAKES, Stakes
from yggdrasil.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from yggdrasil.runtime.runner import ModelRunner


class Drafter(Protocol):
    """Grows one tree an iteration; six names are the whole seam."""

    name: str
    hidden_layers: tuple[int, ...]  # target layers whose outputs `extend` wants; -1 is the head's input; () for none

    def begin(self, tokens: Sequence[int]) -> None:
        """A new request: these tokens (never empty) are certain; ``extend`` brings the rest of the prompt.

        A drafter may keep what it knows of the last request's text, up to the first token that differs.
        """

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        """More tokens are certain. ``hidden[layer]`` [len(tokens), H] are the target's states before each of them."""

    def head(self, tree: TokenTree) -> None:
        """Plant the last certain token as root and prepare first candidates."""

    def grow(self, tree: TokenTree, width: int, depth: int) -> None:
        """Attach at most ``width`` nodes for each of ``depth`` levels, none deeper than ``depth``."""


@runtime_checkable
class KeepingDrafter(Protocol):
    """A drafter that reads hidden states and keeps those of the last request; without it, prompts are read anew."""

    def num_kept(self, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens`` it has, with their states, so that ``begin`` may name as many."""


@runtime_checkable
class SteppedDrafter(Drafter, Protocol):
    """A drafter whose levels are compiled steps of a fixed width, over weights of its own: what is timed by the step.

    It attaches nodes in the order of their numbers, scored by its own probabilities through ``knots``.
    """

    runner: "ModelRunner"
    knots: Tensor  # acceptance by its probabilities; written once they are known

    def place_at(self, length: int, token: int) -> None:
        """Stand behind ``length`` tokens as if they had been read, with ``token`` as the root; for timing steps."""


@runtime_checkable
class StagedDrafter(Protocol):
    """A drafter whose head and tail drafts are stages with variants (paper section 5.1); others need none of this.

    After ``keep`` the drafter holds a row for every token that ``extend`` then brings, but the last.
    """

    def read_leaves(self) -> None:
        """Read the nodes of the last level, whichever of them will stand."""

    def read_leaf(self, node: int) -> None:
        """Read ``node`` if it was attached and never read."""

    def guess(self, nodes: Tensor, tokens: Tensor) -> None:
        """Read ``tokens[i]`` as the successor of ``nodes[i]``, [W] int64 each, and remember its candidates."""

    def keep(self, nodes: Sequence[int], guess: int | None, token: int) -> bool:
        """Keep the rows of accepted ``nodes``, a path below the root.

        Where ``guess`` names the guess that follows the last one and it is ``token``, keep its row too and plant it as
        the next root; returns whether that came true.
        """


@runtime_checkable
class FreeDrafter(Protocol):
    """Who guesses at the cost of no pass of any model, and so in every iteration, beside others too.

    ``begin`` and ``extend`` are a ``Drafter``'s, without states.
    """

    name: str

    def begin(self, tokens: Sequence[int]) -> None:
        """A new request."""

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        """More tokens are certain."""

    def plant(self, tree: TokenTree, depth: int) -> None:
        """Make the last certain token the root of a tree on the host, and guess below it, no deeper than ``depth``."""

    def fill(self, tree: TokenTree, depth: int) -> None:
        """Go on with a tree on the host that another drafter has grown from the same root.

        Guesses take the places that are left, below any node and none deeper than ``depth``; nodes that are there stay,
        with another score.
        """


@runtime_checkable
class ThriftyDrafter(FreeDrafter, Protocol):
    """A free drafter whose nodes come best first, so that it can leave out those that no pass worth most would read."""

    def plant_for(self, tree: TokenTree, depth: int, stakes: Stakes) -> None:
        """``plant``, as far as it matters for ``stakes``."""

    def fill_for(self, tree: TokenTree, depth: int, stakes: Stakes) -> None:
        """``fill``, as far as it matters for ``stakes``."""


@runtime_checkable
class ReadingDrafter(FreeDrafter, Protocol):
    """A free drafter that learns from what the target says of guesses that do not stand, too."""

    def read(self, tree: TokenTree, nodes: Sequence[int], choices: Sequence[int]) -> None:
        """The target chose ``choices[i]`` behind ``nodes[i]`` of the tree that it read; ``extend`` comes after."""


@runtime_checkable
class RecyclingDrafter(Protocol):
    """A free drafter that reads what the target found likeliest after each verified row."""

    recycles: bool

    def recycle(self, tokens: Sequence[int], followers: Tensor) -> None:
        """After ``tokens[i]`` the target found ``followers[i]`` likeliest, [len(tokens), K] int64, best first."""


def recyclers(free: FreeDrafter | None) -> list[RecyclingDrafter]:
    """Those of ``free`` that want the target's runners-up."""
    return [each for each in each_of(free) if isinstance(each, RecyclingDrafter) and each.recycles]


class FreeDrafters:
    """Several in one tree: each goes on with what those before it have guessed."""

    def __init__(self, drafters: Sequence[FreeDrafter]) -> None:
        self.name = " + ".join(drafter.name for drafter in drafters)
        self.drafters = list(drafters)

    def begin(self, tokens: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.begin(tokens)

    def extend(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        for drafter in self.drafters:
            drafter.extend(tokens, hidden)

    def plant(self, tree: TokenTree, depth: int) -> None:
        self.plant_for(tree, depth, NO_STAKES)

    def plant_for(self, tree: TokenTree, depth: int, stakes: Stakes) -> None:
        """``plant``; of those that are thrifty as far as it matters for ``stakes``."""
        first, *others = self.drafters
        if isinstance(first, ThriftyDrafter):
            first.plant_for(tree, depth, stakes)
        else:
            first.plant(tree, depth)
        _fill(others, tree, depth, stakes)

    def fill(self, tree: TokenTree, depth: int) -> None:
        self.fill_for(tree, depth, NO_STAKES)

    def fill_for(self, tree: TokenTree, depth: int, stakes: Stakes) -> None:
        """``fill``, as ``plant_for`` plants."""
        _fill(self.drafters, tree, depth, stakes)


def _fill(drafters: Sequence[FreeDrafter], tree: TokenTree, depth: int, stakes: Stakes) -> None:
    for drafter in drafters:
        if isinstance(drafter, ThriftyDrafter):
            drafter.fill_for(tree, depth, stakes)
        else:
            drafter.fill(tree, depth)


def together(drafters: Sequence[FreeDrafter]) -> FreeDrafter | None:
    """One that guesses what all of them do; None where there is none.

    Those that read what became of refused guesses come last: what they add beside guesses to verify has the places that
    are left.
    """
    ordered = sorted(drafters, key=lambda each: isinstance(each, ReadingDrafter))
    return FreeDrafters(ordered) if len(ordered) > 1 else next(iter(ordered), None)


def each_of(free: FreeDrafter | None) -> Sequence[FreeDrafter]:
    """Those that ``together`` was given."""
    return free.drafters if isinstance(free, FreeDrafters) else [] if free is None else [free]


def num_kept(drafter: Drafter, tokens: Sequence[int]) -> int:
    """How many of the first ``tokens`` need no states any more: all where the drafter reads none."""
    if not drafter.hidden_layers:
        return len(tokens)
    return drafter.num_kept(tokens) if isinstance(drafter, KeepingDrafter) else 0
