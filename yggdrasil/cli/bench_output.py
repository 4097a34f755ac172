"""``yggdrasil bench``: runs the comparison of plans with plain decoding, and prints and writes the results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from yggdrasil.acceptance.sampling import GREEDY, SamplingParams
from yggdrasil.artifacts import write_atomic
from yggdrasil.bench.compare import Comparison, compare
from yggdrasil.bench.memory import memory_use
from yggdrasil.bench.record import drafter_names, provenance
from yggdrasil.bench.summary import summarise, summarise_beside, summarise_categories
from yggdrasil.cli.open_decoder import open_decoder
from yggdrasil.cli.progress import show_beside, show_categories, show_comparison, show_memory, show_summary
from yggdrasil.cli.shared_options import Dtype
from yggdrasil.compiler.compiled import Backend
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import Interrupted, YggdrasilError
from yggdrasil.prompts import Prompt
from yggdrasil.scheduling.plan import DeviceName


def open_decoders_by_name(
    plans: Sequence[str],
    dtype: Dtype | None,
    *,
    force_machine: bool,
    device: DeviceName | None = None,
    backend: Backend | None = None,
) -> dict[str, Decoder]:
    """Open a decoder for each of ``plans`` (names or files of plans, or models), and return the decoders by plan name.

    A decoder without a plan has its entry of ``plans`` as its name.

    Args:
        dtype: dtype of the models' arithmetic; None: the plan's.
        force_machine: whether plans of another machine are allowed.
        device: device of the models; None: the plan's, or without a plan a GPU if there is one.
        backend: builder of the steps; None: the default.

    Raises:
        YggdrasilError: two plans have the same name, or one cannot be opened.
    """
    found: dict[str, Decoder] = {}
    for source in plans:
        decoder = open_decoder(source, dtype, force_machine=force_machine, device=device, backend=backend)
        name = decoder.plan.name if decoder.plan else source
        if name in found:
            raise YggdrasilError(f"two plans named {name} are given with --beside; give each once")
        found[name] = decoder
    return found


def compare_with_plain(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: Mapping[str, Any],
    out: Path | None,
    *,
    imports_mb: float,
    beside: Mapping[str, Decoder] | None = None,
    sampling: SamplingParams = GREEDY,
) -> None:
    """Compare a plan with plain decoding on every prompt, print the results, and write them to ``out``.

    A line is printed per prompt, then the figures of all prompts and of each category.

    Args:
        settings: everything that affects the result, which is written to ``out``; the arguments ``max_new_tokens``,
            ``max_prompt_tokens`` and ``ignore_eos`` of ``compare`` are taken from it.
        out: JSON file; None: nothing is written.
        imports_mb: resident memory in MB before the models were loaded.
        beside: decoders of further plans of the same target, by name, which decode the same prompts alternately.
        sampling: of all requests; with a temperature it needs a seed.

    Raises:
        YggdrasilError: a decoder of ``beside`` has another target or is given twice, a prompt leaves no room to decode,
            or a step was built after the warm-up, so times are invalid.
        Interrupted: the user interrupted. Results so far, if any, are printed and written, marked as incomplete.
    """
    results = _measure(decoder, prompts, settings, beside, sampling)
    is_complete = len(results) == len(prompts)
    if not results:
        raise Interrupted("interrupted before the first prompt was compared; there is nothing to keep")
    summary, categories = summarise(results), summarise_categories(results)
    others = {
        name: {"guesses": drafter_names(other.assembly.engine), **found}
        for (name, other), found in zip((beside or {}).items(), summarise_beside(results).values(), strict=True)
    }
    memory = None if others else memory_use(decoder.assembly, imports_mb)  # unknown with several plans in one process
    show_summary(summary)
    if memory is not None:
        show_memory(memory)
    if categories:
        show_categories(categories)
    if others:
        show_beside(decoder.plan.name if decoder.plan else "the first", summary, others)
    if out is not None:
        record = {
            **provenance(),
            "complete": is_complete,
            **summary,
            **({"categories": categories} if categories else {}),
            **({"memory_mb": asdict(memory)} if memory is not None else {}),
            **({"beside": others} if others else {}),
            "plan": decoder.plan.name if decoder.plan else None,
            "guesses": drafter_names(decoder.assembly.engine),
            **settings,
            "samples": [_sample(result) for result in results],
        }
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())
    if not is_complete:
        kept = f"kept in {out}, marked as not complete" if out else "above; --json FILE would keep them"
        raise Interrupted(f"interrupted; {len(results)} of {len(prompts)} prompts were compared, {kept}")


def _measure(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: Mapping[str, Any],
    beside: Mapping[str, Decoder] | None = None,
    sampling: SamplingParams = GREEDY,
) -> list[Comparison]:
    """Print and return all comparisons, or the comparisons that were finished before an interruption."""
    results: list[Comparison] = []

    def note(result: Comparison) -> None:
        results.append(result)
        show_comparison(result)

    try:
        compare(
            decoder, prompts, settings["max_new_tokens"], note, max_prompt_tokens=settings["max_prompt_tokens"],
            ignore_eos=settings["ignore_eos"], beside=beside, sampling=sampling,
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
        "repeats": result.repeated_share,
        "divergence": asdict(result.divergence) if result.divergence else None,
        "plain": result.plain.metrics.as_dict(),
        "tree": result.tree.metrics.as_dict(),
        **({"beside": {name: _beside(other) for name, other in result.beside.items()}} if result.beside else {}),
    }


def _beside(other: Comparison) -> dict[str, Any]:
    return {
        "matched": other.matched,
        "divergence": asdict(other.divergence) if other.divergence else None,
        "tree": other.tree.metrics.as_dict(),
    }
