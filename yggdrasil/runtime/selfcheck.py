"""Check that tree attention equals a model's own attention, before the model is used.

Model families differ in the arguments of their attention function. The check runs two passes over a short text, such
that rounding of quantised or bfloat16 weights cannot cause a false alarm:

1. The model runs with its own mask, positions and eager attention. In every layer, tree attention gets the same
   queries, keys and values, and both outputs are computed in float32 and compared.
2. The model runs as in a decode step. Every layer's attention returns its output of pass 1, so queries, keys and values
   must equal those of pass 1; if they do not, positions or another part of the step are wrong.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from yggdrasil.checkpoints.families import cache_name
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.attention import ATTENTION_NAME, tree_attention
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.step_cache import StepCache

_CHECKED_NAME = "yggdrasil_selfcheck"
_NUM_TOKENS = 24  # length of the default text
_TOLERANCE = 2e-3  # fraction of the reference's range, in float32
_INPUT_TOLERANCE = {torch.float32: 2e-3}  # for queries, keys and values, by the model's dtype; others 2e-2
_TERMS = ("scaling", "sliding_window", "softcap")  # arguments of the attention that the message lists


class _Differs(Exception):
    """The first difference found. The message has the layer and the tensor or argument."""


@dataclass
class _Layer:
    """Inputs and output of one layer's attention in pass 1."""

    index: int
    inputs: tuple[Tensor, Tensor, Tensor]  # queries [1, Hq, T, D], keys and values [1, Hkv, T, D]
    output: Tensor  # [1, T, Hq, D], by the model's own eager attention


@dataclass
class _Record:
    """The layers of pass 1 in the order in which they ran, and the number of layers that ran in pass 2."""

    num_threads: int
    layers: list[_Layer] = field(default_factory=list)
    num_replayed: int | None = None  # None during pass 1


