"""``yggdrasil bench``: the plan beside plain compiled decoding, prompt by prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from yggdrasil.artifacts import write_atomic
from yggdrasil.bench.compare import compare, summarise, summarise_categories
from yggdrasil.bench.memory import memory_use
from yggdrasil.bench.record import provenance
from yggdrasil.cli.progress import show_categories, show_comparison, show_memory, show_summary
from yggdrasil.engine.decoder import Decoder
from yggdrasil.prompts import Prompt


def compare_with_plain(
    decoder: Decoder, prompts: Sequence[Prompt], settings: Mapping[str, Any], out: Path | None, *, imports_mb: float
) -> None:
    """Print each prompt's line, the figures of all and of each category; write them with every sample to ``out``.

    ``settings`` holds what changes the result, ``max_new_tokens`` and ``max_prompt_tokens`` among it; ``imports_mb``
    was resident before the pair was loaded.
    """
    results = compare(
        decoder,
        prompts,
        settings["max_new_tokens"],
        show_comparison,
        max_prompt_tokens=settings["max_prompt_tokens"],
    )
    summary, categories = summarise(results), summarise_categories(results)
    memory = memory_use(decoder.assembly, imports_mb)
    show_summary(summary)
    show_memory(memory)
    if categories:
        show_categories(categories)
    if out is None:
        return
    record = {
        **provenance(),
        **summary,
        **({"categories": categories} if categories else {}),
        "memory_mb": asdict(memory),
        "plan": decoder.plan.name if decoder.plan else None,
        **settings,
        "samples": [
            {
                "id": result.id,
                "matched": result.matched,
                "divergence": asdict(result.divergence) if result.divergence else None,
                "plain": result.plain.metrics.as_dict(),
                "tree": result.tree.metrics.as_dict(),
            }
            for result in results
        ],
    }
    write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
