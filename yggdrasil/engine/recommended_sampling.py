"""Reads the sampling parameters that a model recommends, from ``generation_config.json`` or a GGUF file's metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.artifacts import parse_json
from yggdrasil.artifacts.gguf import read_gguf_layout
from yggdrasil.errors import YggdrasilError

if TYPE_CHECKING:
    from yggdrasil.engine.decoder import Decoder

# Names in generation_config.json and in GGUF files, for fields of ``SamplingParams``.
_HF = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")}
_GGUF = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
         "penalty_repeat": "repetition_penalty"}  # fmt: skip
_HF_DEFAULTS = {"temperature": 1.0, "top_k": 50}  # defaults of transformers with do_sample
_USUAL = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


class RecommendedSampling(NamedTuple):
    """Sampling parameters with a description of their origin."""

    params: SamplingParams
    origin: str

    def describe(self) -> str:
        """Return the parameters and their origin as one line, such as "temperature 0.8, top-k 40 (the file's own)"."""
        return f"{describe(self.params)} ({self.origin})"


def describe(params: SamplingParams) -> str:
    """Return temperature and the parameters that differ from their defaults, such as "temperature 0.8, top-k 40".

    For greedy decoding the text is "greedy".
    """
    if params.is_greedy:
        return "greedy"
    found = [f"temperature {params.temperature:g}"]
    for name in ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty"):
        if (value := getattr(params, name)) != getattr(GREEDY, name):
            found.append(f"{name.replace('_', '-')} {value:g}")
    return ", ".join(found)


def recommended_sampling_of(decoder: "Decoder") -> RecommendedSampling:
    """Return the sampling parameters that the target's files recommend; llama.cpp's defaults if they have none.

    llama.cpp's defaults are also returned for a decoder without a plan.

    Raises:
        YggdrasilError: the target is missing, or its GGUF file is damaged.
    """
    from yggdrasil.checkpoints.source import Source

    if decoder.plan is None:
        return recommended_sampling(None, None)
    source = Source.find(decoder.plan.target.path())
    return recommended_sampling(source.folder, source.gguf)


def recommended_sampling(folder: Path | None, gguf: Path | None) -> RecommendedSampling:
    """Return the sampling parameters that a model's files recommend; llama.cpp's defaults if they have none.

    Values out of range are left out.

    Args:
        folder: the model's folder, whose generation_config.json is read if ``gguf`` is None.
        gguf: a GGUF file, whose metadata are read; None if the model has no GGUF file.

    Raises:
        ArtifactError: the GGUF file is damaged or unsupported.
    """
    if gguf is not None:
        facts = read_gguf_layout(gguf).facts
        given = {ours: facts.get(f"general.sampling.{theirs}") for theirs, ours in _GGUF.items()}
        if any(value is not None for value in given.values()):
            return RecommendedSampling(_params({"temperature": 0.8, **_present(given)}), "the file's own")
    elif folder is not None and (config := _generation_config(folder)) is not None:
        given = _present({ours: config.get(theirs) for theirs, ours in _HF.items()})
        if config.get("do_sample") is False or (given.get("temperature") == 0 and config.get("do_sample") is None):
            return RecommendedSampling(GREEDY, "the model's generation_config")
        if config.get("do_sample") or given:
            return RecommendedSampling(_params(_HF_DEFAULTS | given), "the model's generation_config")
    return RecommendedSampling(_USUAL, "llama.cpp's, the model names none")


def _generation_config(folder: Path) -> Mapping[str, Any] | None:
    try:
        config = parse_json((folder / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _present(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are numbers. JSON may have null, or true instead of 1."""
    return {name: value for name, value in given.items() if isinstance(value, int | float) and value is not True}


def _params(given: Mapping[str, Any]) -> SamplingParams:
    """Build sampling parameters. Values out of their range are ignored."""
    known: dict[str, Any] = {}
    for name, value in given.items():
        number = int(value) if name == "top_k" else float(f"{float(value):.6g}")  # GGUF values are float32
        tried: dict[str, Any] = {**known, name: number}
        try:
            SamplingParams(**tried)
        except YggdrasilError:
            continue
        known = tried
    return SamplingParams(**known)
