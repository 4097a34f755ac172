"""The ``Decoder``: generates text with one target, opened from a plan or built from an ``Assembly`` and a policy."""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Unpack
from weakref import finalize

from yggdrasil.acceptance.sampler import TokenLogprobs
from yggdrasil.acceptance.sampling import MAX_TOP_LOGPROBS, Constraint, SamplingParams
from yggdrasil.acceptance.speculation import DEFAULT, Speculation
from yggdrasil.arguments import check_integer, check_tokens
from yggdrasil.artifacts import current_machine, resolve_plan
from yggdrasil.artifacts.gguf import forget_headers
from yggdrasil.artifacts.memory import trim_heap
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.compiler.compiled import Backend
from yggdrasil.drafters.protocol import Drafter
from yggdrasil.drafters.statistics.grown_table import answers_folder
from yggdrasil.drafters.statistics.live_table import LiveTable
from yggdrasil.engine.assembly import Assembly, Phase, silent
from yggdrasil.engine.device_acceptance import accepts_on_device, prepare_kind, prepare_on_device
from yggdrasil.engine.host_acceptance import HostAcceptance, PolicyPerSetting, PreparedRequest, SamplerFactory
from yggdrasil.engine.loading import DtypeName, check_opening, load_parts
from yggdrasil.engine.online_estimates import OnlineEstimates
from yggdrasil.engine.plan_parts import planned_policy
from yggdrasil.engine.request import Generation, Request, RequestLock
from yggdrasil.engine.request_options import (
    RequestOptions,
    RequestSettings,
    check_prompt_tokens,
    check_vocabulary,
    near_tie_tolerance,
)
from yggdrasil.engine.scoring import score
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.engine.text_stream import TextStream
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import ArgumentTypeError, YggdrasilError
from yggdrasil.policy.fixed import Policy
from yggdrasil.policy.objective import least_useful_probability
from yggdrasil.predictor.bundle import Learned
from yggdrasil.prompts import Message, Messages, encode_chat, encode_prompt
from yggdrasil.runtime.parity import read_tolerance
from yggdrasil.scheduling.plan import Plan, check_plan, portable_source


