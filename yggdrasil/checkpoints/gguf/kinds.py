"""Detects GGUF files that are not language models: adapters, multimodal projectors, embedding models and others."""

from yggdrasil.artifacts import shown
from yggdrasil.artifacts.gguf import GgufHeader
from yggdrasil.errors import YggdrasilError

_EMBEDDERS = ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert", "eurobert",
              "neo-bert", "gemma-embedding")  # fmt: skip
_OTHERS = {
    "controlvector": "a control vector", "clip": "the image or audio encoder (mmproj) of a multimodal model",
    "t5": "an encoder-decoder model", "t5encoder": "a text encoder",
    "whisper": "a speech recognition model", "wavtokenizer-dec": "a speech decoder",
    "flux": "an image generation model", "sd1": "an image generation model", "sdxl": "an image generation model",
    "sd3": "an image generation model", "wan": "a video generation model", "rwkv6": "a recurrent model",
}  # fmt: skip
_RANKS = 4  # llama.cpp's LLAMA_POOLING_TYPE_RANK
_GIVE = "give the .gguf file of a language model"


def refuse_other_kinds(header: GgufHeader) -> None:
    """Check that a GGUF file is a language model.

    Raises:
        YggdrasilError: the file is an adapter, a multimodal projector, an embedding or other model, an importance
            matrix, or has no weights. The message says which.
    """
    file, kind, architecture = shown(header.path), str(header.facts.get("general.type", "model")), header.architecture
    if kind == "adapter" or any(name.endswith(".lora_a") for name in header.tensors):
        raise YggdrasilError(
            f"{file} is an adapter (LoRA) for another model, and adapters are not served; merge it into its model "
            "(llama.cpp's llama-export-lora) and give the merged file"
        )
    if kind == "mmproj" or architecture == "clip":
        raise YggdrasilError(f"{file} holds {_OTHERS['clip']}; {_GIVE}")
    if kind == "imatrix" or architecture == "imatrix":
        raise YggdrasilError(f"{file} holds statistics for quantising a model (imatrix); {_GIVE}")
    if header.fact("pooling_type") == _RANKS:
        raise YggdrasilError(f"{file} is a reranker ({architecture}): it gives scores and no text; {_GIVE}")
    if architecture in _EMBEDDERS or _pools(header):
        raise YggdrasilError(f"{file} is an embedding model ({architecture}): it gives vectors and no text; {_GIVE}")
    if architecture in _OTHERS:
        raise YggdrasilError(f"{file} is {_OTHERS[architecture]} ({architecture}); {_GIVE}")
    if kind == "vocab" or not header.tensors:
        raise YggdrasilError(f"{file} holds a vocabulary and no weights; {_GIVE}")


def _pools(header: GgufHeader) -> bool:
    """Return whether the model pools a text to one vector, or its attention is not causal."""
    pooling = header.fact("pooling_type")
    return (isinstance(pooling, int) and pooling > 0) or header.fact("attention.causal") is False
