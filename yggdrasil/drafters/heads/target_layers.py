"""The target's embedding and LM head as modules that share the target's memory, for heads without their own."""

import torch
from torch import Tensor, nn

from yggdrasil.checkpoints.formats.layers import QuantisedEmbedding, QuantisedLinear
from yggdrasil.checkpoints.formats.rows import PackedRows
from yggdrasil.checkpoints.packing import PackedLinear
from yggdrasil.errors import YggdrasilError
from yggdrasil.runtime.loaded import LoadedModel

# Their names in the architectures of transformers.
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
_OUTPUTS = ("lm_head", "embed_out")


def embedding_of(target: LoadedModel) -> nn.Module:
    """Return the target's token embedding as a module that shares its memory.

    Raises:
        YggdrasilError: the width of the embedding is not the target's hidden size.
    """
    kept = _kept(target, _EMBEDDINGS)
    if "weight" in kept:
        return shared_embedding(kept["weight"])
    if "packed" in kept:
        rows = PackedRows(_format(target, _EMBEDDINGS), target.vocab_size, target.hidden_size, kept["packed"])
        return QuantisedEmbedding(rows, target.dtype)
    weight = getattr(target.model.get_input_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[-1] != target.hidden_size:
        raise YggdrasilError(f"{target.name} has no embedding that a head could read; give a head that brings its own")
    return shared_embedding(weight)


def output_of(target: LoadedModel, num_threads: int) -> nn.Module:
    """Return the target's LM head as a module that shares its memory (the embedding's, if weights are tied).

    Args:
        num_threads: CPU threads that compute the LM head.

    Raises:
        YggdrasilError: the target has no linear LM head of shape [V, H].
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
    """Return a linear layer H -> Vd with copies of the rows (and biases) of ``output`` for ``tokens`` [Vd] int64.

    Args:
        output: an LM head over all tokens.
        dtype: dtype of the weights if ``output`` is quantised; otherwise the weights keep the dtype of ``output``.
    """
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


def shared_embedding(weight: Tensor) -> nn.Module:
    """Return a torch embedding layer that shares the memory of ``weight`` [V, H]."""
    embedding: nn.Module = nn.Embedding.from_pretrained(weight)
    return embedding


def _format(target: LoadedModel, modules: tuple[str, ...]) -> int:
    """Return the quantisation format of the first of ``modules`` that the target has quantised."""
    return next(form for name, form in target.formats.items() if name.rpartition(".")[2] in modules)


def _kept(target: LoadedModel, modules: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the target's tensors of ``modules`` by their last name part (weight, bias, packed), the first of each."""
    found: dict[str, Tensor] = {}
    for name, tensor in target.tensors.items():
        *_, module, part = ("", *name.split("."))
        if module in modules:
            found.setdefault(part, tensor)
    return found
