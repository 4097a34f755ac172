"""What steps compute: an unmodified transformers model over weights and caches that are inputs, traced as it is.

Dims: W rows of a step, T tree slots its mask covers, V vocabulary, H hidden size, R rows whose logits are wanted.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from yggdrasil.checkpoints.families import cache_name
from yggdrasil.checkpoints.packable import is_packable
from yggdrasil.runtime.forward import HEAD_INPUT, RUNNERS_UP, Forward, ModelCall, likeliest_tokens
from yggdrasil.runtime.loaded import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Call = TypeVar("Call")


class StepModule(nn.Module):
    """What a step computes: ``forward(weights, caches, *inputs)``."""

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Layers that may be compiled by themselves and called; none where the step is compiled as a whole."""
        return ()

    def tracing(self) -> AbstractContextManager[object]:
        """What the step and its layers are traced under."""
        return nullcontext()


class CallStep(StepModule, Generic[Call]):
    """A step around ``call``, which is traced with it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def decoder_layers(self) -> Sequence[nn.Module]:
        return self._call.decoder_layers if isinstance(self._call, TracedCall) else ()

    def tracing(self) -> AbstractContextManager[object]:
        return self._call.tracing() if isinstance(self._call, TracedCall) else nullcontext()


class _RowBits(TorchFunctionMode):
    """What PyTorch computes otherwise for one row than for several, in its last bits, in a way that no width changes.

    Linear layers that are no packed module, as a mixture's router, sum each row in one order. Activations read whole
    vectors alone: for the elements that are left PyTorch has other functions, and which those are follows the width.
    Where two experts are nearly equal a row would go another way.
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


_WHOLE = 64  # elements of a row: whole vectors of every processor, however PyTorch unrolls them
_ACTIVATIONS = {
    torch.sigmoid, torch.Tensor.sigmoid, nn.functional.sigmoid, nn.functional.softplus, nn.functional.silu,
    torch.tanh, torch.Tensor.tanh, nn.functional.gelu,
}  # fmt: skip


def _is_served(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return weight.dim() == 2 and rows.dtype == weight.dtype and is_packable(weight)


class TracedCall:
    """The traced part of every step: an unmodified transformers model over weights and caches given as inputs."""

    def __init__(self, loaded: LoadedModel, vocab_size: int, hidden_layers: Sequence[int] = ()) -> None:
        self.hidden_layers = tuple(hidden_layers)
        self._loaded = loaded
        self._names = list(loaded.tensors)
        self._num_threads = loaded.num_threads
        self._remembering = loaded.outline.remembering_layers
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
        rows: Tensor | None = None,  # [R] int64, all where None
    ) -> Forward:
        from yggdrasil.runtime.step_cache import StepCache  # here: it imports transformers, which no native step needs

        cache = StepCache.over(caches, self._loaded.outline, offsets, tree_mask)
        captured: dict[int, Tensor] = {}
        with self.tracing(), ExitStack() as hooks:
            self._capture(captured, hooks, rows)
            model = self._loaded.model
            output = torch.func.functional_call(
                model,
                dict(zip(self._names, weights, strict=True)),
                kwargs={
                    # An id that only a padded target knows has no row in a drafter.
                    "input_ids": tokens.clamp(max=self._last_token)[None],
                    # Padding rows may lie past the last position, where a learned table has no row.
                    "position_ids": positions.clamp(max=self._last_position)[None],
                    "attention_mask": tree_mask[None, None],
                    cache_name(model): cache,
                    "use_cache": True,
                    "step_cache": cache,
                    "num_threads": self._num_threads,
                },
            )
        assert cache.layers_read >= self._remembering, "a layer attends or recurs without the step's cache"
        logits, hidden = output.logits[0, :, : self.vocab_size], captured[HEAD_INPUT]
        wanted = hidden if rows is None else hidden[rows]
        if RUNNERS_UP in self.hidden_layers:
            captured[RUNNERS_UP] = likeliest_tokens(logits)
        # Rows are picked here: between layers it would be a difference of those that repeat.
        own = (HEAD_INPUT, RUNNERS_UP)
        layers = [captured[layer] if layer in own else captured[layer][0] for layer in self.hidden_layers]
        return Forward(wanted, layers, _Logits(logits, self._num_threads))

    def tracing(self) -> AbstractContextManager[object]:
        """On a CPU, a mode in which every linear layer gives a row the same bits at any width."""
        return _RowBits(self._num_threads) if self._loaded.device.type == "cpu" else nullcontext()

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """The model's layers, in order; none where some read keys and values that others made."""
        if getattr(self._loaded.model.config.get_text_config(), "num_kv_shared_layers", 0):
            return ()
        return tuple(decoder_layers(self._loaded.model))

    def _capture(self, captured: dict[int, Tensor], hooks: ExitStack, rows: Tensor | None) -> None:
        """Note the head's input and the outputs of ``hidden_layers`` while the model runs; its head reads ``rows``.

        They are picked here and not by the model: a drafter may read the head's input of every row all the same.
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
            if layer not in (HEAD_INPUT, RUNNERS_UP):
                hooks.callback(decoder_layers(model)[layer].register_forward_hook(after_layer(layer)).remove)


class _Logits:
    """The head of a pass that has made its logits."""

    def __init__(self, logits: Tensor, num_threads: int) -> None:
        self._logits, self._num_threads = logits, num_threads

    def logits(self, rows: Tensor) -> Tensor:
        return self._logits

    def best(self, rows: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        best, tokens = torch.ops.yggdrasil.best_tokens(self._logits, self._num_threads)
        return best, tokens


def decoder_layers(model: "PreTrainedModel") -> nn.ModuleList:
    """The list of decoder layers, under whichever name the family keeps it."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(f"{type(model).__name__} keeps no list of its {num_layers} layers")


class PrefillStep(CallStep[ModelCall]):
    """Read a chunk of certain tokens; logits and hidden state of one row. Rows past the chunk's end are padding."""

    def forward(
        self,
        weights: list[Tensor],
        caches: list[Tensor],
        tokens: Tensor,  # [W] int64
        start: Tensor,  # [1] int64, position of the first row
        last: Tensor,  # [1] int64, the row that is asked for
    ) -> tuple[Tensor, ...]:
        """Returns (choice [1], its logit [1], head input [1, H] float32, logits [1, V], *layers [W, H])."""
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        mask = rows[:, None] >= rows[None, :]
        offsets = start.expand(2).contiguous()
        found = self._call(weights, caches, tokens, start + rows, mask, offsets, last)
        logits = found.logits
        best, choice = found.best_tokens()
        return choice, best, found.hidden.float(), logits, *found.layers
