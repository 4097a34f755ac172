"""Computes log-probabilities of a given text by verification passes, in which the text is a tree without branches."""

from collections.abc import Iterator, Sequence

import torch

from yggdrasil.acceptance.sampler import TokenLogprobs, logprobs_of
from yggdrasil.engine.assembly import Assembly
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.passes import fitting


@torch.inference_mode()
def score(assembly: Assembly, tokens: Sequence[int], top: int) -> Iterator[list[TokenLogprobs]]:
    """Yield the log-probability of every token of ``tokens`` but the first, one list per target pass.

    The lists together are in the order of the tokens; the last may be empty. KV entries of ``tokens`` replace those in
    the cache.

    Args:
        top: number of likeliest tokens to list at each token's index.

    Raises:
        YggdrasilError: the plan has no verify width above 1.
    """
    target, widths = assembly.logit_target, [width for width in assembly.shapes.verify_widths if width > 1]
    if not widths:
        raise YggdrasilError(
            "log-probabilities of a text need passes of several rows, and this plan has plain steps alone; calibrate "
            "one without --drafter none"
        )
    tree = assembly.engine.tree
    target.figures.forget()
    target.text.begin(tokens, 0)
    while target.length < len(tokens):
        start = target.length
        chunk = tokens[start : start + widths[-1]]
        tree.plant(chunk[0])
        tree.graft(range(len(chunk) - 1), chunk[1:], [0.0] * (len(chunk) - 1))
        target.order.copy_(torch.arange(tree.num_nodes))
        _, logits, *_ = target.run_tree(fitting(widths, len(chunk)))
        target.commit(list(range(len(chunk))))
        following = tokens[start + 1 : start + 1 + len(chunk)]
        yield [logprobs_of(token, row, top) for token, row in zip(following, logits, strict=False)]
