"""What the objective takes from stage samples."""

from dataclasses import replace

import pandas as pd
import pytest
from made_up import PLAIN_MS, SHAPES

from yggdrasil.calibration.measure import COLUMNS as SAMPLE_COLUMNS
from yggdrasil.calibration.measure import costs_from
from yggdrasil.calibration.settings import QUICK, Effort


def test_a_narrower_draft_step_never_costs_more():
    """Measured so, it is noise, and would make the objective draft wider trees for nothing."""
    levels = {1: 0.5, 2: 0.3, 4: 0.4}  # milliseconds a level, by width
    rows = [(64, 1, 0, 0, 1, stage, PLAIN_MS) for stage in ("plain", "iteration")]
    for width, ms in levels.items():
        for depth in (2, 4):
            shape = (width, depth, 4)
            rows.append((64, 1, *shape, "draft_steps", ms * (depth - 1)))
            rows += [(64, 1, *shape, stage, 1.0) for stage in ("head_draft", "verify", "overhead", "iteration")]
    costs = costs_from(pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS)), replace(SHAPES, verify_widths=(1, 4)))

    assert costs[0].draft_ms == pytest.approx({1: 0.3, 2: 0.3, 4: 0.4})


@pytest.mark.parametrize(
    ("max_length", "contexts"),
    [(64, [1]), (400, [128]), (2048, [128, 512, 1024]), (8192, [128, 512, 1024, 3968, 7936])],
)
def test_costs_are_measured_where_texts_get_to(max_length, contexts):
    """The nearest serve: behind a long text, the costs of a short one would promise wide passes for little."""
    assert Effort().contexts_within(max_length) == contexts
    assert QUICK.contexts_within(8192) == [128, 3968, 7936]