@torch.inference_mode()
def check_tree_attention(loaded: LoadedModel, tokens: Sequence[int] | None = None) -> None:
    """Compare tree attention with the model's own attention on ``tokens``, layer by layer.

    ``tokens`` are ids of a short text, by default 24 ids spread over the vocabulary.

    Raises:
        YggdrasilError: if tree attention differs (the message has the layer), the model cannot run as in a decode
            step, or its logits are not finite.
    """
    device, model = loaded.device, loaded.model
    ids = torch.tensor(tokens or _spread_ids(loaded.vocab_size), device=device)[None]
    record = _Record(loaded.num_threads)
    name = f"{loaded.name}: {type(model).__name__}"
    num_attending = sum(heads > 0 for heads, _ in loaded.outline.key_heads)
    try:
        model.set_attn_implementation(_CHECKED_NAME)
        expected = model(input_ids=ids, use_cache=False, selfcheck=record).logits[0].float()
        record.num_replayed = 0
        _refuse_infinite(expected, loaded)
        found = _read_as_step(model, ids, loaded, record)
        if record.num_replayed != num_attending:
            raise _Differs(f"{record.num_replayed} of its {num_attending} layers call it")
        _compare("the logits", found, expected, _INPUT_TOLERANCE.get(loaded.dtype, 2e-2))
    except _Differs as difference:
        raise YggdrasilError(
            f"{name} computes something that tree attention does not ({difference}); it cannot be served"
        ) from None
    except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, IndexError) as error:
        raise YggdrasilError(f"{name} does not run under tree attention ({error})") from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _spread_ids(vocab_size: int) -> list[int]:
    """Return ids spread over the vocabulary, whose first ids often are tokens that occur in no text."""
    return [(2 * index + 1) * vocab_size // (2 * _NUM_TOKENS) for index in range(_NUM_TOKENS)]


def _read_as_step(model: PreTrainedModel, ids: Tensor, loaded: LoadedModel, record: _Record) -> Tensor:
    """Run the text with positions, mask and cache as in a decode step; return its logits [T, V] float32."""
    length = ids.shape[1]
    positions = torch.arange(length, device=loaded.device)
    cache = StaticCache.allocate(loaded.outline, length, loaded.dtype, loaded.device)
    mask, offsets = _causal(length, loaded.device), torch.zeros(2, dtype=torch.int64, device=loaded.device)
    step = StepCache.over(cache.tensors(), loaded.outline, offsets, mask)
    logits: Tensor = model(
        input_ids=ids, position_ids=positions[None], attention_mask=mask[None, None],
        use_cache=True, step_cache=step, num_threads=loaded.num_threads, selfcheck=record, **{cache_name(model): step},
    ).logits  # fmt: skip
    return logits[0].float()


def _causal(length: int, device: torch.device) -> Tensor:
    """Return a causal mask [length, length] bool."""
    positions = torch.arange(length, device=device)
    return positions[:, None] >= positions[None, :]


def _refuse_infinite(logits: Tensor, loaded: LoadedModel) -> None:
    if not torch.isfinite(logits).all():
        raise YggdrasilError(
            f"{loaded.name}: the logits are not finite (NaN or infinity); the weights are damaged or overflow in "
            f"{loaded.dtype}"
        )


def _checked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    selfcheck: _Record,
    step_cache: StepCache | None = None,
    num_threads: int | None = None,
    **terms: Any,
) -> tuple[Tensor, None]:
    """In pass 1, run the model's own attention and compare tree attention with it; in pass 2, compare the inputs.

    Both passes return the output of the model's own attention in pass 1.
    """
    inputs = (query, key, value)
    if selfcheck.num_replayed is not None:
        before = selfcheck.layers[selfcheck.num_replayed]
        if before.index != module.layer_idx:
            raise _Differs(f"layer {before.index} does not call it in a decode step")
        tolerance = _INPUT_TOLERANCE.get(query.dtype, 2e-2)
        for kind, ours, own in zip(("queries", "keys", "values"), inputs, before.inputs, strict=True):
            _compare(f"the {kind} of layer {module.layer_idx}", ours, own, tolerance)
        kept = None if step_cache is None else step_cache.step_keys[before.index]
        if kept is not None and (kept.shape[0], kept.shape[2]) != (key.shape[1], key.shape[3]):
            raise _Differs(
                f"layer {before.index} has {key.shape[1]} key heads of {key.shape[3]} numbers where its configuration "
                f"says {kept.shape[0]} of {kept.shape[2]}"
            )
        selfcheck.num_replayed += 1
        return before.output, None
    if any(layer.index == module.layer_idx for layer in selfcheck.layers):
        raise _Differs(f"layer {module.layer_idx} attends more than once in a pass, over other keys each time")
    own_attention = _eager_attention_of(module)
    output = own_attention(module, query, key, value, attention_mask, **terms)[0]
    mask = (
        attention_mask.float() if attention_mask is not None and attention_mask.dtype != torch.bool else attention_mask
    )
    wide = tuple(each.float() for each in inputs)
    expected = own_attention(module, *wide, mask, **terms)[0]
    found = _tree_attention_alone(module, wide, selfcheck.num_threads, terms)
    passed = ", ".join(f"{term} {terms[term]}" for term in _TERMS if terms.get(term) is not None)
    _compare(
        f"the attention of layer {module.layer_idx}, called with {passed or 'no terms'},", found, expected, _TOLERANCE
    )
    selfcheck.layers.append(_Layer(int(module.layer_idx), inputs, output))  # type: ignore[arg-type]
    return output, None


def _tree_attention_alone(
    module: nn.Module, inputs: Sequence[Tensor], num_threads: int, terms: dict[str, Any]
) -> Tensor:
    """Compute tree attention [1, T, Hq, D] of one layer with an empty context and a causal mask."""
    query, key, value = inputs
    length, layer = query.shape[2], int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = (torch.zeros_like(key[0]) for _ in range(2))
    offsets = torch.zeros(2, dtype=torch.int64, device=query.device)
    step = StepCache({layer: keys}, {layer: values}, offsets)
    mask = _causal(length, query.device)[None, None]
    return tree_attention(module, query, key, value, mask, step_cache=step, num_threads=num_threads, **terms)[0]


def _eager_attention_of(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """Return the eager attention function of the file that defines ``module``; transformers' sdpa if it has none."""
    file = sys.modules[type(module).__module__]
    found: Callable[..., tuple[Tensor, Any]]
    found = getattr(file, "eager_attention_forward", None) or ALL_ATTENTION_FUNCTIONS["sdpa"]
    return found


def _compare(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise ``_Differs`` if the largest difference exceeds ``tolerance`` times the range of ``expected``."""
    if found.shape != expected.shape:
        raise _Differs(f"{what} have the shape {list(found.shape)}, not {list(expected.shape)}")
    found, expected = found.float(), expected.float()
    scale = float((expected.amax() - expected.amin()).clamp(min=1e-6))
    difference = float((found - expected).abs().amax()) / scale
    if not difference <= tolerance:
        raise _Differs(f"{what} differ by {difference:.1%} of their range")


AttentionInterface.register(_CHECKED_NAME, _checked_attention)
AttentionMaskInterface.register(_CHECKED_NAME, eager_mask)
