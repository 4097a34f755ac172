"""The traced part of a head's steps: functions of its module, with weights and caches as inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.drafters.heads.layers import target_tokens
from yggdrasil.runtime.loaded import LoadedModel


class HeadCall:
    """Calls a head's module with the weights that a step gets as inputs.

    Dims: W rows of a pass, T slots that its mask covers.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._names = loaded, list(loaded.tensors)

    def run(self, function: Callable[..., Any], weights: list[Tensor], *inputs: Tensor) -> Any:
        """Return ``function(module, *inputs)``; ``module`` is the ``DraftingHead`` with ``weights`` as its tensors.

        Args:
            weights: the head's tensors, in the order of ``LoadedModel.tensors``.
        """
        named = {f"module.{name}": weight for name, weight in zip(self._names, weights, strict=True)}
        return torch.func.functional_call(_Called(self._loaded.model, function), named, inputs)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *,
        caches: Sequence[Tensor], layer: int, offsets: Tensor, mask: Tensor, window: int,
    ) -> Tensor:  # fmt: skip
        """Write keys and values of new rows to the cache of ``layer``, and return the attention output of ``query``.

        The output is [R, Hq, D] for R queries.

        Args:
            query: [Hq, R, D] queries of all W new rows, or of some of these rows.
            key: [Hkv, W, D] keys of the new rows. ``value`` has the rows' values in the same shape.
            caches: KV caches: keys of all layers, then values of all layers.
            layer: index of the layer.
            offsets: [2] int64: number of slots before the mask, which all rows see; first slot written.
            mask: [R, T] bool over the slots from ``offsets[0]`` on.
            window: attention window in keys; 0: unlimited.
        """
        output: Tensor = torch.ops.yggdrasil.tree_attention(
            query[None], key[None], value[None], caches[layer], caches[len(caches) // 2 + layer], offsets, mask,
            query.shape[-1] ** -0.5, window, 0.0, None, self._loaded.num_threads,
        )  # fmt: skip
        return output[0]

    def target_tokens(self, weights: list[Tensor], drafted: Tensor) -> Tensor:
        """Map draft vocabulary ids ``drafted`` (int64, any shape) to the target's token ids.

        Args:
            weights: the head's tensors, which include d2t if the head drafts only some tokens. Without d2t ``drafted``
                is returned.
        """
        return target_tokens(drafted, dict(zip(self._names, weights, strict=True)).get("head.d2t"))


class _Called(nn.Module):
    """A module whose forward calls ``function`` on ``module``, so that ``functional_call`` can supply the tensors."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._function = module, function

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(self.module, *inputs)
