"""A whole drafter in thirty lines: after a token, guess what last followed that token.

Any class with these six names can draft; it need not be registered. The engine calls ``begin`` once a request, then
``head`` and ``grow`` before each verification, and ``extend`` with whatever became certain. Guesses may be wrong: the
target decides, so the worst a drafter can do is to be slow.
"""

import math


class LastFollowerDrafter:
    name = "last follower"
    hidden_layers = ()  # target layers whose states `extend` wants

    def begin(self, tokens):
        self._follower = {}
        self._last = tokens[0]
        self.extend(tokens[1:], {})

    def extend(self, tokens, hidden):
        for token in tokens:
            self._follower[self._last] = token
            self._last = token

    def head(self, tree):
        tree.plant(self._last)

    def grow(self, tree, width, depth):
        node, token = 0, self._last
        for _ in range(min(depth, tree.num_nodes - tree.size)):
            if token not in self._follower:
                return
            token = self._follower[token]
            node = tree.attach(node, token, math.log(0.5))  # how likely the guess is, as a log-probability
