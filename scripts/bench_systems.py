"""Compares systems: each decodes every prompt to the same length.

A system is anything that continues token ids: our decoder with some policy, transformers, llama.cpp.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from time import sleep
from typing import Any, Protocol

from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.acceptance.speculation import DEFAULT, OFF, Speculation
from yggdrasil.artifacts import parse_dataclass
from yggdrasil.bench.divergence import Divergence, judge_divergence
from yggdrasil.bench.guard import SomethingBuiltError, nothing_built
from yggdrasil.bench.spread import spread
from yggdrasil.engine.decoder import Decoder
from yggdrasil.policy.fixed import Policy
from yggdrasil.predictor.repetition import count_repeated

FAMILY = "yggdrasil"  # prefix of the families of our engine's systems
WARM_TOKENS = 8
SETTLE_SECONDS = 0.2  # pause: idle threads of the previous system may still spin


@dataclass(frozen=True)
class Continuation:
    """A system's continuation of one prompt. Figures after the first token exclude the prefill."""

    tokens: list[int]
    ttft_ms: float
    tpot_ms: float  # mean over ``decoded`` tokens
    decoded: int  # tokens after the prefill's
    passes: int  # target passes for them; 0: not known
    decoding: dict[str, Any] | None = None  # our engine's report on rule and near ties


class System(Protocol):
    """One way of decoding, to be compared."""

    name: str
    family: str  # systems of one family use the same kernels, so their tokens are comparable
    is_plain: bool  # whether it is the family's plain decoding, whose tokens are the reference

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Continuation:
        """Continue ``prompt`` by exactly ``max_new_tokens`` tokens."""


class EngineSystem:
    """Our engine with a policy (None: the decoder's); ``is_plain`` decodes without speculation.

    ``speculation`` and ``sampling`` apply to every request. Settings whose plain decoding generates other tokens need
    another ``family``.
    """

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        policy: Policy | None = None,
        *,
        is_plain: bool = False,
        speculation: Speculation | None = None,
        sampling: SamplingParams = GREEDY,
        family: str = FAMILY,
    ) -> None:
        self.name = name
        self.family = family
        self.is_plain = is_plain
        self._decoder = decoder
        self._policy = policy or decoder.policy
        self._speculation = speculation or (OFF if is_plain else DEFAULT)
        self._sampling = sampling

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Continuation:
        self._decoder.policy = self._policy
        self._decoder.forget()  # every system reads the whole prompt
        generation = self._decoder.generate(
            prompt, max_new_tokens=max_new_tokens, ignore_eos=True, speculation=self._speculation,
            sampling=self._sampling,
        )  # fmt: skip
        metrics, decoded = generation.metrics, len(generation.tokens) - 1
        report = asdict(metrics.decoding)
        return Continuation(generation.tokens, metrics.ttft_ms, metrics.tpot_ms, decoded, metrics.iterations, report)


@dataclass(frozen=True)
class Sample:
    """The result of one system on one prompt."""

    prompt: str
    system: str
    continuation: Continuation
    num_repeated: int  # tokens that repeat an earlier part of the text

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Sample":
        """Rebuild a sample from the result of ``as_dict``. Raises ArtifactError for other values."""
        return parse_dataclass(cls, values, "a sample")


def run_systems(
    systems: Sequence[System],
    prompts: Mapping[str, Sequence[int]],
    max_new_tokens: int,
    on_prompt: Callable[[str, list[Sample]], None],
    *,
    is_timed: bool = True,
    warm_up: bool = True,
) -> None:
    """Decode every prompt (id -> tokens) with every system, in a pseudo-random order per prompt.

    ``on_prompt`` gets a prompt's samples when all systems have decoded it. If ``is_timed``:

    - ``warm_up`` first decodes the first prompt, reversed, with each system, which loads and compiles steps. It is
      reversed because some systems remember answers.
    - A pause and a few uncounted tokens precede each timed request, so that every system starts equally warm.
    - If a step is built during a timed request, the request is repeated.

    The order varies because a system is slower after one that heats up the processor.

    Raises:
        SomethingBuiltError: a step was built in the repeated request too.
    """
    if is_timed and warm_up and prompts:
        backwards = next(iter(prompts.values()))[::-1]
        for system in systems:
            system.decode(backwards, max_new_tokens)
    for prompt_id, tokens in prompts.items():
        samples = []
        for system in Random(prompt_id).sample(systems, len(systems)):
            if is_timed:
                sleep(SETTLE_SECONDS)
                system.decode(tokens, min(WARM_TOKENS, max_new_tokens))
            decode = partial(system.decode, tokens, max_new_tokens)
            found = _timed(decode, f"{system.name} on prompt {prompt_id}") if is_timed else decode()
            samples.append(Sample(prompt_id, system.name, found, count_repeated(tokens, found.tokens)))
        on_prompt(prompt_id, samples)


