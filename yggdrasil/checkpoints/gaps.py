"""Reject checkpoints whose tensors are not exactly those of their model."""

import re
from collections.abc import Sequence

from yggdrasil.errors import YggdrasilError

# Buffers in older checkpoints that loaders recompute, and draft heads stored with the model.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|\.position_ids$|^medusa_head\.|^model\.mtp_")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def refuse_gaps(name: str, missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]) -> None:
    """Raise if the checkpoint ``name`` lacks weights or has others: missing ones would be left at random values.

    Args:
        missing: names of weights that the model has and the checkpoint lacks.
        unexpected: names that the model does not have.
        misshapen: names of weights with the stored and the expected shape.

    Raises:
        YggdrasilError: if any of the three is not empty.
    """
    faults = (("lacks", missing), ("holds, beyond what the model has,", unexpected), ("has misshapen", misshapen))
    said = [f"{verb} {_listed(keys)}" for verb, keys in faults if keys]
    if said:
        raise YggdrasilError(
            f"{name} {' and '.join(said)}: its weights are not those of its config.json; fetch the checkpoint again"
        )


def is_ignored(key: str, num_layers: int, num_drafting: int) -> bool:
    """Return whether tensor ``key`` may be in the checkpoint without being a weight of the model.

    These are obsolete buffers, draft heads, and drafting layers numbered from ``num_layers`` on.
    """
    found = _LAYER.match(key)
    return (found is not None and 0 <= int(found[1]) - num_layers < num_drafting) or _IGNORED.search(key) is not None


def _listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
