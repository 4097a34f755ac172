"""A chain: the drafter's greedy continuation, as in vLLM's speculative decoding and Leviathan et al. (2023)."""

from rivals.protocol import StaticGrowth, StaticTree


def sequence(length: int) -> StaticGrowth:
    """Return a chain of ``length`` argmax tokens."""
    return StaticGrowth(f"sequence of {length}", StaticTree(tuple(range(length)), (0,) * length))
