"""Refuses checkpoints whose tensors are not exactly those of their model."""

import re
from collections.abc import Sequence

from yggdrasil.errors import YggdrasilError, listed

# Buffers in older checkpoints that loaders recompute, and draft heads stored with the model.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|\.position_ids$|^medusa_head\.|^model\.mtp_")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def refuse_gaps(name: str, missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]) -> None:
    """Check that a checkpoint has exactly its model's weights: missing weights would keep random values.

    Args:
        name: the checkpoint's name in messages.
        missing: names of weights that the model has and the checkpoint lacks.
        unexpected: names of tensors that the checkpoint has and the model lacks.
        misshapen: names of weights with the stored and the expected shape.

    Raises:
        YggdrasilError: any of the three lists is not empty.
    """
    faults = (("lacks", missing), ("holds, beyond what the model has,", unexpected), ("has misshapen", misshapen))
    said = [f"{verb} {listed(keys)}" for verb, keys in faults if keys]
    if said:
        raise YggdrasilError(
            f"{name} {' and '.join(said)}: its weights are not those of its config.json; fetch the checkpoint again"
        )


def is_ignored(key: str, num_layers: int, num_draft_layers: int) -> bool:
    """Return whether the tensor ``key`` of a checkpoint may be ignored because it is no weight of the model itself.

    Such tensors are obsolete buffers like ``inv_freq``, draft heads, and the ``num_draft_layers`` layers for
    multi-token prediction, which are numbered from ``num_layers`` on.
    """
    found = _LAYER.match(key)
    return (found is not None and 0 <= int(found[1]) - num_layers < num_draft_layers) or _IGNORED.search(
        key
    ) is not None
