"""The drafter protocol: drafters propose tokens, the target verifies them.

For each request the engine calls ``begin`` once, ``propose`` before each verification, and ``extend`` whenever tokens
are committed. A drafter may keep its own state, read the target's hidden states, run a model, or look up n-grams.
Several drafters may propose into one tree (``DrafterGroup``). A drafter never sees the target's output of the current
iteration before the tree is fixed, so that every drafter is lossless.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from yggdrasil.errors import YggdrasilError
from yggdrasil.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from yggdrasil.drafters.draft_model import DraftModel
    from yggdrasil.runtime.runner import ModelRunner


class Step(NamedTuple):
    """One step (compiled model call) of a proposal, as ``Drafter.cost`` lists it."""

    name: str  # name of the runner's step, such as "grow"
    width: int  # rows of the step


class Budget(NamedTuple):
    """Limits of one proposal: levels and nodes per level."""

    depth: int  # the most levels below the root
    width: int | None = None  # the most nodes per level; None if only the tree's capacity limits them
    is_first: bool = True  # no other drafter has proposed below this root; if False, extend the present tree


@dataclass(frozen=True)
class DraftSteps:
    """A drafter's compiled steps, as the engine runs them. The steps number nodes in the order of attachment."""

    runner: "ModelRunner"
    knots: Tensor  # [M] float32 acceptance calibration, which a calibration writes in place
    head: Callable[[], None]  # runs the head draft; if it is not called, ``propose`` runs the head draft
    pretend_context: Callable[[int, int], None]  # (count, root token id): acts as if so many were cached, to time steps
    # Runs tail drafts and early head drafts, which a schedule may place before the end of the target's verification
    # (Yggdrasil paper, section 5.1). If it is None, the next head draft runs all accepted tokens.
    tail: "DraftModel | None" = None


@dataclass(frozen=True)
class Capabilities:
    """Optional inputs and abilities of a drafter. The defaults are for a drafter without any."""

    layers: tuple[int, ...] = ()  # target layers whose outputs `extend` gets; -1: the LM head's input
    steps: DraftSteps | None = None
    plants_root: bool = False  # `propose` itself plants the root if ``budget.is_first``
    # Returns how many first tokens of a prompt need no hidden states. If it is None, all tokens need them.
    num_kept: Callable[[Sequence[int]], int] | None = None


