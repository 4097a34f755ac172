"""Settings of an engine in its own words, and what its documents know."""

import json
import shlex
from dataclasses import dataclass
from typing import Literal, TypeAlias

from yggdrasil.export.playing import Prediction

EngineName = Literal["llama-server", "vllm", "sglang"]
Value: TypeAlias = str | int | float


@dataclass(frozen=True)
class Engine:
    """An engine, the version whose documents were read, and the options there that settings may have."""

    documents: str
    options: tuple[str, ...]
    methods: tuple[str, ...]  # the first is to decode without speculation


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
    """One way of decoding with an engine, and what it should give."""

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
        """What is added to the engine's command line."""
        if self.engine == "vllm":
            return f"--speculative-config {shlex.quote(json.dumps(self.options))}" if self.options else ""
        return shlex.join(part for name, value in self.options.items() for part in (name, str(value)))


def plainly(engine: EngineName, plain_ms: float) -> Settings:
    """Without speculation."""
    options: dict[str, Value] = {"--spec-type": "none"} if engine == "llama-server" else {}
    return Settings(engine, "none", options, Prediction(1.0, plain_ms, 1.0))


_NOT_SAID: dict[EngineName, tuple[str, ...]] = {
    "llama-server": (
        "a tree: it verifies one chain",
        "a draft length that follows the text: the one set here holds for every pass",
        "a pause where guesses fail",
    ),
    "vllm": (
        "a tree: it verifies one chain",
        "a draft length that follows the text: the one set here holds for every pass",
        "a pause where guesses fail",
    ),
    "sglang": (
        "a shape that follows the text: the one set here holds for every pass",
        "a pass without guesses: it verifies as many rows where it has none",
    ),
}
_NOT_SAID_OF_TEXT: dict[EngineName, tuple[str, ...]] = {
    "llama-server": (
        "the table of what the model tends to say",
        "how likely each guess is: what was seen is drafted whole",
        "other types were not considered: ngram-cache and ngram-map-* keep places of texts that are gone",
    ),
    "vllm": (
        "the table of what the model tends to say (suffix keeps earlier answers, which were not played)",
        "how likely each guess is, with ngram",
    ),
    "sglang": (
        "the table of what the model tends to say (its trie keeps earlier requests, which were not played)",
        "branches were not played, so none are set",
    ),
}


def not_said(engine: EngineName, *, by_model: bool) -> tuple[str, ...]:
    """What the plan does and the engine's settings cannot say, or were not tried."""
    if not by_model:
        return _NOT_SAID[engine] + _NOT_SAID_OF_TEXT[engine]
    if engine == "sglang":
        return (*_NOT_SAID[engine], "equal growth: every level of its tree has the same number of nodes")
    return _NOT_SAID[engine]
