"""The target's embedding and output layer, for a head to read: modules over the target's own memory."""

import torch
from torch import Tensor, nn

from yggdrasil.checkpoints.formats.layers import QuantisedEmbedding, QuantisedLinear
from yggdrasil.checkpoints.formats.rows import PackedRows
from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loaded import LoadedModel

# What families call them.
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
_OUTPUTS = ("lm_head", "embed_out")


def embedding_of(target: LoadedModel) -> nn.Module:
    """The target's embedding.

    Raises:
        YggdrasilError: it has none as wide as its states.
    """
    kept = _kept(target, _EMBEDDINGS)
    if "weight" in kept:
        return table(kept["weight"])
    if "packed" in kept:
        rows = PackedRows(_format(target, _EMBEDDINGS), target.vocab_size, target.hidden_size, kept["packed"])
        return QuantisedEmbedding(rows, target.dtype)
    weight = getattr(target.model.get_input_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[-1] != target.hidden_size:
        raise YggdrasilError(f"{target.name} has no embedding that a head could read; give a head that brings its own")
    return table(weight)


def output_of(target: LoadedModel, num_threads: int) -> nn.Module:
    """The target's output layer, on ``num_threads``; where both are one table, that of its embedding.

    Raises:
        YggdrasilError: it is in another form.
    """
    kept, bias = _kept(target, _OUTPUTS), _kept(target, _OUTPUTS).get("bias")
    shape = target.vocab_size, target.hidden_size
    modules: tuple[str, ...] = _OUTPUTS
    if not kept and target.formats:
        kept, modules = _kept(target, _EMBEDDINGS), _EMBEDDINGS
    if "packed" in kept and kept["packed"].dtype == target.dtype:
        return PackedLinear.over(kept["packed"], bias, shape, num_threads)
    if "packed" in kept:
        return QuantisedLinear(PackedRows(_format(target, modules), *shape, kept["packed"]), bias, num_threads)
    weight = kept.get("weight", _kept(target, _EMBEDDINGS).get("weight"))
    if weight is None or tuple(weight.shape) != shape:
        raise YggdrasilError(f"{target.name} has no output layer that a head could read; give a head of another kind")
    output = nn.Linear(target.hidden_size, target.vocab_size, bias=bias is not None, device="meta")
    output.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        output.bias = nn.Parameter(bias, requires_grad=False)
    return output


def rows_of(output: nn.Module, tokens: Tensor, dtype: torch.dtype) -> nn.Linear:
    """A layer of an output layer's rows of ``tokens`` [Vd] alone, in memory of its own."""
    if isinstance(output, QuantisedLinear):
        weight = output.rows(tokens, dtype)
    elif isinstance(output, PackedLinear):
        weight = output.rows(tokens)
    else:
        assert isinstance(output, nn.Linear), type(output)
        weight = output.weight[tokens]
    bias = output.bias
    layer = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias[tokens], requires_grad=False)
    return layer


def table(weight: Tensor) -> nn.Module:
    """An embedding over ``weight``."""
    embedding: nn.Module = nn.Embedding.from_pretrained(weight)
    return embedding


def _format(target: LoadedModel, modules: tuple[str, ...]) -> int:
    """The format of the first of ``modules`` that is quantised."""
    return next(form for name, form in target.formats.items() if name.rpartition(".")[2] in modules)


def _kept(target: LoadedModel, modules: tuple[str, ...]) -> dict[str, Tensor]:
    """The target's tensors of the first of ``modules`` that there is, by the name of their part."""
    found: dict[str, Tensor] = {}
    for name, tensor in target.tensors.items():
        *_, module, part = ("", *name.split("."))
        if module in modules:
            found.setdefault(part, tensor)
    return found
