"""The public face: a decoder for one pair, from a plan or from two checkpoints."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.acceptance.speculation import DEFAULT, OFF, Speculation
from yggdrasil.artifacts import current_machine, resolve_plan, tokenizer_fingerprint
from yggdrasil.drafters.protocol import Drafter
from yggdrasil.engine.build import Assembly, assemble, default_backend, open_device
from yggdrasil.engine.deciding import HostDecisions, PolicyPerSetting, Prepared, decides_on_device
from yggdrasil.engine.ends import end_tokens
from yggdrasil.engine.planned import check_fingerprint, planned_drafter, planned_policy
from yggdrasil.engine.policy import PLAIN_POLICY, Policy
from yggdrasil.engine.text import FinishReason, TextStream
from yggdrasil.engine.trace import DecodingReport, Metrics, Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.models.compiled import Backend
from yggdrasil.models.loading import load_model, load_tokenizer
from yggdrasil.models.parity import read_tolerance
from yggdrasil.predictor.bundle import Learned
from yggdrasil.scheduling.plan import Plan, Shapes, check_plan
from yggdrasil.scheduling.stages import DEFAULT_ORDER

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DtypeName = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Generation:
    """One finished request."""

    prompt_tokens: int
    tokens: list[int]
    text: str
    finish_reason: FinishReason
    metrics: Metrics
    logprobs: list[TokenLogprobs] | None = None  # one a token, where they were asked for


class Decoder:
    """Decodes one request at a time with a fixed pair, policy and set of shapes.

    Make one with ``from_plan`` (calibrated) or directly from an ``Assembly`` and a policy (anything else).
    """

    def __init__(
        self, assembly: Assembly, tokenizer: PreTrainedTokenizerBase, policy: Policy, eos: frozenset[int]
    ) -> None:
        self.assembly = assembly
        self.tokenizer = tokenizer
        self.policy = policy
        self.eos_tokens = eos
        self.plan: Plan | None = None
        self.learned: Learned | None = None  # with the plan
        self.tolerance: float | None = None  # logits, from ``yggdrasil parity``; None where it was never measured
        self.current: Request | None = None  # the request under way
        self._policies = PolicyPerSetting()
        self._host: HostDecisions | None = None
        self._has_warned = False

    @classmethod
    def from_plan(
        cls,
        plan: str | Path,
        *,
        dtype: DtypeName | None = None,
        drafter: Drafter | None = None,
        backend: Backend | None = None,
        force_machine: bool = False,
    ) -> "Decoder":
        """Load the pair a plan names (a path, or a name that resolves to this machine's plan).

        ``dtype`` other than the plan's keeps its shapes, whose costs then are estimates. ``drafter`` replaces the
        plan's own. Steps are compiled or loaded when first used; ``backend`` is ahead-of-time packages on a CPU and
        captured graphs on a GPU unless given.

        Raises:
            YggdrasilError: the plan, the checkpoints or the machine do not fit each other.
        """
        machine = current_machine()
        path = resolve_plan(plan, machine, force=force_machine)
        loaded_plan = Plan.load(path)
        check_plan(loaded_plan, machine, force_machine=force_machine)
        learned = Learned.load(path.parent / loaded_plan.predictor)
        decoder = _decoder_of(loaded_plan, learned, dtype or loaded_plan.dtype, drafter, backend)
        decoder.plan, decoder.learned = loaded_plan, learned
        decoder.tolerance = read_tolerance(path.parent / loaded_plan.predictor, dtype or loaded_plan.dtype)
        return decoder

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        ignore_eos: bool = False,
        speculation: bool | Speculation = True,
        sampling: SamplingParams = GREEDY,
    ) -> Generation:
        """Decode to the end; what the target alone would give, unless ``speculation`` names a lossy rule."""
        request = self.start(
            prompt, max_new_tokens=max_new_tokens, stop=stop, include_stop=include_stop, ignore_eos=ignore_eos,
            speculation=speculation, sampling=sampling,
        )  # fmt: skip
        for _ in request:
            pass
        return request.result()

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        speculation: bool | Speculation = True,
        sampling: SamplingParams = GREEDY,
    ) -> Iterator[str]:
        """Yield text as it becomes final."""
        yield from self.start(
            prompt, max_new_tokens=max_new_tokens, stop=stop, speculation=speculation, sampling=sampling
        )

    def start(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        ignore_eos: bool = False,
        speculation: bool | Speculation = True,
        sampling: SamplingParams = GREEDY,
    ) -> "Request":
        """Check a request and return it; iterate it for text, then ask it for its result.

        Raises:
            YggdrasilError: an empty prompt, one that fills the context, an unknown token, or a senseless limit.
        """
        tokens = self.encode(prompt)
        if max_new_tokens < 1:
            raise YggdrasilError(f"max_new_tokens is {max_new_tokens}; ask for at least 1")
        eos = frozenset() if ignore_eos else self.eos_tokens
        stream = TextStream(self.tokenizer, eos, max_new_tokens, stop, include_stop=include_stop)
        if isinstance(speculation, bool):
            speculation = DEFAULT if speculation else OFF
        return Request(self, tokens, stream, self._prepare(tokens, sampling, speculation, eos))

    def _prepare(
        self, prompt: Sequence[int], sampling: SamplingParams, speculation: Speculation, eos: frozenset[int]
    ) -> Prepared:
        tolerance = self._tolerance_for(speculation)
        policy = self._policies.of(self.policy, sampling, speculation)
        if decides_on_device(sampling, speculation, tolerance):
            chosen = PLAIN_POLICY if speculation.rule == "off" else policy
            known = tolerance if speculation.exactness == "strict" else None
            report = DecodingReport(rule=speculation.rule, exactness=speculation.exactness, tolerance=known)
            return Prepared(self.assembly.engine, chosen, report)
        if self._host is None:
            self._host = HostDecisions(self.assembly, self.tokenizer, self.eos_tokens)
        prepared = self._host.prepare(prompt, sampling, speculation, policy, eos, tolerance)
        if self.plan is None or sampling.is_greedy or not prepared.is_planned:
            return prepared
        self._warn_of_calibration(sampling.temperature)
        return replace(prepared, report=replace(prepared.report, calibrated_temperature=0.0))

    def _tolerance_for(self, speculation: Speculation) -> float:
        """Lead under which a decision is a near tie for this request, in logits; 0 where none matters."""
        if speculation.exactness != "strict" and not speculation.audit:
            return 0.0
        tolerance = self.tolerance if speculation.tolerance is None else speculation.tolerance
        if tolerance is None:
            raise YggdrasilError(
                "exactness strict and audit need the tolerance of this pair on this machine; measure it with "
                "`yggdrasil parity`, or give one"
            )
        return tolerance

    def _warn_of_calibration(self, temperature: float) -> None:
        if not self._has_warned:
            warnings.warn(
                f"the plan was calibrated at temperature 0 and is used at {temperature:g}: the output is exact, the "
                "chosen trees may not be the fastest",
                stacklevel=4,
            )
        self._has_warned = True

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokens of a prompt, checked against the context and the vocabulary."""
        tokens = list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
        limit = self.assembly.engine.max_length
        if not tokens:
            raise YggdrasilError("the prompt is empty; give at least one token of text")
        if len(tokens) >= limit:
            raise YggdrasilError(
                f"the prompt has {len(tokens)} tokens, the context holds {limit}; shorten the prompt, or calibrate "
                "with a larger --max-length if the model allows it"
            )
        vocab_size = self.assembly.target.call.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise YggdrasilError(f"the prompt holds token {wrong}, the vocabulary ends at {vocab_size - 1}")
        return tokens


class Request:
    """One request under way: an iterator of final text, cancelled by not iterating further."""

    def __init__(self, decoder: Decoder, prompt: list[int], stream: TextStream, prepared: Prepared) -> None:
        self._decoder = decoder
        self._prompt = prompt
        self._stream = stream
        self._prepared = prepared
        self._trace = Trace()

    def __iter__(self) -> Iterator[str]:
        prepared = self._prepared
        self._decoder.current = self
        prepared.begin()
        for piece in prepared.engine.decode(self._prompt, self._stream, prepared.policy, self._trace):
            yield piece
            if self._decoder.current is not self and self._stream.finish_reason is None:
                raise YggdrasilError("another request has begun on this decoder; it serves one at a time")

    def result(self) -> Generation:
        """What was generated so far; ``cancelled`` where the text had not ended."""
        self._stream.finish("cancelled")
        assert self._stream.finish_reason is not None
        prepared, tokens = self._prepared, self._stream.tokens
        metrics = replace(self._trace.metrics(), decoding=prepared.final_report())
        sampler = prepared.sampler
        # A walk may go on past the text's end; what it noted there is dropped with its tokens.
        has_logprobs = sampler is not None and sampler.params.logprobs is not None
        logprobs = sampler.logprobs[: len(tokens)] if sampler is not None and has_logprobs else None
        return Generation(len(self._prompt), tokens, self._stream.text, self._stream.finish_reason, metrics, logprobs)


def _decoder_of(
    plan: Plan, learned: Learned, dtype: DtypeName, drafter: Drafter | None, backend: Backend | None
) -> Decoder:
    target_path = plan.target.path()
    check_fingerprint(plan.target, "target")
    tokenizer = load_tokenizer(target_path)
    if Path(target_path).exists() and tokenizer_fingerprint(Path(target_path)) != plan.tokenizer:
        raise YggdrasilError(f"the tokenizer in {target_path} is not the one the plan {plan.name} was calibrated with")
    device = open_device(plan.device)
    target = load_model(target_path, DTYPES[dtype], device, plan.target.threads, weights=plan.weights)
    # What was learned of the plan's own drafter says nothing of another's first guesses.
    adapted = plan if drafter is None else replace(plan, stages=DEFAULT_ORDER, depth_from="mean")
    second = drafter or planned_drafter(plan, tokenizer, DTYPES[dtype], device)
    knots = torch.from_numpy(np.asarray(learned.acceptance.knots))
    backend = backend or default_backend(device)
    assembly = assemble(target, second, plan.shapes, backend, knots=knots, stages=adapted.stages)
    return Decoder(
        assembly, tokenizer, planned_policy(adapted, learned), end_tokens(target_path, target.config, tokenizer)
    )


__all__ = ["Decoder", "Generation", "Request", "Shapes"]
