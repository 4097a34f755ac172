"""Pad a Llama-family checkpoint to a larger shape that computes the same function.

A small trained pair widened to the shape of a real one has that shape's costs and keeps its own acceptance. Nothing new
ever reaches the residual stream: new channels of it stay zero, and so does what new heads, new intermediate units and
new blocks would add to it. All other new weights are random at the magnitude of the source's (new blocks are copies of
real ones), so no kernel finds anything to skip.

In float32 the copy gives the source's logits up to the rounding of sums. A factor that is not a power of two would be
rounded in bfloat16, so the norms (and ``q_proj`` where the head dimension is not enlarged by a power of four) are then
stored in float32. Loaded in bfloat16 the copy is as close to the source as bfloat16 is.

New vocabulary rows repeat the row of one token, the filler. An argmax gives the lower id of a tie, hence never a new
one; at worst, rounding prefers a copy where the filler itself would have been chosen. Sampling does see the copies: if
the filler has probability p, n copies together get n*p/(1 + n*p), most of which top-k or top-p sampling cuts off.
"""

from widening.checkpoint import WideningReport, widen_checkpoint, widen_in_memory
from widening.layout import RANDOM, ZERO, place_heads
from widening.shapes import SIZES, ModelShape, resolve_shape
from widening.source import read_shape

__all__ = [
    "RANDOM",
    "SIZES",
    "ZERO",
    "ModelShape",
    "WideningReport",
    "place_heads",
    "read_shape",
    "resolve_shape",
    "widen_checkpoint",
    "widen_in_memory",
]
