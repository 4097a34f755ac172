"""Requests whose tokens are chosen and accepted within the target's steps, so that the host only reads tokens."""

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
from yggdrasil.engine.host_acceptance import PreparedRequest, SamplerFactory, guided
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.engine.trace import DecodingReport
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.policy.policy import Policy


def accepts_on_device(
    sampling: SamplingParams, speculation: Speculation, tolerance: float, *, is_captured: bool
) -> bool:
    """Return whether the target's steps can choose and accept the request's tokens.

    They can for greedy requests and, if captured, for those that ``kind_on_device`` supports. The host accepts for the
    others: sampled drafts, rules that users define, and near ties.
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
    """Prepare a request for which ``accepts_on_device`` is true.

    Raises:
        YggdrasilError: ``logit_bias`` has a token outside the vocabulary, or the constraint is invalid.
    """
    sampler = samplers.recording(prompt, sampling, eos)
    seed = sampling.seed if sampling.seed is not None else fresh_seed()
    report = DecodingReport(
        rule=speculation.rule_name, lossless=speculation.is_lossless, temperature=sampling.temperature,
        seed=None if sampling.is_greedy else seed, exactness=speculation.exactness,
        tolerance=tolerance if speculation.exactness == "strict" else None,
    )  # fmt: skip
    chosen = PLAIN_POLICY if speculation.rule == "off" else policy
    engine = assembly.engine
    # With a lossy rule, copied tokens could be accepted for ever, so that the text repeats itself.
    model_free = guided(engine.model_free, sampler) if speculation.is_lossless else None
    if model_free is not engine.model_free:
        engine = Engine(
            engine.target, engine.drafter, engine.tree, assembly.shapes.verify_widths, engine.max_length,
            engine.schedule.labels, model_free,
        )  # fmt: skip
    is_chosen_by_argmax = not sampling.needs_logits and speculation.is_lossless
    kind = None if is_chosen_by_argmax else kind_on_device(sampling, speculation)

    def set_up() -> None:
        target = engine.target
        if isinstance(target, CapturedTarget):
            _prepare_captures(assembly, target, kind, sampler)
            if kind is not None:
                target.sampled.sampling.begin(sampling, seed, prompt, speculation, eos)

    return PreparedRequest(engine, chosen, report, sampler, is_planned=chosen is policy, set_up=set_up)


def _prepare_captures(
    assembly: Assembly, target: CapturedTarget, kind: SamplingKind | None, sampler: Sampler | None
) -> None:
    with torch.inference_mode(False):  # inference-mode buffers could not be written outside it
        captures = target.choose_by(kind, sampler)
        if captures:  # recording runs each capture once
            assembly.forget()
            for capture in captures:
                capture.prepare()
            keep_code()
            assembly.forget()
