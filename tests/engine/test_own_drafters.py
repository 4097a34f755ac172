"""Drafters that somebody else wrote: whatever they do, the tokens are the target's, or a sentence names the drafter."""

import math

import pytest
from own_drafter import Nobody
from tiny_pair import TEXT, VOCAB_SIZE

from yggdrasil.drafters import Capabilities
from yggdrasil.drafters.protocol import DrafterGroup, check_tree, is_model_free
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy, ModelFreePolicy
from yggdrasil.tree.shape import TreeShape

PROMPT, COUNT = TEXT[:20], 16
TREE = FixedPolicy(TreeShape(2, 2, 4))


class Elsewhere(Nobody):
    """Roots its tree at another token than the last."""

    def propose(self, tree, budget):
        tree.plant((self.last + 1) % VOCAB_SIZE)


class Attaching(Nobody):
    """Attaches one node, as it is told."""

    def __init__(self, token, log_probability=-0.5):
        self.given = token, log_probability

    def propose(self, tree, budget):
        tree.attach(0, *self.given)


class OtherRoot(Nobody):
    """Writes over the root of the tree that it is given."""

    capabilities = Capabilities(plants_root=True)

    def propose(self, tree, budget):
        tree.plant(self.last)
        tree.tokens[0] = (self.last + 1) % VOCAB_SIZE


class Both(FixedPolicy):
    """Drafted trees that model-free drafts extend."""

    wants_model_free = True


def model_free(pair, *drafters):
    """A decoder of trees that ``drafters`` grow alone."""
    return pair.decoder(ModelFreePolicy(4), drafter=None, model_free=DrafterGroup(drafters))


@pytest.mark.parametrize("drafter", [Nobody(), Attaching(7), Attaching(True)], ids=["none", "a guess", "a truth value"])
def test_guesses_change_no_token(pair, drafter):
    found = pair.decoder(TREE, drafter=drafter).generate(PROMPT, max_new_tokens=COUNT)

    assert found.tokens == pair.reference(PROMPT, COUNT)


def test_a_root_that_is_not_the_last_token_is_refused(pair):
    with pytest.raises(YggdrasilError, match=r"the drafter nobody did not keep token \d+, the last that is certain"):
        pair.decoder(TREE, drafter=Elsewhere()).generate(PROMPT, max_new_tokens=COUNT)


@pytest.mark.parametrize("drafter", [Elsewhere(), OtherRoot()], ids=["planted", "written over"])
def test_a_model_free_drafter_keeps_the_root(pair, drafter):
    for drafters in ([drafter], [Nobody(), drafter], [drafter, Attaching(7)]):
        with pytest.raises(
            YggdrasilError, match=r"the drafter nobody did not keep token \d+, the last that is certain"
        ):
            model_free(pair, *drafters).generate(PROMPT, max_new_tokens=COUNT)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**6])
def test_tokens_that_there_are_not_are_refused(pair, token):
    drafter = Attaching(token)
    beside = pair.decoder(Both(TreeShape(2, 2, 8)), model_free=drafter)
    for decoder in (pair.decoder(TREE, drafter=drafter), model_free(pair, drafter), beside):
        with pytest.raises(YggdrasilError, match=f"the drafter nobody attached token {token}; the vocabulary ends at"):
            decoder.generate(PROMPT, max_new_tokens=COUNT)


@pytest.mark.parametrize(("given", "error"), [((5.5,), TypeError), ((5, math.nan), ValueError), ((5, 0.1), ValueError)])
def test_what_is_no_guess_is_refused_where_it_is_attached(pair, given, error):
    with pytest.raises(error):
        pair.decoder(TREE, drafter=Attaching(*given)).generate(PROMPT, max_new_tokens=COUNT)


def test_nodes_after_a_removed_one_are_checked(pair):
    """A grammar removes nodes by their scores, so that the tree has gaps."""
    tree = pair.decoder(TREE).assembly.engine.tree
    tree.plant(5)
    for token in (6, 7, VOCAB_SIZE):
        tree.attach(0, token, -0.1)
    tree.scores[1] = float("-inf")
    with pytest.raises(YggdrasilError, match=f"the drafter mine attached token {VOCAB_SIZE}"):
        check_tree(tree, 5, VOCAB_SIZE, "mine")


def test_a_drafter_that_reads_states_has_a_cost():
    """Without one it would be model-free, and get no states."""
    drafter = Nobody()
    drafter.capabilities = Capabilities(layers=(1,))
    with pytest.raises(YggdrasilError, match="nobody reads hidden states, but its cost has no step"):
        is_model_free(drafter)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((99,), "layers of the drafter nobody holds 99; the target's layers are 0 to 1, and -1 is what"),
        ((0, -2), "holds -2; the target's layers are 0 to 1"),
        (None, "layers of the drafter nobody is None; it must be a list of whole numbers"),
    ],
    ids=["behind the last", "before the head's input", "none"],
)
def test_states_of_layers_that_there_are_not_are_refused(pair, layers, said):
    drafter = Nobody()
    drafter.capabilities = Capabilities(layers=layers)
    with pytest.raises(YggdrasilError, match=said):
        pair.decoder(TREE, drafter=drafter)
