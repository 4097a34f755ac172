"""Requests whose tokens are chosen and accepted within the target's steps, so that the host only reads tokens."""

from collections.abc import Sequence
from functools import partial

import torch

from yggdrasil.acceptance.coins import fresh_seed
from yggdrasil.acceptance.processors import check_bias
from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.acceptance.tensor_sampling import SamplingKind, kind_on_device
from yggdrasil.compiler.in_process import keep_code
from yggdrasil.engine.assembly import Assembly
from yggdrasil.engine.host_acceptance import PreparedRequest
from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.engine.trace import DecodingReport
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.policy.policy import Policy


def accepts_on_device(
    sampling: SamplingParams, speculation: Speculation, tolerance: float, *, is_captured: bool
) -> bool:
    """Return whether the target's steps can choose and accept the request's tokens.

    They can for greedy requests and, if captured, for most sampled ones. The host accepts for the others: sampled
    drafts, lossy rules, near ties, and sampling that ``kind_on_device`` does not support.
    """
    is_exact = speculation.exactness == "fast" or (speculation.exactness == "strict" and tolerance == 0)
    chooses = not sampling.needs_logits or (is_captured and kind_on_device(sampling) is not None)
    return (
        chooses
        and speculation.rule in ("match", "off")
        and speculation.expansion is None
        and is_exact
        and not speculation.audit
    )


def prepare_on_device(
    assembly: Assembly,
    prompt: Sequence[int],
    sampling: SamplingParams,
    speculation: Speculation,
    policy: Policy,
    tolerance: float,
) -> PreparedRequest:
    """Prepare a request for which ``accepts_on_device`` is true.

    Raises:
        YggdrasilError: ``logit_bias`` has a token outside the vocabulary.
    """
    check_bias(sampling, assembly.target.call.vocab_size)
    seed = sampling.seed if sampling.seed is not None else fresh_seed()
    report = DecodingReport(
        rule=speculation.rule_name, temperature=sampling.temperature, seed=None if sampling.is_greedy else seed,
        exactness=speculation.exactness, tolerance=tolerance if speculation.exactness == "strict" else None,
    )  # fmt: skip
    kind = kind_on_device(sampling) if sampling.needs_logits else None
    chosen = PLAIN_POLICY if speculation.rule == "off" else policy
    set_up = partial(_set_up, assembly, kind, sampling, seed, prompt)
    return PreparedRequest(assembly.engine, chosen, report, is_planned=chosen is policy, set_up=set_up)


def _set_up(
    assembly: Assembly, kind: SamplingKind | None, sampling: SamplingParams, seed: int, prompt: Sequence[int]
) -> None:
    target = assembly.engine.target
    if not isinstance(target, CapturedTarget):
        return
    with torch.inference_mode(False):  # inference-mode buffers could not be written outside it
        captures = target.choose_by(kind)
        if captures:  # recording runs each capture once
            assembly.forget()
            for capture in captures:
                capture.prepare()
            keep_code()
            assembly.forget()
        if kind is not None:
            target.sampling.begin(sampling, seed, prompt)
