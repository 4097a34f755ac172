"""The public face: a decoder of one target, by a plan or by an assembly and a policy."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Unpack, get_args
from weakref import finalize

from transformers import PreTrainedTokenizerBase

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.acceptance.sampling import MAX_TOP_LOGPROBS, SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.arguments import check_integer, check_tokens
from yggdrasil.artifacts import current_machine, resolve_plan
from yggdrasil.compiler.compiled import Backend
from yggdrasil.drafters.counts import TABLE_FILE, CountsDrafter
from yggdrasil.drafters.growing import GrowingTable, grown_file
from yggdrasil.drafters.protocol import Drafter, FreeDrafter, each_of
from yggdrasil.drafters.table import Table
from yggdrasil.engine.apart import compile_missing
from yggdrasil.engine.build import Assembly, Phase, silent
from yggdrasil.engine.deciding import HostDecisions, PolicyPerSetting, Prepared, decides_on_device
from yggdrasil.engine.opened import DtypeName, opened
from yggdrasil.engine.options import RequestOptions, RequestSettings
from yggdrasil.engine.policy import PLAIN_POLICY, Policy
from yggdrasil.engine.request import Generation, Request
from yggdrasil.engine.scoring import score
from yggdrasil.engine.text import TextStream
from yggdrasil.engine.trace import DecodingReport
from yggdrasil.engine.turns import Turns
from yggdrasil.errors import ArgumentTypeError, ArgumentValueError, YggdrasilError
from yggdrasil.predictor.bundle import Learned
from yggdrasil.prompts import Message, Messages, encode_chat, encode_prompt
from yggdrasil.runtime.parity import read_tolerance
from yggdrasil.runtime.room import give_back
from yggdrasil.scheduling.plan import Plan, Shapes, check_plan, portable_source


class Decoder:
    """Decodes one request at a time with a fixed target, drafter, policy and set of shapes.

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
        self.learned: Learned | None = None  # of the plan's drafter
        self._folder: Path | None = None  # of what the plan's drafters have learned
        self._growing: GrowingTable | None = None
        self.tolerance: float | None = None  # logits, from ``yggdrasil parity``; None where it was never measured
        self._turns, self._preparing = Turns(), Lock()
        self._policies = PolicyPerSetting()
        self._host: HostDecisions | None = None
        self._has_warned = False

    @classmethod
    def from_plan(  # noqa: PLR0913 - one argument for each option
        cls,
        plan: str | Path,
        *,
        dtype: DtypeName | None = None,
        drafter: Drafter | FreeDrafter | None = None,
        backend: Backend | None = None,
        force_machine: bool = False,
        max_length: int | None = None,
        target: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        phase: Phase = silent,
    ) -> "Decoder":
        """Load the models that a plan names (a path, or a name that resolves to this machine's plan).

        ``dtype`` other than the plan's keeps its shapes, whose costs then are estimates; a GGUF file's blocks are then
        dequantised, so that the model is transformers' own. ``drafter`` replaces the plan's. ``target`` is where the
        plan's target lies now, if not where it was, and ``tokenizer`` its own, if that was read already. ``backend`` is
        ahead-of-time packages on a CPU and captured graphs on a GPU unless given. On a CPU all steps are compiled (once
        on a machine) and loaded before this returns, which ``phase`` is told; nothing is compiled while decoding.
        ``max_length`` tokens is the longest text, the plan's unless given; the plan's costs are kept whatever it is.

        Raises:
            YggdrasilError: the plan, the checkpoints or the machine do not fit each other.
        """
        _check_arguments(plan, dtype, drafter, target)
        machine = current_machine()
        path = resolve_plan(plan, machine, force=force_machine)
        loaded_plan = Plan.load(path)
        check_plan(loaded_plan, machine, force_machine=force_machine)
        if target is not None:
            moved = replace(loaded_plan.target, source=portable_source(target))
            loaded_plan = replace(loaded_plan, target=moved)
        folder = path.parent / loaded_plan.predictor
        learned = None if loaded_plan.drafter is None else Learned.load(folder)
        longest = None if max_length is None else check_integer("max_length", max_length, 2)
        decoder = cls(
            *opened(loaded_plan, folder, learned, dtype or loaded_plan.dtype, drafter, backend, longest, tokenizer)
        )
        decoder.plan, decoder.learned, decoder._folder = loaded_plan, learned, folder
        decoder.tolerance = read_tolerance(folder, dtype or loaded_plan.dtype)
        give_back()
        compile_missing(decoder.assembly, phase)
        decoder.assembly.complete(phase)
        return decoder

    def generate(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Generation:
        """Decode to the end; what the target alone would give, unless ``speculation`` names a lossy rule."""
        return self.start(prompt, **options).finished()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Iterator[str]:
        """Yield text as it becomes final."""
        yield from self.start(prompt, **options)

    def chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Generation:
        """Answer a chat, such as ``[{"role": "user", "content": "Hello"}]``, in the model's own template.

        What earlier turns left in the caches is not read again.
        """
        options["begins_turn"] = True
        return self.start(self.encode_chat(messages), **options).finished()

    def stream_chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Iterator[str]:
        """Yield the answer's text as it becomes final."""
        options["begins_turn"] = True
        yield from self.start(self.encode_chat(messages), **options)

    def start(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Request:
        """Check a request and return it; iterate it for text, then ask it for its result.

        Raises:
            YggdrasilError: an empty prompt, one that fills the context, an unknown token, or a senseless option.
        """
        settings = RequestSettings.of(options)
        with self._preparing:  # another thread may be here too
            tokens = self.encode(prompt)
            eos = frozenset() if settings.ignore_eos else self.eos_tokens
            stream = TextStream(
                self.tokenizer, eos, settings.max_new_tokens, settings.stop, include_stop=settings.include_stop,
                before=() if settings.begins_turn else tokens, keeps_special=settings.keeps_special,
            )  # fmt: skip
            prepared = self._prepare(tokens, settings.sampling, settings.speculation, eos)
        ended = None if self._growing is None or not settings.speculation.is_lossless else self._growing.add
        return Request(self._turns, tokens, stream, prepared, wait=settings.wait, watch=settings.watch, ended=ended)

    def score(self, prompt: str | Sequence[int], top: int = 0) -> Iterator[list[TokenLogprobs]]:
        """Log-probabilities of a prompt's tokens but the first, pass by pass, each with the ``top`` likeliest there."""
        tokens = self.encode(prompt)
        with self._turns.take(wait=False):
            yield from score(self.assembly, tokens, check_integer("top", top, 0, MAX_TOP_LOGPROBS))

    def forget(self) -> None:
        """Drop what the caches hold of earlier requests: the next one reads all of its prompt."""
        with self._turns.take(wait=False):
            self.assembly.forget()

    def pool_texts(self) -> None:
        """Count what requests say for later ones too, from now on.

        Outputs stay the target's own, but a fast answer may tell that somebody had it before.

        Raises:
            YggdrasilError: nothing counts here.
        """
        if (counts := self._counts()) is None:
            raise YggdrasilError("a public pool is one of counted texts, and this decoder counts none; leave it out")
        counts.is_public_pool = True

    def grow_table(self) -> None:
        """Add what requests say to the plan's table, with what earlier runs added, from now on.

        Counts of up to four tokens in a row are kept in the user's cache; outputs stay the target's own.

        Raises:
            YggdrasilError: the plan has no table, or what was kept is damaged.
        """
        counts = self._counts()
        if self.plan is None or self._folder is None or counts is None or not counts.has_table:
            raise YggdrasilError("this decoder has no table that could grow; calibrate one with --drafter table")
        file = grown_file(self.plan.target.fingerprint, self.plan.target.weights)
        self._growing = GrowingTable(file, Table.load(self._folder / TABLE_FILE), counts.set_table)
        finalize(self, self._growing.keep)

    def _counts(self) -> CountsDrafter | None:
        return next((each for each in each_of(self.assembly.engine.free) if isinstance(each, CountsDrafter)), None)

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
        if isinstance(prompt, list | tuple) and any(isinstance(item, Mapping | Message) for item in prompt):
            raise ArgumentTypeError("the prompt is a list of messages; give those to chat or stream_chat")
        tokens = (
            encode_prompt(self.tokenizer, prompt) if isinstance(prompt, str) else check_tokens("the prompt", prompt)
        )
        limit = self.assembly.engine.max_length
        if not tokens:
            raise YggdrasilError("the prompt is empty; give at least one token of text")
        if len(tokens) >= limit:
            raise YggdrasilError(
                f"the prompt has {len(tokens)} tokens, the context holds {limit}; shorten the prompt, or decode with "
                "a larger max_length (--max-length) if the model allows it"
            )
        vocab_size = self.assembly.target.call.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise YggdrasilError(f"the prompt holds token {wrong}, the vocabulary ends at {vocab_size - 1}")
        return tokens

    def encode_chat(self, messages: Messages) -> list[int]:
        """Tokens of a chat up to where the answer begins, checked as ``encode`` does.

        Raises:
            YggdrasilError: no messages, or a model without a chat template.
        """
        with self._preparing:
            return self.encode(encode_chat(self.tokenizer, messages))


def _check_arguments(plan: object, dtype: object, drafter: object, target: object) -> None:
    """Refuse what no plan can be opened with, before anything is read."""
    if not isinstance(plan, str | Path):
        raise ArgumentTypeError(f"the plan is {plan!r}; it must be a name or a path")
    if target is not None and not isinstance(target, str | Path):
        raise ArgumentTypeError(f"target is {target!r}; it must be the place of a model")
    if dtype is not None and dtype not in get_args(DtypeName):
        raise ArgumentValueError(f"dtype must be one of {', '.join(get_args(DtypeName))}, not {dtype!r}")
    ways = ("plant", "fill") if hasattr(drafter, "plant") else ("hidden_layers", "head", "grow")
    lacking = [name for name in ("name", "begin", "extend", *ways) if not hasattr(drafter, name)]
    if drafter is not None and lacking:
        raise ArgumentTypeError(
            f"drafter is {drafter!r}, which lacks {', '.join(lacking)}; give an object that drafts (docs/drafters.md), "
            "or leave it out for the plan's"
        )


__all__ = ["Decoder", "Generation", "Request", "Shapes"]
