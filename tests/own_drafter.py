"""A user's own drafter that never proposes anything."""

from yggdrasil.drafters import Capabilities


class Nobody:
    """Runs no passes, and proposes nothing."""

    name, capabilities = "nobody", Capabilities()

    def begin(self, tokens):
        self.last = tokens[-1]

    def extend(self, tokens, states):
        self.last = tokens[-1]

    def propose(self, tree, budget):
        pass

    def cost(self, budget):
        return ()
