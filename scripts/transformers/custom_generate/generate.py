"""For ``model.generate(..., custom_generate=FOLDER, trust_remote_code=True, plan="mine")``: with a streamer, too."""

from functools import cache
from typing import Any

import yggdrasil


@cache
def _opened(plan: str) -> Any:
    return yggdrasil.custom_generate(plan)


def generate(model: Any, *inputs: Any, plan: str, streamer: Any = None, **options: Any) -> Any:
    """What transformers calls in the place of its own ``generate``, before anything is prepared."""
    options.pop("custom_generate", None)
    return model.generate(*inputs, custom_generate=_opened(plan), yggdrasil_streamer=streamer, **options)
