"""A drafter of one's own, by the protocol's six names alone."""


class Nobody:
    """Never guesses."""

    name, hidden_layers = "nobody", ()

    def begin(self, tokens):
        self.last = tokens[-1]

    def extend(self, tokens, hidden):
        self.last = tokens[-1]

    def head(self, tree):
        tree.plant(self.last)

    def grow(self, tree, width, depth):
        pass
