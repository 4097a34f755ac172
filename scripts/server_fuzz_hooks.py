"""Read by schemathesis: leaves of a made-up request what it needs and two fields more.

With all of them at once, one that cannot be hides all others: hardly a request would come as far as the decoder.
"""

import random
from typing import Any

import schemathesis

NEEDED = {"messages", "prompt", "tokens", "content", "stream"}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """The fields are chosen by what the body is, so that a failure can be had again."""
    if not isinstance(body, dict):
        return body
    others = sorted(set(body) - NEEDED - {"model"})
    chosen = random.Random(repr(sorted(body, key=str))).sample(others, min(2, len(others)))
    kept = {name: value for name, value in body.items() if name in NEEDED or name in chosen}
    if "messages" in body or "prompt" in body:
        kept.setdefault("max_tokens", 8)
    return kept
