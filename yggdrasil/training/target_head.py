"""The target's head: what makes logits of the states before it."""

from math import inf, isclose
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.loaded import LoadedModel

_SMALL, _LARGE = 2.0**-7, 2.0**20  # sums by which a scale and a bound are told


class TargetHead(NamedTuple):
    """What a state is multiplied by, what is added, and how far from 0 a logit can be."""

    rows: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    bound: float = inf  # reached as by a hyperbolic tangent; infinite of most families

    def of(self, tokens: Tensor) -> Self:
        """What it says of ``tokens`` [Vd] alone, in float32."""
        bias = None if self.bias is None else self.bias[tokens].float()
        return type(self)(self.rows[tokens].float(), bias, self.bound)

    def logits(self, states: Tensor) -> Tensor:
        """Of states [.., H], [.., V] float32."""
        logits = (states @ self.rows.T).float()
        if self.bias is not None:
            logits = logits + self.bias
        return logits if self.bound == inf else self.bound * torch.tanh(logits / self.bound)


def target_head(loaded: LoadedModel) -> TargetHead:
    """The target's head, with all that its family does to logits.

    Raises:
        YggdrasilError: it is in another form.
    """
    head: Any = loaded.model.get_output_embeddings()
    rows, bias = _table(head, loaded), getattr(head, "bias", None)
    scale, bound = _scale_and_bound(loaded, head)
    if scale != 1.0:  # else they are the target's own memory
        rows, bias = rows * scale, None if bias is None else bias * scale
    return TargetHead(rows, None if bias is None else bias.detach(), bound)


def target_embedding(loaded: LoadedModel) -> Tensor:
    """The target's embedding [V, H].

    Raises:
        YggdrasilError: it is in another form.
    """
    return _table(loaded.model.get_input_embeddings(), loaded)


def _table(module: Any, loaded: LoadedModel) -> Tensor:
    table, hidden = getattr(module, "weight", None), loaded.model.config.get_text_config().hidden_size
    if not isinstance(table, Tensor) or table.ndim != 2 or table.shape[1] != hidden:
        raise YggdrasilError(f"{loaded.name} has no embedding as wide as its states, which a head needs; train no head")
    return table.detach()


@torch.inference_mode()
def _scale_and_bound(loaded: LoadedModel, head: nn.Module) -> tuple[float, float]:
    """What becomes of the head's sums: Granite and Cohere scale them, Gemma 2 bounds them."""
    model: Any = loaded.model
    sums = torch.tensor([[[_SMALL, _LARGE]]], device=loaded.device)
    hook = head.register_forward_hook(lambda *_: sums)
    try:
        with own_attention(model):
            small, large = model(sums.new_zeros(1, 1, dtype=torch.int64), use_cache=False).logits[0, 0].tolist()
    finally:
        hook.remove()
    scale = 1.0 if isclose(small, _SMALL, rel_tol=1e-2) else small / _SMALL
    return scale, inf if isclose(large, scale * _LARGE, rel_tol=1e-2) else large