class Decoder:
    """Decoder of one request at a time, with a fixed target, drafter, policy and set of tree shapes.

    Create it by ``from_plan`` for a calibrated plan, or from an ``Assembly`` (engine and models), the tokenizer, a
    policy (chooses each iteration's tree shape) and the ids of end tokens.
    """

    def __init__(self, assembly: Assembly, tokenizer: Tokenizer, policy: Policy, eos: frozenset[int]) -> None:
        self.assembly = assembly
        self.tokenizer = tokenizer
        self.policy = policy
        self.eos_tokens = eos
        self.plan: Plan | None = None
        self.learned: Learned | None = None  # predictor and tables of the plan's drafter
        self._table = LiveTable(assembly.engine.model_free)
        self._estimates: OnlineEstimates | None = None
        self.tolerance: float | None = None  # in logits, from ``yggdrasil parity``; None: not measured
        self._turns, self._preparing = RequestLock(), Lock()
        self._policies = PolicyPerSetting()
        self._answers: Path | None = None  # file to which requests are appended

    @classmethod
    def from_plan(  # noqa: PLR0913 - one argument for each option
        cls,
        plan: str | Path,
        *,
        dtype: DtypeName | None = None,
        drafter: Drafter | None = None,
        backend: Backend | None = None,
        force_machine: bool = False,
        max_length: int | None = None,
        target: str | None = None,
        tokenizer: Tokenizer | None = None,
        phase: Phase = silent,
    ) -> "Decoder":
        """Load the models and drafters of a plan (the YAML file of a calibration), and return a decoder that uses them.

        Args:
            plan: path of the plan's file, or the name of a plan of this machine.
            dtype: dtype of the arithmetic; None takes the plan's. With another dtype than the plan's, step costs are
                estimates, and a GGUF file's blocks are dequantised.
            drafter: object that drafts instead of the plan's drafter; None keeps the plan's drafter.
            backend: how steps run. None takes native steps on a CPU (compiled steps if the architecture has no native
                steps) and CUDA graphs on a GPU.
            force_machine: accept a plan that was calibrated on another machine.
            max_length: context length in tokens, at least 2; None takes the plan's.
            target: path of the target's checkpoint, if it was moved.
            tokenizer: the target's, if it is already loaded.
            phase: called with a phase's title; returns a callback for the fraction done, 0 to 1.

        Raises:
            YggdrasilError: there is no such plan, a file of it or a checkpoint is missing or damaged, or plan,
                checkpoints and machine do not fit each other.
        """
        check_opening(plan, dtype, drafter, target)
        machine = current_machine()
        path = resolve_plan(plan, machine, force=force_machine)
        loaded_plan = Plan.load(path)
        check_plan(loaded_plan, machine, force_machine=force_machine)
        if target is not None:
            moved = replace(loaded_plan.target, source=portable_source(target))
            loaded_plan = replace(loaded_plan, target=moved)
        return cls.from_loaded(
            loaded_plan, path.parent / loaded_plan.predictor, dtype=dtype, drafter=drafter, backend=backend,
            max_length=max_length, tokenizer=tokenizer, phase=phase,
        )  # fmt: skip

    @classmethod
    def from_loaded(  # noqa: PLR0913 - one argument for each option
        cls,
        plan: Plan,
        folder: Path,
        *,
        dtype: DtypeName | None = None,
        drafter: Drafter | None = None,
        backend: Backend | None = None,
        max_length: int | None = None,
        tokenizer: Tokenizer | None = None,
        phase: Phase = silent,
        check: Callable[[Assembly], None] | None = None,
    ) -> "Decoder":
        """Return a decoder for a ``Plan`` object; arguments that are not listed mean the same as in ``from_plan``.

        Args:
            folder: the plan's predictor: the folder with acceptance, depth predictor, n-gram table and scorer.
            check: verifies the models' code. It is called with the assembly before steps are built, but only on a GPU
                or if a model runs its transformers code.

        Raises:
            YggdrasilError: a file of the plan or a checkpoint is missing or damaged, or they do not fit each other.
        """
        learned = None if plan.drafter is None or plan.is_provisional else Learned.load(folder)
        longest = None if max_length is None else check_integer("max_length", max_length, 2)
        decoder = cls(*load_parts(plan, folder, learned, dtype or plan.dtype, drafter, backend, longest, tokenizer))
        decoder.plan, decoder.learned = plan, learned
        decoder._table.set_loaded_folder(folder)
        decoder.tolerance = read_tolerance(folder, dtype or plan.dtype)
        forget_headers()
        trim_heap()
        if check is not None and (plan.device != "cpu" or decoder.assembly.runs_transformers_code):
            check(decoder.assembly)
        decoder.assembly.complete(phase)
        return decoder

    def use_costs(self, plan: Plan) -> None:
        """Replace the decoder's plan by ``plan``, which has new step costs and is otherwise the same.

        Call this before any request.

        Raises:
            YggdrasilError: the plan and its predictor are not from the same calibration.
        """
        self.plan = plan
        self.policy = planned_policy(plan, self.learned, drafts=self.assembly.second is not None)
        if (counts := self._table.counts) is not None:
            counts.leave_out_below(least_useful_probability(entry.steps() for entry in plan.costs))

    def keep_estimates(self, path: Path) -> None:
        """Refine the estimates of the provisional plan in the file ``path`` by every later lossless request.

        Step costs are written to this file, acceptance estimates to a JSON file next to it: at most every 30 s, and
        when the decoder is deleted.
        """
        assert self.plan is not None, "the decoder was opened by the plan"
        self._estimates = OnlineEstimates(path, self.plan, getattr(self.policy, "state", dict))
        finalize(self, self._estimates.save)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Generation:
        """Continue a prompt (text or token ids) until the text ends, and return the new text, its tokens and metrics.

        ``RequestOptions`` lists the options. The output follows the target's own distribution, except with a lossy
        acceptance rule in ``speculation``.

        Raises:
            YggdrasilError: the prompt or an option is invalid (see ``start``), or another request is running and the
                option ``wait`` is False.
        """
        return self.start(prompt, **options).finished()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Iterator[str]:
        """Continue a prompt (text or token ids), and yield each piece of text when no later token can change it.

        Errors are those of ``generate``, raised when the first piece is requested.
        """
        yield from _nonempty(self.start(prompt, **options))

    def chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Generation:
        """Answer a chat, such as ``[{"role": "user", "content": "Hello"}]``, and return text, tokens and metrics.

        The chat is rendered by the model's chat template. KV entries of the prefix shared with the last request are
        reused. Errors are those of ``encode_chat`` and ``generate``.
        """
        options["begins_turn"] = True
        return self.start(self.encode_chat(messages), **options).finished()

    def stream_chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Iterator[str]:
        """Answer a chat, and yield each piece of the answer's text as soon as no later token can change it.

        Errors are those of ``chat``, raised when the first piece is requested.
        """
        options["begins_turn"] = True
        yield from _nonempty(self.start(self.encode_chat(messages), **options))

    def start(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Request:
        """Check a prompt (text or token ids) and its options, and return a ``Request`` that has not begun to decode.

        Iterating over the request decodes and yields text. Its method ``result`` then returns text, tokens and metrics.

        Raises:
            YggdrasilError: the prompt is empty, too long or has an unknown token, or an option is invalid.
        """
        settings = RequestSettings.of(options)
        with self._preparing:  # threads may start requests concurrently
            tokens = self.encode(prompt)
            check_vocabulary("stop_tokens", settings.stop_tokens, self.assembly.target.call.vocab_size)
            eos = (frozenset() if settings.ignore_eos else self.eos_tokens) | frozenset(settings.stop_tokens)
            stream = TextStream(
                self.tokenizer, eos, settings.max_new_tokens, settings.stop, include_stop=settings.include_stop,
                before=() if settings.begins_turn else tokens, keeps_special=settings.keeps_special,
            )  # fmt: skip
            prepared = self._prepare(tokens, settings.sampling, settings.speculation, eos)
        if self.assembly.engine.drafter is None and settings.speculation.rule not in ("match", "off"):
            warnings.warn(
                f"the rule {settings.speculation.rule_name} accepts drafts of a draft model or head alone, and there "
                "is none: the request is decoded plainly",
                stacklevel=2,
            )
        on_end = self._use_finished if settings.speculation.is_lossless else None
        # The table is loaded after the first token, which needs none; ``grow_table`` may replace it until then.
        return Request(
            self._turns, tokens, stream, prepared, wait=settings.wait, watch=settings.watch,
            on_begin=self._table.load_once, on_end=on_end,
        )  # fmt: skip

    def _use_finished(self, prompt: list[int], answer: list[int], trace: Trace) -> None:
        """Add a finished lossless request to the n-gram table, the kept answers and the online estimates."""
        self._table.add(prompt, answer)
        if self._answers is not None and answer:
            with suppress(OSError), self._answers.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
        if self._estimates is not None:
            self._estimates.add(trace)

    def score(self, prompt: str | Sequence[int], top: int = 0) -> Iterator[list[TokenLogprobs]]:
        """Yield the log-probability of every token of a prompt but the first, one list per pass of the target.

        The lists together are in the order of the tokens; the last may be empty. Errors are raised at the first list.

        Args:
            prompt: text or token ids.
            top: number of likeliest tokens to list at each token's index, 0 to 100.

        Raises:
            YggdrasilError: a request is running, the prompt or ``top`` is invalid, or the plan has no verify width
                above 1.
        """
        tokens = self.encode(prompt)
        with self._turns.take(wait=False):
            yield from score(self.assembly, tokens, check_integer("top", top, 0, MAX_TOP_LOGPROBS))

    def forget(self) -> None:
        """Invalidate the KV caches. The next request then prefills its whole prompt.

        Raises:
            YggdrasilError: a request is running.
        """
        with self._turns.take(wait=False):
            self.assembly.forget()

    def prepare_sampling(self, sampling: SamplingParams, speculation: Speculation = DEFAULT) -> None:
        """Build the steps that requests with these settings need; without this call the first such request builds them.

        Raises:
            YggdrasilError: a request is running.
        """
        with self._turns.take(wait=False):
            if self._accepts_on_device(sampling, speculation):
                prepare_kind(self.assembly, sampling, speculation)
            else:
                self.assembly.logit_target  # noqa: B018  (made at first use)

    def use_shipped_text(self, tokenizer: Path, fingerprint: str) -> None:
        """Also draft from an n-gram table of text that is shipped with the package.

        A background process writes the table first. Nothing happens if the decoder has no n-gram statistics, or if they
        already have a table.

        Args:
            tokenizer: path of the target's tokenizer.json.
            fingerprint: the target's tokenizer fingerprint.
        """
        self._table.use_shipped_text(tokenizer, fingerprint)

    def pool_texts(self) -> None:
        """Share n-gram counts between all later requests, instead of counting each request's text alone.

        Outputs stay the target's own, but a fast answer may reveal that another request had the same text.

        Raises:
            YggdrasilError: this decoder has no n-gram statistics.
        """
        if (counts := self._table.counts) is None:
            raise YggdrasilError("a public pool is one of counted texts, and this decoder counts none; leave it out")
        counts.is_public_pool = True

    @property
    def has_table(self) -> bool:
        """Whether the decoder drafts from an n-gram table, or will once the table of the shipped text is written."""
        return self._table.base is not None

    def grow_table(self) -> None:
        """Add later answers to the n-gram table, and draft also from the answers that earlier processes added.

        Counts of up to four consecutive tokens are stored in the user's cache folder. Outputs stay the target's own.

        Raises:
            YggdrasilError: there is no n-gram table.
        """
        if self.plan is None or not self.has_table:
            raise YggdrasilError("this decoder has no n-gram table that could grow; calibrate one with --drafter table")
        folder = answers_folder(self.plan.target.fingerprint, self.plan.target.weights)
        finalize(self, self._table.count_answers(folder))

    def keep_answers(self, file: Path) -> None:
        """Append the token ids of each later lossless request to ``file``, as JSON lines with "prompt" and "answer".

        Requests without generated tokens are left out, and errors of writing are ignored.
        """
        self._answers = file

    def _prepare(
        self, prompt: Sequence[int], sampling: SamplingParams, speculation: Speculation, eos: frozenset[int]
    ) -> PreparedRequest:
        tolerance = near_tie_tolerance(speculation, self.tolerance)
        policy = self._policies.policy_for(self.policy, sampling, speculation)
        if self._accepts_on_device(sampling, speculation):
            prepared = prepare_on_device(
                self.assembly, self._samplers, prompt, sampling, speculation, policy, eos, tolerance
            )
        else:
            prepared = self._host.prepare(prompt, sampling, speculation, policy, eos, tolerance)
        drawn = prepared.report.seed if speculation.is_lossless else None  # lossy rules accept by probability alone
        follow = partial(self.assembly.engine.follow_draws, drawn, sampling.temperature)
        prepared = replace(prepared, follow_draws=follow)
        if self.plan is None or sampling.is_greedy or not prepared.is_planned:
            return prepared
        return replace(prepared, report=replace(prepared.report, calibrated_temperature=0.0))

    def _accepts_on_device(self, sampling: SamplingParams, speculation: Speculation) -> bool:
        tolerance = near_tie_tolerance(speculation, self.tolerance)
        is_captured = isinstance(self.assembly.engine.target, CapturedTarget)
        return accepts_on_device(sampling, speculation, tolerance, is_captured=is_captured)

    @cached_property
    def _samplers(self) -> SamplerFactory:
        return SamplerFactory(self.assembly, self.tokenizer, self.eos_tokens)

    @cached_property
    def _host(self) -> HostAcceptance:
        if not isinstance(self.assembly.engine.target, CapturedTarget):
            return HostAcceptance(self.assembly, self._samplers)
        with self._turns.take(wait=True):  # recording its passes overwrites the KV cache
            return HostAcceptance(self.assembly, self._samplers)

    def check_constraint(self, constraint: Constraint) -> None:
        """Check that a grammar constraint compiles within the limits of time and memory.

        The method may be called while a request runs.

        Raises:
            YggdrasilError: compiling exceeds a limit, or the decoder cannot compile any constraint.
        """
        with self._preparing:
            grammars = self._samplers.grammars
        grammars.check(constraint)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, given as text or as token ids.

        Raises:
            YggdrasilError: the prompt is empty, fills the context, has an id outside the vocabulary, is not valid
                Unicode, or is neither text nor integers (such as a list of messages).
        """
        if isinstance(prompt, list | tuple) and any(isinstance(item, Mapping | Message) for item in prompt):
            raise ArgumentTypeError("the prompt is a list of messages; give those to chat or stream_chat")
        if not isinstance(prompt, str | Iterable):
            raise ArgumentTypeError(f"the prompt is {prompt!r}; it must be text or a list of token ids")
        tokens = (
            encode_prompt(self.tokenizer, prompt) if isinstance(prompt, str) else check_tokens("the prompt", prompt)
        )
        check_prompt_tokens(tokens, self.assembly.engine.max_length, self.assembly.target.call.vocab_size)
        return tokens

    def encode_chat(self, messages: Messages) -> list[int]:
        """Return the token ids of a chat, rendered by the chat template up to the point at which the answer begins.

        Raises:
            YggdrasilError: there are no messages, the model has no chat template, or the chat fills the context.
        """
        with self._preparing:
            return self.encode(encode_chat(self.tokenizer, messages))


def _nonempty(request: Request) -> Iterator[str]:
    """Yield the pieces of ``request`` that are not empty. Closing the iterator ends the request."""
    with closing(iter(request)) as pieces:
        yield from filter(None, pieces)
