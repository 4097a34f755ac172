"""The public face: a decoder for one pair, from a plan or from two checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from yggdrasil.artifacts import current_machine, model_fingerprint, resolve_plan, tokenizer_fingerprint
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.options import NGramOptions
from yggdrasil.drafters.protocol import Drafter
from yggdrasil.engine.build import Assembly, assemble, default_backend, open_device
from yggdrasil.engine.policy import PLAIN_POLICY, DepthEvidence, ObjectivePolicy, Policy
from yggdrasil.engine.text import FinishReason, TextStream
from yggdrasil.engine.trace import Metrics, Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.models.compiled import Backend
from yggdrasil.models.loading import LoadedModel, check_same_tokenizer, load_model, load_tokenizer
from yggdrasil.predictor.bundle import Learned
from yggdrasil.scheduling.plan import ModelRef, Plan, Shapes, check_plan
from yggdrasil.scheduling.stages import DEFAULT_ORDER, is_head_first

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
        decoder.plan = loaded_plan
        return decoder

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        ignore_eos: bool = False,
        speculation: bool = True,
    ) -> Generation:
        """Decode greedily to the end; the same tokens as the target alone."""
        request = self.start(
            prompt, max_new_tokens=max_new_tokens, stop=stop, include_stop=include_stop, ignore_eos=ignore_eos,
            speculation=speculation,
        )  # fmt: skip
        for _ in request:
            pass
        return request.result()

    def stream(
        self, prompt: str | Sequence[int], *, max_new_tokens: int = 128, stop: Sequence[str] = ()
    ) -> Iterator[str]:
        """Yield text as it becomes final."""
        yield from self.start(prompt, max_new_tokens=max_new_tokens, stop=stop)

    def start(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        ignore_eos: bool = False,
        speculation: bool = True,
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
        return Request(self, tokens, stream, self.policy if speculation else PLAIN_POLICY)

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

    def __init__(self, decoder: Decoder, prompt: list[int], stream: TextStream, policy: Policy) -> None:
        self._decoder = decoder
        self._prompt = prompt
        self._stream = stream
        self._policy = policy
        self._trace = Trace()

    def __iter__(self) -> Iterator[str]:
        engine = self._decoder.assembly.engine
        yield from engine.decode(self._prompt, self._stream, self._policy, self._trace)

    def result(self) -> Generation:
        """What was generated so far; ``cancelled`` where the text had not ended."""
        self._stream.finish("cancelled")
        assert self._stream.finish_reason is not None
        return Generation(
            len(self._prompt), self._stream.tokens, self._stream.text, self._stream.finish_reason, self._trace.metrics()
        )


def _decoder_of(
    plan: Plan, learned: Learned, dtype: DtypeName, drafter: Drafter | None, backend: Backend | None
) -> Decoder:
    target_path = plan.target.path()
    _check_fingerprint(plan.target, "target")
    tokenizer = load_tokenizer(target_path)
    if Path(target_path).exists() and tokenizer_fingerprint(Path(target_path)) != plan.tokenizer:
        raise YggdrasilError(f"the tokenizer in {target_path} is not the one the plan {plan.name} was calibrated with")
    device = open_device(plan.device)
    target = load_model(target_path, DTYPES[dtype], device, plan.target.threads, weights=plan.weights)
    # What was learned of the plan's own drafter says nothing of another's first guesses.
    stages = plan.stages if drafter is None else DEFAULT_ORDER
    depth = DepthEvidence(learned.depth, learned.reads) if plan.depth_from != "mean" and drafter is None else None
    second = drafter or _planned_drafter(plan, tokenizer, DTYPES[dtype], device)
    knots = torch.from_numpy(np.asarray(learned.acceptance.knots))
    assembly = assemble(target, second, plan.shapes, backend or default_backend(device), knots=knots, stages=stages)
    costs = {entry.context: entry.steps() for entry in plan.costs}
    policy = ObjectivePolicy(
        costs, learned.ratios, learned.mean_survival, depth, plan.objective, is_head_first=is_head_first(stages)
    )
    return Decoder(assembly, tokenizer, policy, eos_tokens(target_path, tokenizer))


def _planned_drafter(
    plan: Plan, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, device: torch.device
) -> LoadedModel | Drafter:
    if isinstance(plan.drafter, NGramOptions):
        return NGramDrafter(plan.drafter)
    _check_fingerprint(plan.drafter, "drafter")
    source = plan.drafter.path()
    check_same_tokenizer(tokenizer, load_tokenizer(source), (plan.target.path(), source))
    return load_model(source, dtype, device, plan.drafter.threads)


def eos_tokens(source: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End-of-text tokens: the generation configuration's, else the tokenizer's."""
    try:
        configured = GenerationConfig.from_pretrained(source, local_files_only=Path(source).exists()).eos_token_id
    except OSError:
        configured = None
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)


def _check_fingerprint(model: ModelRef, role: str) -> None:
    path = Path(model.path())
    if path.exists() and model_fingerprint(path) != model.fingerprint:
        raise YggdrasilError(f"the {role} in {path} has changed since the plan was made; calibrate again")
    if not path.exists() and not model.path().count("/") == 1:
        raise YggdrasilError(f"the plan's {role} {path} is not there; restore it or calibrate with its new place")


__all__ = ["Decoder", "Generation", "Request", "Shapes"]
