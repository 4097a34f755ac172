"""Whether an outcome is one that a user may meet."""

import json
import re
from collections.abc import Sequence
from typing import Any

from forked import Outcome

RIGHT, REFUSED = "right output", "one sentence, exit code 2"
GOOD = (RIGHT, REFUSED)
NOTICES = ("yggdrasil: ", "  ", "\t")
PROGRESS = re.compile(r".* \d:\d\d:\d\d [-\d]:[-\d]+:[-\d]+")


def judge(outcome: Outcome, names: Sequence[str], fault_of_output: str | None, codes: Sequence[int] = (2,)) -> str:
    """RIGHT, REFUSED, or what is wrong. ``fault_of_output``: what is wrong with an output that came with exit code 0.

    ``names``: a refusal must hold one of them, whatever its case.
    """
    if outcome.hung:
        return "hang"
    if outcome.signal is not None:
        return f"signal {outcome.signal}"
    if "Traceback (most recent call last)" in outcome.err:
        return f"traceback: {outcome.err.strip().splitlines()[-1]:.160}"
    if outcome.code == 0:
        return fault_of_output or RIGHT
    if outcome.code not in codes:
        return f"exit code {outcome.code}"
    lines = [line for line in outcome.err.strip().splitlines() if line]
    if not lines:
        return "no sentence"
    said = [line for line in lines if line.startswith("yggdrasil: ")]
    stray = next((line for line in lines if not line.startswith(NOTICES) and not PROGRESS.fullmatch(line)), None)
    if not said or stray is not None:
        return f"more than a sentence: {stray or lines[0]:.160}"
    if names and not any(name.lower() in "\n".join(lines).lower() for name in names):
        return f"names neither file nor option: {said[-1]:.160}"
    return REFUSED


def wrong_tokens(out: str, reference: dict[str, list[int]], texts: dict[str, str]) -> str | None:
    """What is wrong with the lines of ``generate --json``: ``texts`` are the prompts by id."""
    found: dict[str, Any] = {}
    for line in out.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            return f"no JSON: {line:.80}"
        found[str(record["id"])] = record
    for name, text in texts.items():
        if text in reference and (name not in found or found[name].get("tokens") != reference[text]):
            return f"different tokens for the prompt {name}"
    return None
