"""Prepares requests whose tokens the target's steps choose and accept, so that the host only reads token ids."""

from collections.abc import Sequence

import torch

from yggdrasil.acceptance.coins import fresh_seed
from yggdrasil.acceptance.sampler import Sampler
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.acceptance.tensor_sampling import SamplingKind, kind_on_device
from yggdrasil.compiler.in_process import keep_code
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.engine import Engine
from yggdrasil.engine.host_acceptance import PreparedRequest, SamplerFactory, with_grammar
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.engine.trace import DecodingReport
from yggdrasil.policy.fixed import PLAIN_POLICY, Policy


def accepts_on_device(
    sampling: SamplingParams, speculation: Speculation, tolerance: float, *, is_captured: bool
) -> bool:
    """Return whether the target's steps can choose and accept a request's tokens, so that no logits go to the host.

    Without CUDA graphs (``is_captured`` False) this holds only for greedy requests that need no more than the argmax,
    with the rule "match" or "off". With CUDA graphs it holds also for most sampling parameters and for the lossy rules.
    It never holds for a fixed expansion or width, drawn candidates, a user's rule, or the detection of near ties.
    ``tolerance`` is the lead in logits below which a decision is a near tie; 0 if near ties do not matter.
    """
    is_exact = speculation.exactness == "fast" or (speculation.exactness == "strict" and tolerance == 0)
    if speculation.expansion is not None or speculation.audit or not is_exact:
        return False
    if is_captured:
        return kind_on_device(sampling, speculation) is not None
    return not sampling.needs_logits and speculation.rule in ("match", "off")


def prepare_on_device(
    assembly: Assembly,
    samplers: SamplerFactory,
    prompt: Sequence[int],
    sampling: SamplingParams,
    speculation: Speculation,
    policy: Policy,
    eos: frozenset[int],
    tolerance: float,
) -> PreparedRequest:
    """Return the engine, policy and sampler of a request for which ``accepts_on_device`` is True.

    Args:
        samplers: factory of the decoder's samplers.
        prompt: token ids.
        policy: chooses the tree shapes, unless ``speculation`` is off.
        eos: ids of the tokens that end the text.
        tolerance: lead in logits below which a decision is a near tie, for the report.

    Raises:
        YggdrasilError: ``logit_bias`` has a token outside the vocabulary, the constraint is invalid, or the tokenizer
            lacks the tokens of a thinking section.
    """
    sampler, thinking = samplers.recording(prompt, sampling, eos), samplers.thinking_marks(speculation)
    seed = sampling.seed if sampling.seed is not None else fresh_seed()
    report = DecodingReport(
        rule=speculation.rule_name, lossless=speculation.is_lossless, temperature=sampling.temperature,
        seed=None if sampling.is_greedy else seed, exactness=speculation.exactness,
        tolerance=tolerance if speculation.exactness == "strict" else None,
    )  # fmt: skip
    chosen = PLAIN_POLICY if speculation.rule == "off" else policy
    engine = assembly.engine
    # With a lossy rule, copied tokens could be accepted for ever, so that the text repeats itself.
    model_free = with_grammar(engine.model_free, sampler) if speculation.is_lossless else None
    if model_free is not engine.model_free:
        engine = Engine(
            engine.target, engine.drafter, engine.tree, assembly.shapes.verify_widths, engine.max_length,
            engine.schedule.labels, model_free,
        )  # fmt: skip
    kind = _kind(sampling, speculation)

    def set_up() -> None:
        target = engine.target
        if isinstance(target, CapturedTarget):
            _prepare_captures(assembly, target, kind, sampler)
            if kind is not None:
                target.sampled.sampling.begin(sampling, seed, prompt, speculation, eos, thinking)

    return PreparedRequest(engine, chosen, report, sampler, is_planned=chosen is policy, set_up=set_up)


def prepare_kind(assembly: Assembly, sampling: SamplingParams, speculation: Speculation) -> None:
    """Compile and capture the steps of requests for which ``accepts_on_device`` is True; call it between requests.

    Without this call the first request of the same sampling kind does so. Nothing happens if the target's steps are not
    CUDA graphs.
    """
    target = assembly.engine.target
    if isinstance(target, CapturedTarget):
        _prepare_captures(assembly, target, _kind(sampling, speculation), None)


def _kind(sampling: SamplingParams, speculation: Speculation) -> SamplingKind | None:
    """Return the sampling kind of a request; None if the argmax chooses its tokens."""
    is_chosen_by_argmax = not sampling.needs_logits and speculation.is_lossless
    return None if is_chosen_by_argmax else kind_on_device(sampling, speculation)


def _prepare_captures(
    assembly: Assembly, target: CapturedTarget, kind: SamplingKind | None, sampler: Sampler | None
) -> None:
    with torch.inference_mode(False):  # inference-mode buffers could not be written outside it
        captures = target.set_sampling(kind, sampler)
        if captures:  # recording runs each capture once
            assembly.forget()
            for capture in captures:
                capture.prepare()
            keep_code()
            assembly.forget()
