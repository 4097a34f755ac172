"""What an EAGLE-3 head guesses of its target's answers: agreement by draft step, and the lengths that trees get.

    python scripts/measure_head.py --target MODEL --head FOLDER --prompts FILE [--chat] [--limit 20]

The target answers by its plan for this machine (one is made where there is none), whose counts stand beside the head.
Agreement is as `yggdrasil train` tells it: each step on the head's own outputs and the answer's tokens so far. Lengths
are those of whole answers, played with one tree in every iteration; nothing here is timed. With --json all is written.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from yggdrasil.artifacts import write_atomic
from yggdrasil.calibration.choose import DraftedTreePolicy
from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.record import concatenate, record_document
from yggdrasil.calibration.replay import RecordedTrees, recorded_documents, replay
from yggdrasil.cli import run_script
from yggdrasil.cli.progress import PhaseProgress
from yggdrasil.drafters.heads.convention import settled
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.loading import LoadedHead, load_head
from yggdrasil.drafters.heads.module import EagleHead
from yggdrasil.engine import decoder as engine
from yggdrasil.engine.build import assemble
from yggdrasil.engine.policy import Decision, FreeTreePolicy
from yggdrasil.errors import YggdrasilError
from yggdrasil.models.loaded import LoadedModel
from yggdrasil.models.loading import load_model
from yggdrasil.models.source import Source
from yggdrasil.pretrained import Decoder
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.prompts import encode_prompt, read_prompts, spread_over
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.training.features import Features, side_by_side
from yggdrasil.training.objective import Teacher, hits_of
from yggdrasil.training.settings import SHOWN
from yggdrasil.training.start import tables
from yggdrasil.training.unroll import unroll
from yggdrasil.training.windows import window_of
from yggdrasil.tree.objective import StepCosts, TreeShape

DEPTH, ROWS = 4, (8, 16)
SHAPES = {"chain of four": TreeShape(1, DEPTH, 1 + DEPTH), **{f"tree, {n} rows": TreeShape(4, DEPTH, n) for n in ROWS}}
WIDTHS = (1, 1 + DEPTH, *ROWS, 64)  # the last: room for what counts add to a head's tree before it is pruned
_TOGETHER = 8  # windows of a batch
COSTS = StepCosts(0.0, {1: 1.0, 4: 1.0}, dict.fromkeys(WIDTHS, 1.0), 0.0, 1.0)  # lengths alone are asked for


class Whole(DraftedTreePolicy):
    """One shape in every iteration, verified as wide as it says."""

    def prune(self, shape: TreeShape, expected: Sequence[float], context: int) -> Decision:
        return Decision(shape)


def measure(
    target: Annotated[str, typer.Option(help="Folder, .gguf file or hub id of the target.")],
    head: Annotated[Path, typer.Option(help="Folder of an EAGLE-3 head of it.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with a prompt field.")],
    chat: Annotated[bool, typer.Option("--chat", help="Plain prompts are a user's turn.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Prompts, spread over the file.")] = 20,
    tokens: Annotated[int, typer.Option(min=2 * DEPTH, help="Of an answer, at most.")] = 128,
    out: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> None:
    """Print agreement and lengths."""
    opened, _ = open_head(head, torch.float32)
    if not isinstance(opened, EagleHead):
        raise YggdrasilError(f"--head {head} is no EAGLE-3 head; give one")
    with PhaseProgress() as progress:
        decoder = Decoder.from_pretrained(target, drafter="table", chat=chat, reporter=progress)
        report = progress.phase("answering")
        documents = []
        asked = spread_over(read_prompts(prompts, chat=chat), limit)
        for number, prompt in enumerate(asked, start=1):
            encoded = encode_prompt(decoder.tokenizer, prompt)[-decoder.assembly.shapes.max_length // 2 :]
            documents.append(Document(list(encoded), list(decoder.generate(encoded, max_new_tokens=tokens).tokens)))
            report(number / len(asked))
        documents = [document for document in documents if len(document.answer) > 2 * DEPTH]
        loaded = decoder.assembly.target.loaded
        settled_head = settled(load_head(head, loaded, loaded.num_threads), loaded, Source.find(target).fingerprint())
        progress.phase("agreement")
        shares = agreement(target, opened, settled_head.layers, documents)
        traces = record(loaded, settled_head, documents, progress.phase("drafting"))
    lengths = played(traces, documents, decoder)
    show(shares, lengths, len(documents))
    if out is not None:
        figures = {"documents": len(documents), "agreement": shares[0], "best_four": shares[1], "aal": lengths}
        write_atomic(out, (json.dumps(figures, indent=1) + "\n").encode())


@torch.inference_mode()
def agreement(
    target: str, head: EagleHead, layers: Sequence[int], documents: Sequence[Document]
) -> tuple[list[float], list[float]]:
    """Of each draft step, how often the target's choice is the head's first, and how often among its first four."""
    loaded = load_model(target, torch.bfloat16, torch.device("cpu"), torch.get_num_threads(), pack=False)
    embedding, rows = tables(loaded.model, loaded.name)
    vocabulary = head.target_tokens(torch.arange(head.settings.draft_vocab_size))
    teacher = Teacher(rows[vocabulary].float(), vocabulary, loaded.vocab_size)
    hits = torch.zeros(SHOWN, 3)
    windows = [window_of(document) for document in documents]
    for start in range(0, len(windows), _TOGETHER):
        with tempfile.TemporaryDirectory() as folder:
            kept = Features(loaded, layers, Path(folder)).of("answers", windows[start : start + _TOGETHER])
            batch = side_by_side(kept)
            hits += hits_of(unroll(head, embedding.float(), batch, SHOWN), teacher, batch)
    return (hits[:, 0] / hits[:, 2]).tolist(), (hits[:, 1] / hits[:, 2]).tolist()


def record(loaded: LoadedModel, head: LoadedHead, documents: Sequence[Document], report: Any) -> TraceSet:
    """The head's trees at every place of the answers, drafted as at run time on the target's own weights."""
    longest = max(len(document.prompt) + len(document.answer) for document in documents)
    shapes = Shapes(
        max_length=longest + 2 * DEPTH, draft_widths=(1, 4), max_depth=DEPTH, candidates=4, verify_widths=WIDTHS,
        prefill_widths=(16, 128),
    )  # fmt: skip
    assembly = assemble(loaded, head, shapes, "eager")
    parts = []
    for number, document in enumerate(documents):
        parts.append(record_document(assembly, assembly.engine.drafter, *document, number))
        report((number + 1) / len(documents))
    return concatenate(parts)


def played(traces: TraceSet, documents: Sequence[Document], decoder: engine.Decoder) -> dict[str, dict[str, float]]:
    """Accepted lengths, bonus included, by shape: of the head alone, with counts in its tree, of the counts alone."""
    counts = decoder.assembly.engine.free
    recorded = recorded_documents(traces, dict(enumerate(document.prompt for document in documents)))
    found = {}
    for name, shape in SHAPES.items():
        policy = Whole(COSTS, shape)
        alone = replay(recorded, policy, COSTS, trees=RecordedTrees(traces, COSTS, None))
        both = replay(recorded, policy, COSTS, trees=RecordedTrees(traces, COSTS, counts), free=counts)
        without = replay(recorded, FreeTreePolicy(shape.verify_width), COSTS, free=counts)
        found[name] = {"head": alone.aal, "head and counts": both.aal, "counts": without.aal}
    return found


def show(shares: tuple[list[float], list[float]], lengths: dict[str, dict[str, float]], count: int) -> None:
    """Two tables."""
    steps = Table("draft step", *map(str, range(1, SHOWN + 1)), title=f"agreement on {count} answers")
    for name, row in zip(("first", "among four"), shares, strict=True):
        steps.add_row(name, *(f"{share:.3f}" for share in row))
    trees = Table("AAL", *next(iter(lengths.values())))
    for name, by_drafter in lengths.items():
        trees.add_row(name, *(f"{length:.2f}" for length in by_drafter.values()))
    for table in (steps, trees):
        Console().print(table)


if __name__ == "__main__":
    run_script(measure, "measure_head")
