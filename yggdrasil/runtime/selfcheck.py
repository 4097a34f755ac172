"""Check that tree attention equals a model's own attention, before the model is used.

Model families differ in the arguments of their attention function. The check runs passes over a short text, such that
rounding of quantised or bfloat16 weights cannot cause a false alarm:

1. The model runs with its own mask, positions and eager attention. In every layer, tree attention gets the same
   queries, keys and values, and both outputs are computed in float32 and compared.
2. The model runs as in decoding: a pass reads the first half of the text, which is committed, and a second pass
   verifies a tree, in which every token of the second half has a sibling. Every layer's attention returns its output of
   pass 1, and every layer's output is replaced by its output of pass 1. So queries, keys and values, and outputs of
   layers, must be those of pass 1; if they are not, positions, a recurrent layer or another part of the step are wrong.

Rounding may make a router choose another expert for some rows. So for a mixture, pass 2 compares only the median row.

Dims: T tokens of the text, W rows of a pass.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from yggdrasil.checkpoints.families import cache_name
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.attention import ATTENTION_NAME, tree_attention
from yggdrasil.runtime.cache import StaticCache
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.step_cache import StepCache
from yggdrasil.runtime.traced import TracedCall, decoder_layers

_CHECKED_NAME = "yggdrasil_selfcheck"
_NUM_TOKENS = 24  # length of the default text
_TOLERANCE = 2e-3  # of pass 1, in float32: largest difference as a fraction of the reference's range
_STEP_TOLERANCE = {torch.float32: 2e-3}  # of pass 2, by the model's dtype; 2e-2 for other dtypes
_ROUNDINGS = 4  # rounding errors of a layer's output that pass 2 tolerates, each of the dtype's precision
_TERMS = ("scaling", "sliding_window", "softcap")  # arguments of the attention that the message lists


class _Differs(Exception):
    """The first difference found. The message has the layer and the tensor or argument."""


class _Part(NamedTuple):
    """One pass of decoding over a part of the text. Every row is a token of the text or a sibling of one."""

    start: int  # number of tokens of the text before the pass
    rows: Tensor  # [W] int64, index in the text of the token at the row's position
    is_sibling: Tensor  # [W] bool, whether the row is a sibling of this token
    mask: Tensor  # [W, W] bool, whether a row sees another


@dataclass
class _Layer:
    """Inputs and output of one layer's attention in pass 1."""

    index: int
    inputs: tuple[Tensor, Tensor, Tensor]  # queries [1, Hq, T, D], keys and values [1, Hkv, T, D]
    output: Tensor  # [1, T, Hq, D], by the model's own eager attention


@dataclass
class _Record:
    """What pass 1 computed, and the part of the text that pass 2 reads."""

    loaded: LoadedModel
    parts: Sequence[_Part]
    is_mixture: bool
    layers: list[_Layer] = field(default_factory=list)  # in the order in which their attention ran
    outputs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # input and output [T, H] by layer
    part: _Part | None = None  # None during pass 1
    num_replayed: int = 0  # layers whose attention ran in this part

    def compare(self, what: str, found: Tensor, expected: Tensor, before: Tensor | None = None) -> None:
        """Compare rows [W, ...] of a tree pass with those of the model's own pass, ``expected`` [T, ...], by token.

        Raises ``_Differs`` if they differ. Siblings are not compared. If ``before`` [T, ...] is given, a layer's
        inputs, the differences of outputs and inputs are compared. ``what`` names the rows in the message.
        """
        assert self.part is not None
        is_own = ~self.part.is_sibling
        found, expected = found[is_own].float(), expected[self.part.rows[is_own]].float()
        tolerance = _STEP_TOLERANCE.get(self.loaded.dtype, 2e-2)
        if before is None:
            _compare(what, found, expected, tolerance, is_mixture=self.is_mixture)
            return
        before = before[self.part.rows[is_own]].float()
        slack = _ROUNDINGS * torch.finfo(self.loaded.dtype).eps * (expected.abs() + before.abs())
        difference = found - expected
        difference -= difference.clamp(-slack, slack)
        _compare(what, expected - before + difference, expected - before, tolerance, is_mixture=self.is_mixture)


