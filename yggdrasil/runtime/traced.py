"""Steps traced from an unmodified transformers model, with weights and caches as inputs.

Dims: W rows of a step, T tree slots its mask covers, V vocabulary, H hidden size, R rows whose logits are requested.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from yggdrasil.checkpoints.families import cache_name
from yggdrasil.checkpoints.packable import is_packable
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.passes import HEAD_INPUT, Forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _RowBits(TorchFunctionMode):
    """Mode that replaces PyTorch functions whose results depend, in the last bits, on the number of rows.

    Unpacked linear layers, such as a mixture's router, sum each row in a fixed order. Inputs of activations are padded
    to whole vectors: PyTorch computes remaining elements by another function, and which elements remain depends on the
    width. Without the mode, a row's expert could depend on the width if two experts are nearly tied.
    """

    def __init__(self, num_threads: int) -> None:
        super().__init__()
        self._num_threads = num_threads

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear and not kwargs and _is_served(*args):
            rows, weight, *bias = args
            return torch.ops.yggdrasil.plain_linear(rows, weight, bias[0] if bias else None, self._num_threads)
        if func in _ACTIVATIONS and args and (left := args[0].shape[-1] % _WHOLE):
            rows, *rest = args
            whole = func(nn.functional.pad(rows, (0, _WHOLE - left)), *rest, **(kwargs or {}))
            return whole[..., : rows.shape[-1]]
        return func(*args, **(kwargs or {}))


_WHOLE = 64  # elements; a multiple of every processor's vector length, times PyTorch's unrolling
_ACTIVATIONS = {
    torch.sigmoid, torch.Tensor.sigmoid, nn.functional.sigmoid, nn.functional.softplus, nn.functional.silu,
    torch.tanh, torch.Tensor.tanh, nn.functional.gelu,
}  # fmt: skip


def _is_served(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return weight.dim() == 2 and rows.dtype == weight.dtype and is_packable(weight)


class TracedCall:
    """``ModelCall`` that runs an unmodified transformers model with weights and caches given as inputs."""

    def __init__(self, loaded: LoadedModel, vocab_size: int, hidden_layers: Sequence[int] = ()) -> None:
        self.hidden_layers = tuple(hidden_layers)
        self._loaded = loaded
        self._names = list(loaded.tensors)
        self._num_threads = loaded.num_threads
        self._remembering = loaded.sizes.remembering_layers
        self.vocab_size = vocab_size
        self._last_position = loaded.max_context - 1
        self._last_token = loaded.vocab_size - 1

    def __call__(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        positions: Tensor,  # [W] int64
        tree_mask: Tensor,  # [W, T] bool over the slots from offsets[0] on
        offsets: Tensor,  # [2] int64: context length, first slot written
        rows: Tensor | None = None,  # [R] int64, rows whose logits are requested; None for all
    ) -> Forward:
        from yggdrasil.runtime.step_cache import StepCache  # imported late: it imports transformers

        cache = StepCache.over(caches, self._loaded.sizes, offsets, tree_mask)
        captured: dict[int, Tensor] = {}
        with self.tracing(), ExitStack() as hooks:
            self._capture(captured, hooks, rows)
            model = self._loaded.model
            output = torch.func.functional_call(
                model,
                dict(zip(self._names, weights, strict=True)),
                kwargs={
                    # A drafter's embedding may have fewer rows than the target's padded vocabulary.
                    "input_ids": tokens.clamp(max=self._last_token)[None],
                    # Padding rows may be past the last position, for which a learned table has no row.
                    "position_ids": positions.clamp(max=self._last_position)[None],
                    "attention_mask": tree_mask[None, None],
                    cache_name(model): cache,
                    "use_cache": True,
                    "step_cache": cache,
                    "num_threads": self._num_threads,
                },
            )
        if cache.layers_read < self._remembering:
            raise YggdrasilError(
                f"the code of {type(model).__name__} in transformers {version('transformers')} does not pass a step's "
                "cache to all of its layers; install a newer transformers"
            )
        logits, hidden = output.logits[0, :, : self.vocab_size], captured[HEAD_INPUT]
        wanted = hidden if rows is None else hidden[rows]
        # Rows are selected here: selecting them between layers would make the repeated layers differ.
        layers = [captured[layer] if layer == HEAD_INPUT else captured[layer][0] for layer in self.hidden_layers]
        return Forward(wanted, layers, _Logits(logits, self._num_threads))

    def tracing(self) -> AbstractContextManager[object]:
        """Return a context manager under which, on a CPU, the results of a row are bitwise equal at any width.

        On other devices it does nothing.
        """
        return _RowBits(self._num_threads) if self._loaded.device.type == "cpu" else nullcontext()

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """The model's decoder layers, in order, to be compiled separately; if empty, a step is compiled as a whole.

        It is empty for models in which layers read keys and values of other layers (``num_kv_shared_layers``).
        """
        if getattr(self._loaded.model.config.get_text_config(), "num_kv_shared_layers", 0):
            return ()
        return tuple(decoder_layers(self._loaded.model))

    def _capture(self, captured: dict[int, Tensor], hooks: ExitStack, rows: Tensor | None) -> None:
        """Install hooks that record the LM head's input and the outputs of ``hidden_layers`` in ``captured``.

        The head is called with ``rows`` only, while the recorded head input has all rows: a drafter may read them.
        """

        def before_head(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor] | None:
            (states,) = arguments
            captured[HEAD_INPUT] = states[0]
            return None if rows is None else (states[:, rows],)

        def after_layer(layer: int) -> Callable[..., None]:
            def note(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
                captured[layer] = output if isinstance(output, Tensor) else output[0]

            return note

        model = self._loaded.model
        head = model.get_output_embeddings()
        hooks.callback(head.register_forward_pre_hook(before_head).remove)
        for layer in self.hidden_layers:
            if layer != HEAD_INPUT:
                hooks.callback(decoder_layers(model)[layer].register_forward_hook(after_layer(layer)).remove)


class _Logits:
    """``Head`` of a pass whose logits are already computed."""

    def __init__(self, logits: Tensor, num_threads: int) -> None:
        self._logits, self._num_threads = logits, num_threads

    def logits(self, rows: Tensor) -> Tensor:
        return self._logits

    def best(self, rows: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        best, tokens = torch.ops.yggdrasil.best_tokens(self._logits, self._num_threads)
        return best, tokens


def decoder_layers(model: "PreTrainedModel") -> nn.ModuleList:
    """Return the model's decoder layers: its first ``ModuleList`` with as many entries as the model has layers.

    Raises:
        ValueError: the model has no such ``ModuleList``.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(f"{type(model).__name__} keeps no list of its {num_layers} layers")
