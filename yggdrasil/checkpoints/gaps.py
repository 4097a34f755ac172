"""Checkpoints that are not of their model, tensor for tensor, are refused."""

import re
from collections.abc import Sequence

from yggdrasil.errors import YggdrasilError

# Buffers that older checkpoints hold and every loader computes anew, and heads that draft for the model.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|\.position_ids$|^medusa_head\.|^model\.mtp_")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def refuse_gaps(name: str, missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]) -> None:
    """Refuse the checkpoint ``name`` that lacks weights of its model or holds others; else gaps would stay random.

    ``misshapen`` say of each what its shape is and should be.

    Raises:
        YggdrasilError: any of the three is not empty.
    """
    faults = (("lacks", missing), ("holds, beyond what the model has,", unexpected), ("has misshapen", misshapen))
    said = [f"{verb} {_listed(keys)}" for verb, keys in faults if keys]
    if said:
        raise YggdrasilError(
            f"{name} {' and '.join(said)}: its weights are not those of its config.json; fetch the checkpoint again"
        )


def is_ignored(key: str, num_layers: int, num_drafting: int) -> bool:
    """Whether a tensor is none of the model's own: also where layers that draft are counted on behind its layers."""
    found = _LAYER.match(key)
    return (found is not None and 0 <= int(found[1]) - num_layers < num_drafting) or _IGNORED.search(key) is not None


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