class Drafter(Protocol):
    """Protocol of drafters, which attach nodes to a token tree, each with an estimate of its acceptance."""

    name: str
    capabilities: Capabilities

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a request with the committed ``tokens`` (token ids, at least one).

        ``tokens`` are the whole prompt, or the first tokens of the prompt; ``extend`` then passes the other tokens. A
        drafter may keep its state for the prefix that ``tokens`` share with the last request's text.
        """

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Append committed ``tokens`` (token ids) to the drafter's text.

        Args:
            states: for each layer that ``capabilities`` names, the target's hidden states [len(tokens), H]; row i is
                the hidden state of the token before ``tokens[i]``. Empty if ``capabilities`` names no layer.
        """

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Attach drafted nodes to ``tree``, whose root is the last committed token, within the limits of ``budget``.

        With the capability ``plants_root``, and if ``budget.is_first``, first replace the tree by that root.
        """

    def cost(self, budget: Budget) -> Sequence[Step]:
        """Return the steps (compiled model calls) that a proposal with ``budget`` runs; empty if no model runs.

        A drafter without steps proposes in every iteration. A drafter with steps proposes only if the policy expects a
        gain. Budgets of equal width have steps of the same kinds.
        """


def is_model_free(drafter: Drafter) -> bool:
    """Return whether ``drafter.cost`` returns no steps, so that the policy counts no time for the proposals.

    Raises:
        YggdrasilError: it returns none, but the drafter reads hidden states, which model-free drafters do not get.
    """
    if drafter.cost(Budget(depth=1, width=1)):
        return False
    if drafter.capabilities.layers:
        raise YggdrasilError(
            f"the drafter {drafter.name} reads hidden states, but its cost has no step; let cost return at least one"
        )
    return True


def propose_in(drafter: Drafter, tree: TokenTree, root: int, budget: Budget) -> None:
    """Let ``drafter`` attach nodes to ``tree`` below ``root``, the token id of the last committed token.

    If ``budget.is_first``, the tree is first replaced by that root. A drafter with the capability ``plants_root`` does
    this in its ``propose``; for any other drafter this function does it.
    """
    if budget.is_first and not drafter.capabilities.plants_root:
        tree.plant(root)
    drafter.propose(tree, budget)


def check_tree(tree: TokenTree, root: int, vocab_size: int, name: str) -> None:
    """Check the root and the token ids of ``tree`` after a drafter has written it.

    Args:
        root: token id of the last committed token.
        vocab_size: size of the target's vocabulary.
        name: name of the drafter, for the error message.

    Raises:
        YggdrasilError: the tree has another root, or a token is outside the vocabulary.
    """
    tokens = tree.tokens[tree.scores.isfinite()]  # a grammar may have removed nodes in the middle
    if not tree.size or int(tree.tokens[0]) != root:
        raise YggdrasilError(f"the drafter {name} did not keep token {root}, the last that is certain")
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)].tolist()
    if wrong:
        raise YggdrasilError(f"the drafter {name} attached token {wrong[0]}; the vocabulary ends at {vocab_size - 1}")


def num_kept(drafter: Drafter, tokens: Sequence[int]) -> int:
    """Return the length of the prefix of ``tokens``, a prompt, for which the drafter needs no hidden states.

    It is ``len(tokens)`` if the drafter reads no hidden states. Otherwise it is the result of
    ``capabilities.num_kept``, such as the number of tokens cached from the last request, or 0 without that function.
    """
    capabilities = drafter.capabilities
    if not capabilities.layers:
        return len(tokens)
    return 0 if capabilities.num_kept is None else capabilities.num_kept(tokens)


def is_users(drafter: Drafter) -> bool:
    """Return whether the class of ``drafter`` is defined outside this package."""
    return type(drafter).__module__.partition(".")[0] != __name__.partition(".")[0]


class DrafterGroup:
    """Drafter that lets each of ``drafters`` add nodes to the same tree, in order.

    Once ``vocab_size``, the size of the target's vocabulary, is set, a tree is checked (``check_tree``) after each
    user's drafter has written it.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)
        self.vocab_size: int | None = None
        self.name = " + ".join(drafter.name for drafter in self.drafters)
        self.capabilities = Capabilities(plants_root=True)
        self._last = 0  # last committed token

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a request with the committed ``tokens`` in every drafter."""
        self._last = tokens[-1] if tokens else 0  # a recorded answer may have no prompt
        for drafter in self.drafters:
            drafter.begin(tokens)

    def extend(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Append committed ``tokens`` (at least one) in every drafter."""
        self._last = tokens[-1]
        for drafter in self.drafters:
            drafter.extend(tokens, states)

    def propose(self, tree: TokenTree, budget: Budget) -> None:
        """Let every drafter add nodes to ``tree`` in order; the first plants the root if ``budget.is_first``."""
        for drafter in self.drafters:
            propose_in(drafter, tree, self._last, budget)
            if self.vocab_size is not None and is_users(drafter):
                check_tree(tree, self._last, self.vocab_size, drafter.name)
            budget = budget._replace(is_first=False)

    def cost(self, budget: Budget) -> Sequence[Step]:
        """Return no steps: the drafters of a group are model-free."""
        return ()


def group_of(drafters: Sequence[Drafter]) -> DrafterGroup | None:
    """Return a drafter that lets each of ``drafters`` add nodes to the same tree; None without drafters."""
    return DrafterGroup(drafters) if drafters else None


def ungrouped(drafter: Drafter) -> Drafter:
    """Return the only drafter of a group of one, to save a call in each iteration; else ``drafter`` itself.

    A single drafter that lacks the capability ``plants_root`` stays in its group, which plants the root for it, and so
    does a user's drafter, whose trees the group checks.
    """
    if isinstance(drafter, DrafterGroup) and len(drafter.drafters) == 1:
        only = drafter.drafters[0]
        return only if only.capabilities.plants_root and not is_users(only) else drafter
    return drafter
