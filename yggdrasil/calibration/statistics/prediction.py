"""Predicts the speed of decoding with model-free drafters by simulation over text."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.replay import replay
from yggdrasil.drafters.protocol import DrafterGroup
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import ModelFreePolicy, Policy
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.predictor.repetition import repeated_share
from yggdrasil.profiling.tally import Totals
from yggdrasil.scheduling.plan import Expectation


def predict_model_free(
    model_free: DrafterGroup | None, documents: Sequence[Document], costs: StepCosts
) -> list[Expectation]:
    """Simulate decoding of ``documents`` with model-free drafters, and return the expected speed of each policy.

    Args:
        model_free: the drafters; None if there are none.
        documents: prompts and the target's answers.
        costs: step costs in milliseconds, which give the time of each iteration.

    Returns:
        AAL, milliseconds per token and speed-up over plain decoding of up to three policies, in this order: the
            run-time policy (``ObjectivePolicy``), the fastest fixed verify width above 1, plain decoding. The second is
            missing if 1 is the only verify width. Without drafters there is only plain decoding.

    Raises:
        ValueError: the documents have no text to decode.
    """
    plain = Expectation("plain decoding", 1.0, costs.plain_ms, 1.0)
    if model_free is None:
        return [plain]

    def played(policy: Policy, name: str) -> Expectation:
        return expectation_of(name, replay(documents, policy, costs, model_free=model_free), costs)

    found = played(policy_without_drafter(costs), f"counts of {model_free.name}")
    fixed = [played(ModelFreePolicy(width), f"fixed verify width {width}") for width in costs.verify_widths[1:]]
    found = replace(found, repeats=round(repeated_share(documents), 3))
    return [found, *sorted(fixed, key=lambda each: each.tpot_ms)[:1], plain]


def policy_without_drafter(costs: StepCosts) -> ObjectivePolicy:
    """Return the run-time policy of a plan with model-free drafters only."""
    return ObjectivePolicy({0: costs}, {}, np.empty(0, dtype=np.float32), None)


def expectation_of(policy: str, result: Totals, costs: StepCosts) -> Expectation:
    """Return average accepted length, milliseconds per token and speed-up over plain decoding of a simulation, rounded.

    Args:
        policy: name of the simulated policy.
        result: the simulation's totals.
        costs: step costs, of which the plain step is the baseline.
    """
    per_token = result.ms_per_token
    return Expectation(policy, round(result.aal, 3), round(per_token, 4), round(costs.plain_ms / per_token, 3))