def _timed(decode: Callable[[], Continuation], what: str) -> Continuation:
    try:
        with nothing_built(what):
            return decode()
    except SomethingBuiltError:  # an engine may build a step at its first use
        with nothing_built(what):
            return decode()


Judge = Callable[[System, str, Sequence[int], Sequence[int]], Divergence | None]


def judge_by_replay(decoder: Decoder, prompts: Mapping[str, Sequence[int]]) -> Judge:
    """Return a function that judges where a run first differs from its family's plain decoding.

    It decodes one token plainly at that position and returns a near tie or a fault, or None if the runs are equal.
    """

    def judge(system: System, prompt: str, plain: Sequence[int], tokens: Sequence[int]) -> Divergence | None:
        return judge_divergence(decoder, prompts[prompt], plain, tokens, is_ours=system.family.startswith(FAMILY))

    return judge


def summarise_systems(
    systems: Sequence[System], samples: Sequence[Sample], ours: str, judge: Judge | None = None
) -> list[dict[str, Any]]:
    """Return one row of figures per system.

    ``ratio_to_ours`` is a system's time per token divided by that of the system ``ours``, per prompt (above 1 ours is
    faster), ``total_ratio_to_ours`` that of all prompts together. ``repeats`` is the share of tokens that repeat an
    earlier part of their text. ``same_as_plain`` counts prompts with the tokens of the family's plain decoding,
    ``same_as_ours`` those with the tokens of ``ours``; other kernels round differently, so the latter may differ
    without a fault. ``partings`` lists the verdicts of ``judge`` on runs that differ from plain decoding.
    """
    by_system = {
        system.name: {s.prompt: s.continuation for s in samples if s.system == system.name} for system in systems
    }
    known = {system.name: sum(s.num_repeated for s in samples if s.system == system.name) for system in systems}
    plain = {system.family: by_system[system.name] for system in systems if system.is_plain}
    rows = []
    for system in systems:
        own = by_system[system.name]
        reference = plain.get(system.family)
        passes = sum(c.passes for c in own.values())
        rows.append(
            {
                "system": system.name,
                "family": system.family,
                "prompts": len(own),
                "same_as_plain": _num_equal(own, reference) if reference is not None else None,
                "same_as_ours": _num_equal(own, by_system[ours]),
                "aal": sum(c.decoded for c in own.values()) / passes if passes else None,
                "tpot_ms": spread([c.tpot_ms for c in own.values()]),
                "ttft_ms": spread([c.ttft_ms for c in own.values()]),
                "ratio_to_ours": spread(_ratios(own, by_system[ours])),
                "total_ratio_to_ours": _total_ratio(own, by_system[ours]),
                "repeats": known[system.name] / max(sum(len(c.tokens) for c in own.values()), 1),
                "partings": _partings(system, own, reference, judge) if judge is not None else None,
            }
        )
    return rows


def _partings(
    system: System, own: Mapping[str, Continuation], reference: Mapping[str, Continuation] | None, judge: Judge
) -> list[dict[str, Any]]:
    found = []
    for prompt, continuation in own.items():
        plain = reference[prompt].tokens if reference is not None else continuation.tokens
        parting = judge(system, prompt, plain, continuation.tokens) if plain != continuation.tokens else None
        if parting is not None:
            found.append({"prompt": prompt, **asdict(parting)})
    return found


def equality(row: Mapping[str, Any], key: str = "same_as_plain") -> str:
    """Format the number of prompts with equal tokens, and why the others differ: near ties or faults."""
    if row[key] is None:
        return "-"
    text = f"{row[key]} of {row['prompts']}"
    partings = row.get("partings") if key == "same_as_plain" else None
    if not partings:
        return text
    ties = sum(parting["verdict"] == "tie" for parting in partings)
    return f"{text}, a tie in {ties}" if ties == len(partings) else f"{text}, faults in {len(partings) - ties}"


def _ratios(own: Mapping[str, Continuation], ours: Mapping[str, Continuation]) -> list[float]:
    """Return the ratio of times per token of each prompt with more than one token."""
    return [c.tpot_ms / ours[prompt].tpot_ms for prompt, c in own.items() if ours[prompt].tpot_ms]


def _total_ratio(own: Mapping[str, Continuation], ours: Mapping[str, Continuation]) -> float | None:
    """Return the ratio of the total times; None if ours is 0."""
    times = [sum(runs[prompt].tpot_ms * runs[prompt].decoded for prompt in own) for runs in (own, ours)]
    return times[0] / times[1] if times[1] else None


def _num_equal(own: Mapping[str, Continuation], reference: Mapping[str, Continuation]) -> int:
    return sum(continuation.tokens == reference[prompt].tokens for prompt, continuation in own.items())