@torch.inference_mode()
def check_tree_attention(loaded: LoadedModel, tokens: Sequence[int] | None = None) -> None:
    """Check that a model computes the same with tree attention as with its own attention, layer by layer.

    ``tokens`` are the ids of a short text; None or an empty text means 24 ids spread over the vocabulary. Afterwards
    the model's attention implementation is tree attention.

    Raises:
        YggdrasilError: tree attention differs (the message has the layer), the model cannot run as in a decode step, or
            its logits are not finite.
    """
    device, model = loaded.device, loaded.model
    ids = torch.tensor(tokens or _spread_ids(loaded.vocab_size), device=device)
    is_mixture = any(name.endswith("experts") for name, _ in model.named_modules())
    record = _Record(loaded, _parts_of(len(ids), device), is_mixture)
    name = f"{loaded.name}: {type(model).__name__}"
    try:
        model.set_attn_implementation(_CHECKED_NAME)
        with TracedCall(loaded, loaded.vocab_size).tracing(), _watched_layers(record):
            expected = model(input_ids=ids[None], use_cache=False, selfcheck=record).logits[0].float()
            if not torch.isfinite(expected).all():
                raise YggdrasilError(
                    f"{loaded.name}: the logits are not finite (NaN or infinity); the weights are damaged or overflow "
                    f"in {loaded.dtype}"
                )
            _read_in_parts(ids, record, expected)
    except _Differs as difference:
        raise YggdrasilError(
            f"{name} computes something that tree attention does not ({difference}); it cannot be served"
        ) from None
    except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, IndexError) as error:
        raise YggdrasilError(f"{name} does not run under tree attention ({error})") from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _spread_ids(vocab_size: int) -> list[int]:
    """Return 24 ids spread evenly over the vocabulary, since its lowest ids are often tokens that occur in no text."""
    return [(2 * index + 1) * vocab_size // (2 * _NUM_TOKENS) for index in range(_NUM_TOKENS)]


def _parts_of(length: int, device: torch.device) -> list[_Part]:
    """Return the passes of decoding over a text: a chain over its first half, then a tree over the second."""
    half = (length + 1) // 2
    chain, tree = torch.arange(half, device=device), torch.arange(2 * (length - half), device=device)
    is_sibling, is_ancestor = tree % 2 == 1, (tree[:, None] // 2 > tree // 2) & (tree % 2 == 0)
    return [
        _Part(0, chain, chain < 0, chain[:, None] >= chain),
        _Part(half, half + tree // 2, is_sibling, is_ancestor | (tree[:, None] == tree)),
    ]


@contextmanager
def _watched_layers(record: _Record) -> Iterator[None]:
    """Record inputs and outputs of the decoder layers in pass 1; compare and replace the outputs in pass 2."""

    def watch(number: int) -> Callable[..., Any]:
        def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
            hidden = output if isinstance(output, Tensor) else output[0]
            if hidden.dim() != 3:  # Gemma 3n's layers pass on several streams
                return None
            if record.part is None:
                before = given[0] if given else named["hidden_states"]
                record.outputs[number] = before[0].clone(), hidden[0].clone()
                return None
            before, expected = record.outputs[number]
            record.compare(f"the outputs of layer {number}", hidden[0], expected, before)
            same = torch.where(record.part.is_sibling[:, None], hidden[0], expected[record.part.rows])[None]
            return same if isinstance(output, Tensor) else (same, *output[1:])

        return note

    with ExitStack() as hooks:
        with suppress(ValueError):  # some models keep no list of their layers
            for number, layer in enumerate(decoder_layers(record.loaded.model)):
                hooks.callback(layer.register_forward_hook(watch(number), with_kwargs=True).remove)
        yield


def _read_in_parts(ids: Tensor, record: _Record, expected: Tensor) -> None:
    """Run pass 2 on the text ``ids`` [T], and compare its logits with ``expected`` [T, V]."""
    loaded = record.loaded
    cache = StaticCache.allocate(loaded.sizes, 2 * len(ids), loaded.dtype, loaded.device)
    if cache.states is not None:
        cache.states.read_weights(loaded.tensors)
    num_attending = sum(heads > 0 for heads, _ in loaded.sizes.key_heads)
    for part in record.parts:
        if len(part.rows) == 0:
            continue
        record.part, record.num_replayed = part, 0
        siblings = ids.flip(0)[part.rows]
        found = _run(torch.where(part.is_sibling, siblings, ids[part.rows]), cache, record)
        if record.num_replayed != num_attending:
            raise _Differs(f"{record.num_replayed} of its {num_attending} layers call it")
        record.compare("the logits", found, expected)
        if cache.states is not None:
            cache.states.commit(part.start, (~part.is_sibling).nonzero()[:, 0].tolist(), loaded.num_threads)


def _run(tokens: Tensor, cache: StaticCache, record: _Record) -> Tensor:
    """Run the part ``record.part`` with positions, mask and cache as in a decode step; return its logits [W, V]."""
    loaded, part = record.loaded, record.part
    assert part is not None
    offsets = torch.full((2,), part.start, device=loaded.device)
    step = StepCache.over(cache.tensors(), loaded.sizes, offsets, part.mask)
    logits: Tensor = loaded.model(
        input_ids=tokens[None], position_ids=part.rows[None], attention_mask=part.mask[None, None],
        use_cache=True, step_cache=step, num_threads=loaded.num_threads, selfcheck=record,
        **{cache_name(loaded.model): step},
    ).logits  # fmt: skip
    return logits[0]


def _checked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    selfcheck: _Record | None = None,
    step_cache: StepCache | None = None,
    num_threads: int | None = None,
    **terms: Any,
) -> tuple[Tensor, None]:
    """In pass 1, run the model's own attention and compare tree attention with it; in pass 2, compare the inputs.

    Both passes return the outputs of the model's own attention in pass 1; a sibling gets the output of its token.
    """
    if selfcheck is None:
        raise TypeError("its layers pass no keyword arguments on to the attention function")
    inputs = (query, key, value)
    if selfcheck.part is not None:
        return _replay(module, inputs, selfcheck, step_cache), None
    if any(layer.index == module.layer_idx for layer in selfcheck.layers):
        raise _Differs(f"layer {module.layer_idx} attends more than once in a pass, over other keys each time")
    own_attention = _eager_attention_of(module)
    output = own_attention(module, query, key, value, attention_mask, **terms)[0]
    has_bias = attention_mask is not None and attention_mask.dtype != torch.bool
    mask = attention_mask.float() if attention_mask is not None and has_bias else attention_mask
    wide = [each.float() for each in inputs]
    expected = own_attention(module, *wide, mask, **terms)[0]
    passed = ", ".join(f"{term} {terms[term]}" for term in _TERMS if terms.get(term) is not None)
    what = f"the attention of layer {module.layer_idx}, called with {passed or 'no terms'},"
    for part, found in _tree_attention_alone(module, wide, selfcheck, terms):
        is_own = ~part.is_sibling
        _compare(what, found[0, is_own], expected[0, part.rows[is_own]], _TOLERANCE)
    selfcheck.layers.append(_Layer(int(module.layer_idx), inputs, output))  # type: ignore[arg-type]
    return output, None


def _replay(module: nn.Module, inputs: Sequence[Tensor], record: _Record, step_cache: StepCache | None) -> Tensor:
    """Compare a layer's queries, keys and values with those of pass 1; return its output in pass 1, [1, W, Hq, D]."""
    assert record.part is not None
    before = record.layers[record.num_replayed]
    if before.index != module.layer_idx:
        raise _Differs(f"layer {before.index} does not call it in a decode step")
    for kind, ours, own in zip(("queries", "keys", "values"), inputs, before.inputs, strict=True):
        record.compare(f"the {kind} of layer {module.layer_idx}", ours[0].transpose(0, 1), own[0].transpose(0, 1))
    key = inputs[1]
    kept = None if step_cache is None else step_cache.step_keys[before.index]
    if kept is not None and (kept.shape[0], kept.shape[2]) != (key.shape[1], key.shape[3]):
        raise _Differs(
            f"layer {before.index} has {key.shape[1]} key heads of {key.shape[3]} numbers where its configuration "
            f"says {kept.shape[0]} of {kept.shape[2]}"
        )
    record.num_replayed += 1
    return before.output[:, record.part.rows]


def _tree_attention_alone(
    module: nn.Module, inputs: Sequence[Tensor], record: _Record, terms: dict[str, Any]
) -> Iterator[tuple[_Part, Tensor]]:
    """Yield (part of the text, tree attention's output [1, W, Hq, D] of it); a sibling has its token's inputs."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    length = 2 * inputs[0].shape[2]
    keys, values = (torch.zeros_like(inputs[1][0, :, :1]).repeat(1, length, 1) for _ in range(2))
    for part in record.parts:
        step = StepCache({layer: keys}, {layer: values}, torch.full((2,), part.start, device=keys.device))
        query, key, value = (each[:, :, part.rows] for each in inputs)
        yield part, tree_attention(
            module, query, key, value, part.mask[None, None], step_cache=step,
            num_threads=record.loaded.num_threads, **terms,
        )[0]  # fmt: skip


def _eager_attention_of(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """Return the eager attention function of the file that defines ``module``; transformers' sdpa if it has none."""
    own: Callable[..., tuple[Tensor, Any]] | None
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return own or ALL_ATTENTION_FUNCTIONS["sdpa"]  # type: ignore[no-any-return]


def _compare(what: str, found: Tensor, expected: Tensor, tolerance: float, *, is_mixture: bool = False) -> None:
    """Raise ``_Differs`` if the worst row (for a mixture, the median row) differs by over ``tolerance`` * the range."""
    if found.shape != expected.shape:
        raise _Differs(f"{what} have the shape {list(found.shape)}, not {list(expected.shape)}")
    found, expected = found.float(), expected.float()
    scale = float((expected.amax() - expected.amin()).clamp(min=1e-6))
    rows = (found - expected).abs().flatten(1).amax(1) / scale
    difference = float(rows.median() if is_mixture else rows.amax())
    if not difference <= tolerance:
        raise _Differs(f"{what} differ by {difference:.1%} of their range")


AttentionInterface.register(_CHECKED_NAME, _checked_attention)
AttentionMaskInterface.register(_CHECKED_NAME, eager_mask)
