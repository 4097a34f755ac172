"""Chooses the speculation settings of an engine with the lowest predicted time per token."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from yggdrasil.calibration.own_text import Document
from yggdrasil.drafters.heads.kinds import Kind
from yggdrasil.errors import YggdrasilError
from yggdrasil.export.costs import EngineCosts
from yggdrasil.export.lookups import LookUp, NGramMod, NGramSimple
from yggdrasil.export.lookups_elsewhere import PromptLookUp, SuffixDecoding, TrieChain
from yggdrasil.export.playing import Prediction, play, predict
from yggdrasil.export.settings import EngineName, Settings, Value, plain_settings
from yggdrasil.policy.costs import StepCosts
from yggdrasil.predictor.acceptance import AcceptanceCalibration
from yggdrasil.scheduling.search import AcceptedLengths
from yggdrasil.tree.shape import TreeShape

_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)  # draft lengths to try, in tokens
_MATCHES = (1, 2, 3, 4, 5, 6, 8, 12)  # match lengths to try, in tokens
_SUFFIX_DEPTH, _TRIE_DEPTH = 24, 18  # defaults of vLLM and SGLang


class Way(NamedTuple):
    """One candidate: the simulation of an n-gram lookup, and the engine's options for this lookup."""

    method: str
    options: dict[str, Value]
    make: Callable[[], LookUp]  # returns a new simulation
    longest: int  # maximum number of drafted tokens
    is_fixed: bool = False  # whether every pass has ``longest + 1`` rows, even with fewer drafted tokens


def choose_look_up(engine: EngineName, costs: EngineCosts, documents: Sequence[Document]) -> Settings:
    """Return the settings of the engine's n-gram lookup with the fewest milliseconds per token in simulation.

    If plain decoding is faster, the settings turn speculation off.

    Args:
        costs: milliseconds of the engine's passes by number of tokens.
        documents: recorded prompts and answers to simulate lookups on.

    Raises:
        YggdrasilError: no document has an answer of at least two tokens.
    """
    if not any(len(document.answer) > 1 for document in documents):
        raise YggdrasilError("there is no text to predict look-ups on; give --prompts, and --url of a running server")
    steps = costs.steps(range(1, _LENGTHS[-1] + 2))
    candidates = [plain_settings(engine, costs.plain_ms)]
    for way in _WAYS[engine]():
        predicted = predict(play(way.make(), documents), steps, way.longest + 1 if way.is_fixed else None)
        candidates.append(Settings(engine, way.method, way.options, predicted))
    return min(candidates, key=lambda settings: settings.predicted.ms_per_token)


class ModelDrafter(NamedTuple):
    """The name of a draft model or draft head; ``head`` is the head's kind, None for a draft model."""

    name: str
    head: Kind | None = None


def choose_draft_model(
    engine: EngineName,
    costs: EngineCosts,
    lengths: AcceptedLengths,
    acceptance: AcceptanceCalibration,
    drafter: ModelDrafter,
) -> Settings:
    """Return the engine's settings for a draft model or head with the fewest predicted milliseconds per token.

    If plain decoding is faster, the settings turn speculation off.

    Args:
        costs: milliseconds of the engine's passes by number of tokens.
        lengths: accepted lengths that the plan's calibration recorded.
        acceptance: acceptance calibration of the drafter, for llama-server's probability threshold.
        drafter: name and kind of the draft model or head, as the engine's options give them.

    Raises:
        YggdrasilError: ``costs`` has no drafter times.
    """
    if not costs.drafter_ms:
        raise YggdrasilError("the plan drafts with a model, which costs time too; give --drafter-url, or drafter_ms")
    best, best_shape = plain_settings(engine, costs.plain_ms), TreeShape(0, 0, 1)
    steps = costs.steps(
        {*range(1, lengths.max_depth + 2), *lengths.verify_widths},
        lengths.draft_widths,
        reads_again=engine == "llama-server",  # its draft model reads the verified tokens once more
    )
    for shape, known in _shapes(lengths, trees=engine == "sglang" and drafter.head != "dflash"):
        aal = lengths.aal(known)
        passes = 1 if drafter.head in _ONE_PASS else shape.depth
        ms = steps.drafting_ms(shape.width, passes) + steps.verify_ms[shape.verify_width] + steps.overhead_ms
        predicted = Prediction(aal, ms / aal, aal * steps.verify_ms[1] / ms)
        if predicted.ms_per_token < best.predicted.ms_per_token:
            best_shape = shape
            best = Settings(engine, *_drafted(engine, shape, drafter), predicted)
    if engine == "llama-server" and best_shape.depth:
        least = _least_probability(acceptance, steps, best_shape, 1.0 / best.predicted.ms_per_token)
        best.options["--spec-draft-p-min"] = least
    return best


def _shapes(lengths: AcceptedLengths, *, trees: bool) -> Iterator[tuple[TreeShape, TreeShape]]:
    """Yield (a shape that the engine supports, the recorded shape whose accepted length holds for it)."""
    for width in lengths.draft_widths if trees else (1,):
        for depth in range(1, lengths.max_depth + 1):
            whole = [known for known in lengths.verify_widths if known > width * depth]
            if width == 1 and whole:
                yield TreeShape(1, depth, depth + 1), TreeShape(1, depth, whole[0])
            elif width > 1:
                kept = [known for known in lengths.verify_widths if depth < known <= width * depth]
                yield from ((shape, shape) for shape in (TreeShape(width, depth, known) for known in kept))


