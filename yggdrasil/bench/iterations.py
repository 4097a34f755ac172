"""Measures the time of iterations by stage."""

from collections.abc import Sequence

import pandas as pd

from yggdrasil.engine.decoder import Decoder
from yggdrasil.engine.trace import MODEL_STAGES


def time_by_stage(decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> pd.DataFrame:
    """Return milliseconds per iteration by stage, and their share of the decoding time.

    Every prompt is decoded twice; the first time warms up. Columns are ``stage``, ``part`` ("model" or "overhead"),
    ``ms_an_iteration`` and ``share``.
    """
    totals: dict[str, float] = {}
    iterations, decode_ms = 0, 0.0
    for is_counted in (False, True):
        for prompt in prompts:
            metrics = decoder.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True).metrics
            if not is_counted:
                continue
            iterations += metrics.iterations
            decode_ms += metrics.tpot_ms * (metrics.aal * metrics.iterations)
            for stage, ms in metrics.stage_ms.items():
                totals[stage] = totals.get(stage, 0.0) + ms
    totals["between stages"] = decode_ms - sum(totals.values())
    return pd.DataFrame(
        {
            "stage": list(totals),
            "part": ["model" if stage in MODEL_STAGES else "overhead" for stage in totals],
            "ms_an_iteration": [ms / max(iterations, 1) for ms in totals.values()],
            "share": [ms / decode_ms if decode_ms else 0.0 for ms in totals.values()],
        }
    )
