"""``yggdrasil bench``: the plan beside plain compiled decoding, prompt by prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from yggdrasil.artifacts import write_atomic
from yggdrasil.bench.compare import Comparison, compare, summarise, summarise_categories
from yggdrasil.bench.memory import memory_use
from yggdrasil.bench.record import provenance
from yggdrasil.cli.progress import show_categories, show_comparison, show_memory, show_summary
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import Interrupted
from yggdrasil.prompts import Prompt


def compare_with_plain(
    decoder: Decoder, prompts: Sequence[Prompt], settings: Mapping[str, Any], out: Path | None, *, imports_mb: float
) -> None:
    """Print each prompt's line, the figures of all and of each category; write them with every sample to ``out``.

    ``settings`` holds what changes the result, all that ``compare`` takes among it; ``imports_mb``
    was resident before the pair was loaded.

    Raises:
        Interrupted: by the user. What was measured so far is shown and written, marked as not complete.
    """
    results = _measure(decoder, prompts, settings)
    is_complete = len(results) == len(prompts)
    if not results:
        raise Interrupted("interrupted before the first prompt was compared; there is nothing to keep")
    summary, categories = summarise(results), summarise_categories(results)
    memory = memory_use(decoder.assembly, imports_mb)
    show_summary(summary)
    show_memory(memory)
    if categories:
        show_categories(categories)
    if out is not None:
        record = {
            **provenance(),
            "complete": is_complete,
            **summary,
            **({"categories": categories} if categories else {}),
            "memory_mb": asdict(memory),
            "plan": decoder.plan.name if decoder.plan else None,
            **settings,
            "samples": [_sample(result) for result in results],
        }
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
    if not is_complete:
        kept = f"kept in {out}, marked as not complete" if out else "above; --json FILE would keep them"
        raise Interrupted(f"interrupted; {len(results)} of {len(prompts)} prompts were compared, {kept}")


def _measure(decoder: Decoder, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> list[Comparison]:
    """Every comparison that was finished: all, or those before an interruption."""
    results: list[Comparison] = []

    def note(result: Comparison) -> None:
        results.append(result)
        show_comparison(result)

    try:
        compare(
            decoder, prompts, settings["max_new_tokens"], note, max_prompt_tokens=settings["max_prompt_tokens"],
            ignore_eos=settings["ignore_eos"],
        )  # fmt: skip
    except KeyboardInterrupt:
        if len(results) == len(prompts):
            raise
    return results


def _sample(result: Comparison) -> dict[str, Any]:
    return {
        "id": result.id,
        "category": result.category,
        "matched": result.matched,
        "repeats": result.repeats,
        "divergence": asdict(result.divergence) if result.divergence else None,
        "plain": result.plain.metrics.as_dict(),
        "tree": result.tree.metrics.as_dict(),
    }