_ONE_PASS: tuple[Kind, ...] = ("medusa", "dflash")  # one pass drafts all levels
# Each engine's names of head kinds. The module of a target (mtp) is in the target's own folder.
_HEADS: dict[EngineName, dict[Kind, str]] = {
    "llama-server": {},
    "vllm": {"eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa", "mtp": "mtp", "dflash": "dflash"},
    "sglang": {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "EAGLE", "dflash": "DFLASH"},
}


def refuse_unknown_head(engine: EngineName, drafter: ModelDrafter) -> None:
    """Check that the engine has a setting for the kind of the drafter's head; draft models always pass.

    Raises:
        YggdrasilError: the engine has no such setting; the message names engines that have one.
    """
    if drafter.head is not None and drafter.head not in _HEADS[engine]:
        others = " or ".join(name for name, known in _HEADS.items() if drafter.head in known)
        raise YggdrasilError(
            f"{engine} has no setting for {drafter.name}, a head of the kind {drafter.head}; export to {others}, or "
            "take another plan"
        )


def _drafted(engine: EngineName, shape: TreeShape, drafter: ModelDrafter) -> tuple[str, dict[str, Value]]:
    """Return (method, options) with which ``engine`` drafts trees of ``shape`` with ``drafter``."""
    if engine == "llama-server":
        options: dict[str, Value] = {"--spec-type": "draft-simple", "--spec-draft-model": drafter.name}
        return "draft-simple", {**options, "--spec-draft-n-max": shape.depth}
    is_targets = drafter.head == "mtp"
    if engine == "vllm":
        method = _HEADS[engine][drafter.head] if drafter.head else "draft_model"
        named: dict[str, Value] = {} if is_targets else {"model": drafter.name}
        return method, {"method": method, **named, "num_speculative_tokens": shape.depth}
    method = _HEADS[engine][drafter.head] if drafter.head else "STANDALONE"
    path: dict[str, Value] = {} if is_targets else {"--speculative-draft-model-path": drafter.name}
    if drafter.head == "dflash":  # a chain in one step; a narrower block than the head's is a narrower pass
        return method, {
            "--speculative-algorithm": method, **path, "--speculative-num-draft-tokens": shape.verify_width,
        }  # fmt: skip
    return method, {
        "--speculative-algorithm": method,
        **path,
        "--speculative-num-steps": shape.depth,
        "--speculative-eagle-topk": shape.width,
        "--speculative-num-draft-tokens": shape.verify_width,
    }


def _least_probability(
    acceptance: AcceptanceCalibration, steps: StepCosts, shape: TreeShape, tokens_a_ms: float
) -> float:
    """Return the drafter probability, 0.01 to 0.99, below which a drafted token costs more time than it saves.

    A drafted token pays off if its acceptance probability exceeds the tokens that its row's time would generate at the
    overall rate ``tokens_a_ms``, as in the run-time policy.
    """
    row_ms = (steps.verify_ms[shape.verify_width] - steps.verify_ms[1]) / shape.depth
    probabilities = np.arange(1, 100) / 100
    pays = np.exp(acceptance(np.log(probabilities))) >= tokens_a_ms * row_ms
    return float(probabilities[int(pays.argmax())]) if pays.any() else 0.99


def _of_llama_server() -> Iterator[Way]:
    for match in _MATCHES:
        for length in _LENGTHS:
            simple: dict[str, Value] = {"--spec-type": "ngram-simple", "--spec-ngram-simple-size-n": match}
            if length >= match:
                simple["--spec-ngram-simple-size-m"] = length
                yield Way("ngram-simple", simple, partial(NGramSimple, match, length), length)
            for least in sorted({1, (length + 1) // 2}):
                mod: dict[str, Value] = {"--spec-type": "ngram-mod", "--spec-ngram-mod-n-match": match}
                mod |= {"--spec-ngram-mod-n-min": least, "--spec-ngram-mod-n-max": length}
                yield Way("ngram-mod", mod, partial(NGramMod, match, least, length), length)


def _of_vllm() -> Iterator[Way]:
    for length in _LENGTHS:
        for least in _MATCHES:
            ngram: dict[str, Value] = {"method": "ngram", "num_speculative_tokens": length}
            ngram |= {"prompt_lookup_min": least, "prompt_lookup_max": least + 2}
            yield Way("ngram", ngram, partial(PromptLookUp, least, least + 2, length), length)
        for factor in (0.5, 1.0, 2.0):
            for share in (0.1, 0.3, 0.5):
                suffix: dict[str, Value] = {"method": "suffix", "num_speculative_tokens": length}
                suffix |= {"suffix_decoding_max_spec_factor": factor, "suffix_decoding_min_token_prob": share}
                make = partial(SuffixDecoding, length, factor, share, _SUFFIX_DEPTH)
                yield Way("suffix", suffix, make, length)


def _of_sglang() -> Iterator[Way]:
    for length in _LENGTHS:
        options: dict[str, Value] = {
            "--speculative-algorithm": "NGRAM",
            "--speculative-num-draft-tokens": length + 1,
            "--speculative-ngram-min-bfs-breadth": 1,
            "--speculative-ngram-max-bfs-breadth": 1,
        }
        yield Way("NGRAM", options, partial(TrieChain, length, _TRIE_DEPTH), length, is_fixed=True)


_WAYS: dict[EngineName, Callable[[], Iterator[Way]]] = {
    "llama-server": _of_llama_server,
    "vllm": _of_vllm,
    "sglang": _of_sglang,
}
