"""The target's LM head as plain tensors."""

from math import inf, isclose
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.loaded import LoadedModel

_SMALL, _LARGE = 2.0**-7, 2.0**20  # probe outputs of the LM head, which show scale and soft cap


class TargetHead(NamedTuple):
    """Weight, bias and soft cap of an LM head. Dims: V vocabulary, H hidden size."""

    rows: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    bound: float = inf  # soft cap: logits become bound * tanh(logits / bound); inf: no soft cap

    def restricted_to(self, tokens: Tensor) -> Self:
        """Return a copy of the LM head with the rows of ``tokens`` ([Vd] int64 token ids) only, in float32."""
        bias = None if self.bias is None else self.bias[tokens].float()
        return type(self)(self.rows[tokens].float(), bias, self.bound)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [..., V], float32, of the hidden states ``states`` [..., H]."""
        logits = (states @ self.rows.T).float()
        if self.bias is not None:
            logits = logits + self.bias
        return logits if self.bound == inf else self.bound * torch.tanh(logits / self.bound)


def target_head(loaded: LoadedModel) -> TargetHead:
    """Return the target's LM head, with the scale and soft cap that its family applies to logits.

    Raises:
        YggdrasilError: the LM head has no weight of shape [V, H].
    """
    head: Any = loaded.model.get_output_embeddings()
    rows, bias = _table(head, loaded), getattr(head, "bias", None)
    scale, bound = _scale_and_bound(loaded, head)
    if scale != 1.0:  # otherwise the rows share memory with the target
        rows, bias = rows * scale, None if bias is None else bias * scale
    return TargetHead(rows, None if bias is None else bias.detach(), bound)


def target_embedding(loaded: LoadedModel) -> Tensor:
    """Return the target's token embedding, [V, H], which shares the target's memory.

    Raises:
        YggdrasilError: the embedding has no weight of shape [V, H].
    """
    return _table(loaded.model.get_input_embeddings(), loaded)


def _table(module: Any, loaded: LoadedModel) -> Tensor:
    table, hidden = getattr(module, "weight", None), loaded.model.config.get_text_config().hidden_size
    if not isinstance(table, Tensor) or table.ndim != 2 or table.shape[1] != hidden:
        raise YggdrasilError(f"{loaded.name} has no embedding as wide as its states, which a head needs; train no head")
    return table.detach()


@torch.inference_mode()
def _scale_and_bound(loaded: LoadedModel, head: nn.Module) -> tuple[float, float]:
    """Return the factor and soft cap that the model applies to the LM head's output (Granite, Cohere; Gemma 2).

    Both are measured: probe values replace the LM head's output.
    """
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
