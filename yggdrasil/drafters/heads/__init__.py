"""Draft heads: drafters that read the target's hidden states, which the target computes in any case."""
