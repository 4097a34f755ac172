"""Speculation settings of an engine as the engine's options, and the options that the engine's documents list."""

import json
import shlex
from dataclasses import dataclass
from typing import Literal, TypeAlias

from yggdrasil.export.playing import Prediction

EngineName = Literal["llama-server", "vllm", "sglang"]
Value: TypeAlias = str | int | float


@dataclass(frozen=True)
class Engine:
    """An engine: the documents of its options, and the options and methods that settings may have."""

    documents: str
    options: tuple[str, ...]
    methods: tuple[str, ...]  # the first decodes without speculation


ENGINES: dict[EngineName, Engine] = {
    "llama-server": Engine(
        "llama.cpp 0.5.0-dev (0c1e570, in llama-cpp-python 0.3.36): llama-server --help, docs/speculative.md",
        (
            "--spec-type", "--spec-draft-model", "--spec-draft-n-max", "--spec-draft-p-min",
            "--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m",
            "--spec-ngram-mod-n-match", "--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max",
        ),
        ("none", "draft-simple", "ngram-simple", "ngram-mod"),
    ),
    "vllm": Engine(
        "vLLM 0.26.0: api/vllm/config/speculative, features/speculative_decoding",
        (
            "method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max",
            "suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
        ),
        ("none", "draft_model", "eagle", "eagle3", "medusa", "mtp", "dflash", "ngram", "suffix"),
    ),
    "sglang": Engine(
        "SGLang 0.5.18: advanced_features/speculative_decoding, server_arguments",
        (
            "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps",
            "--speculative-eagle-topk", "--speculative-num-draft-tokens", "--speculative-ngram-min-bfs-breadth",
            "--speculative-ngram-max-bfs-breadth", "--speculative-ngram-max-trie-depth",
        ),
        ("none", "STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "NGRAM"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """A speculation method of an engine with the options for it, and the predicted speed.

    Raises:
        ValueError: the engine's documents do not list an option or the method.
    """

    engine: EngineName
    method: str
    options: dict[str, Value]
    predicted: Prediction

    def __post_init__(self) -> None:
        engine = ENGINES[self.engine]
        unknown = sorted({*self.options} - {*engine.options})
        if unknown or self.method not in engine.methods:
            raise ValueError(f"{engine.documents} do not know {unknown or self.method}")

    @property
    def line(self) -> str:
        """The options for the engine's command line, quoted for a shell; empty for plain decoding by vLLM or SGLang."""
        if self.engine == "vllm":
            return f"--speculative-config {shlex.quote(json.dumps(self.options))}" if self.options else ""
        return shlex.join(part for name, value in self.options.items() for part in (name, str(value)))


def plain_settings(engine: EngineName, plain_ms: float) -> Settings:
    """Return the settings by which an engine decodes without speculation, at ``plain_ms`` milliseconds per token."""
    options: dict[str, Value] = {"--spec-type": "none"} if engine == "llama-server" else {}
    return Settings(engine, "none", options, Prediction(1.0, plain_ms, 1.0))


_NOT_SAID: dict[EngineName, tuple[str, ...]] = {
    "llama-server": (
        "a tree: it verifies one chain",
        "a draft length that follows the text: the one set here holds for every pass",
        "a pause of speculation while drafts are rejected",
    ),
    "vllm": (
        "a tree: it verifies one chain",
        "a draft length that follows the text: the one set here holds for every pass",
        "a pause of speculation while drafts are rejected",
    ),
    "sglang": (
        "a shape that follows the text: the one set here holds for every pass",
        "a pass without a draft: its passes have the same width",
    ),
}
_NOT_SAID_OF_TEXT: dict[EngineName, tuple[str, ...]] = {
    "llama-server": (
        "the n-gram table of the model's own text",
        "the probability of a drafted token: a lookup drafts the full length",
        "other types were not considered: ngram-cache and ngram-map-* keep positions of earlier texts",
    ),
    "vllm": (
        "the n-gram table of the model's own text (suffix keeps earlier answers, which were not simulated)",
        "the probability of a drafted token, with ngram",
    ),
    "sglang": (
        "the n-gram table of the model's own text (its trie keeps earlier requests, which were not simulated)",
        "branches: they were not simulated, so none are set",
    ),
}


def unsupported_features(engine: EngineName, *, by_model: bool) -> tuple[str, ...]:
    """Return phrases on our features that ``engine`` has no option for, and on its options that were not tried.

    Args:
        by_model: whether a draft model or head drafts; False: an n-gram lookup.
    """
    if not by_model:
        return _NOT_SAID[engine] + _NOT_SAID_OF_TEXT[engine]
    if engine == "sglang":
        return (*_NOT_SAID[engine], "equal growth: every level of its tree has the same number of nodes")
    return _NOT_SAID[engine]
