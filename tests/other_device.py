"""A device that stands in for a GPU: it computes on the processor, and its tensors do not mix with the processor's.

To be imported in a process of its own: there is no way back. What a GPU refuses is refused here: tensors of two devices
in one operation, where none of them is a number, and indices elsewhere than what they index.
"""

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("apart", _Backend())
DEVICE = torch.device("apart:0")
_PROCESSOR = torch.device("cpu")

WAITS: list[str] = []  # operators so far for which a host would wait: blocking copies, and values that it asks for
_aten = torch.ops.aten
_BETWEEN_DEVICES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default)


class _Apart(torch.Tensor):
    """A tensor of that device."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner

    def __getitem__(self, index):
        index = tuple(map(_as_tensor, index)) if isinstance(index, tuple) else _as_tensor(index)
        return super().__getitem__(index)

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("a tensor of another device has no memory here")
        return self.cpu().numpy()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return _run(operator, args, kwargs or {})


def _as_tensor(index):
    """PyTorch cannot make a tensor of a list there."""
    return torch.tensor(list(index)) if isinstance(index, list | range) else index


_ASKING = (_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.nonzero.default)


def _waits(operator: Any, args: Any, kwargs: Any, *, is_there: bool) -> bool:
    """Whether a GPU's host waits: for a copy from pageable memory or to it, or for values of a tensor there."""
    if operator is _aten.copy_.default:
        is_between = isinstance(args[0], _Apart) != isinstance(args[1], _Apart)
        return is_between and not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if operator is _aten._to_copy.default:
        to = kwargs.get("device")
        is_between = to is not None and isinstance(args[0], _Apart) != (to.type == DEVICE.type)
        return is_between and not kwargs.get("non_blocking", False)
    is_masked = operator in _INDEXING and any(each is not None and each.dtype == torch.bool for each in args[1])
    return is_there and (operator in _ASKING or is_masked)


_WITH_TENSORS_OF_ITS_OWN = ("yggdrasil::run_layer",)  # reads weights and caches that are no arguments


def _run(operator: Any, args: Any, kwargs: Any) -> Any:
    if operator.name() in _WITH_TENSORS_OF_ITS_OWN:
        return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
    given = list(_leaves((*args, *kwargs.values())))
    is_there = any(isinstance(each, _Apart) for each in given)
    if _waits(operator, args, kwargs, is_there=is_there):
        WAITS.append(operator.name())
    if is_there and operator not in _BETWEEN_DEVICES:
        _refuse_mixed(operator, args, [each for each in given if isinstance(each, torch.Tensor)])
    wanted = [each for each in given if isinstance(each, torch.device)]
    if wanted:
        is_there = wanted[0].type == DEVICE.type
    if is_there and any(isinstance(each, torch.Generator) and each.device.type != DEVICE.type for each in given):
        raise RuntimeError(f"{operator}: a generator of another device")
    inner_args = _mapped(_here, args)
    inner_kwargs = {name: _mapped(_here, each) for name, each in kwargs.items()}
    output = _on_gpus(operator)(*inner_args, **inner_kwargs) if is_there else operator(*inner_args, **inner_kwargs)
    if operator._schema.is_mutable and isinstance(output, torch.Tensor) and output is inner_args[0]:
        return args[0]
    return _mapped(_there, output) if is_there else output


def _leaves(values: Any) -> Iterator[Any]:
    """What lists and tuples hold. PyTorch's own trees know more containers and take most of a run's time."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(_mapped(change, each) for each in value) if isinstance(value, list | tuple) else change(value)


def _here(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _PROCESSOR
    return value.inner if isinstance(value, _Apart) else value


def _there(value: Any) -> Any:
    return _Apart(value) if isinstance(value, torch.Tensor) else value


@cache
def _on_gpus(operator: Any) -> Any:
    """The implementation for GPUs of an operator over quantised weights: a processor's reads another layout.

    Also of ``histc``, which counts integers there alone.
    """
    from yggdrasil.native.portable_quantised import ON_GPUS

    if operator is _aten.histc.default:
        return lambda numbers, *limits, **options: operator(numbers.float(), *limits, **options).to(numbers.dtype)
    return ON_GPUS.get(operator.name().removeprefix("yggdrasil::"), operator)


def _refuse_mixed(operator: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    others = [each for each in tensors if not isinstance(each, _Apart) and each.ndim > 0]
    if operator in _INDEXING and isinstance(args[0], _Apart):
        others = [each for each in others if any(each is values for values in args[2:])]
    if others:
        raise RuntimeError(f"{operator}: tensors of two devices")


_OPERATIONS = torch.library.Library("_", "IMPL", "PrivateUse1")  # those that make tensors
_OPERATIONS.fallback(lambda operator, *args, **kwargs: _run(operator, args, kwargs))


def _tensor(data, *, device=None, made=torch.tensor, **options):
    """``torch.tensor``, which does not ask Python for memory that it fills."""
    return made(data, **options) if device is None else made(data, **options).to(device)


def _eye(*size, device=None, made=torch.eye, **options):
    """``torch.eye``, which sizes what it fills only once it is there; a GPU makes it without a copy."""
    return made(*size, **options) if device is None else made(*size, **options).to(device, non_blocking=True)


# PyTorch lists once which functions follow ``with torch.device(...)``: the real ones, which are called above. Without
# them transformers finds no meta device, initialises the rotary frequencies there and leaves real ones uninitialised.
_device_constructors()
torch.tensor, torch.eye = _tensor, _eye


class _InferenceMode(ContextDecorator):
    """A mode without gradients: a tensor that wraps another cannot be sliced in the real one."""

    def __init__(self, mode=True):
        self._mode = torch.no_grad() if mode else nullcontext()

    def __enter__(self):
        self._mode.__enter__()

    def __exit__(self, *error):
        self._mode.__exit__(*error)


torch.inference_mode = _InferenceMode
torch.__future__.set_swap_module_params_on_conversion(True)  # what modules share stays shared
