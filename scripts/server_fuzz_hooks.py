"""Read by schemathesis: leaves of a made-up request what it needs and two fields more, and has it ask for little.

With all fields at once, one that cannot be hides all others: hardly a request would come as far as the decoder. And a
number of tokens made up is as good as none: a stream of 128 answers, each to the end of the context, goes on for hours
and is in the right, as long as somebody reads it.
"""

import random
from typing import Any

import schemathesis

NEEDED = {"messages", "prompt", "tokens", "content", "stream"}
MOST = {"max_tokens": 32, "max_completion_tokens": 32, "n": 8}


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
    return {name: _little(value, MOST.get(name)) for name, value in kept.items()}


def _little(value: Any, most: int | None) -> Any:
    """A number above ``most`` brought below it; anything else as it is, right or wrong."""
    return 1 + value % most if most is not None and type(value) is int and value > most else value
