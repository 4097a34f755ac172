"""A sequence: the drafter's greedy continuation, as in vLLM's speculative decoding and Leviathan et al. (2023)."""

from yggdrasil.bench.rivals.protocol import StaticGrowth, StaticTree


def sequence(length: int) -> StaticGrowth:
    """Draft ``length`` tokens, each the likeliest after the one before."""
    return StaticGrowth(f"sequence of {length}", StaticTree(tuple(range(length)), (0,) * length))
