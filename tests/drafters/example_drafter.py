"""A whole drafter in thirty lines: after a token, propose what last followed that token.

Any class with these six names can draft; it need not be registered. The engine calls ``begin`` once a request,
``propose`` before a verification, and ``extend`` with the tokens that became certain. Proposals may be wrong: the
target decides, so the worst a drafter can do is to be slow.
"""

import math

from yggdrasil.drafters import Capabilities


class LastFollowerDrafter:
    name = "last continuation"
    capabilities = Capabilities()  # reads no states of the target, runs no steps

    def begin(self, tokens):
        self._follower = {}
        self._last = tokens[0]
        self.extend(tokens[1:], {})

    def extend(self, tokens, states):
        for token in tokens:
            self._follower[self._last] = token
            self._last = token

    def propose(self, tree, budget):  # the tree's root is the last certain token
        node, token = 0, self._last
        for _ in range(min(budget.depth, tree.num_nodes - tree.size)):
            if token not in self._follower:
                return
            token = self._follower[token]
            node = tree.attach(node, token, math.log(0.5))  # an estimate that the token is accepted behind its parent

    def cost(self, budget):
        return ()  # no steps that would have to be priced
