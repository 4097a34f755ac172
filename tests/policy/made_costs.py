"""Costs that tests of the objective and of the costs decide by."""

import numpy as np

from yggdrasil.policy.costs import StepCosts

COSTS = StepCosts(
    head_ms=1.0, draft_ms={1: 0.5, 2: 0.75}, verify_ms={1: 4.0, 2: 4.0, 4: 5.0, 8: 9.0}, overhead_ms=0.25, plain_ms=4.5
)


def random_costs(random: np.random.Generator) -> StepCosts:
    verify = np.sort(random.uniform(2.0, 12.0, size=4)).tolist()
    draft = random.uniform(0.1, 1.0, size=3).tolist()
    return StepCosts(
        head_ms=random.uniform(0.1, 2.0),
        draft_ms=dict(zip((1, 2, 4), draft, strict=True)),
        verify_ms=dict(zip((1, 2, 4, 8), verify, strict=True)),
        overhead_ms=random.uniform(0.0, 1.0),
        plain_ms=random.uniform(1.0, 12.0),
    )


def costs_of(verify_ms):
    return StepCosts(head_ms=0.0, draft_ms={1: 0.1}, verify_ms=verify_ms, overhead_ms=0.0, plain_ms=1.0)
