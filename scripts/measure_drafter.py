"""What a head or a draft model guesses of its target's answers, and the lengths that trees get.

    python scripts/measure_drafter.py --target MODEL --drafter HEAD --prompts FILE [--chat] [--limit 20]

The target answers by its plan for this machine (one is made where there is none), whose counts stand beside the
drafter. What drafts by the target's output layer does so among the most frequent tokens, as after a calibration. A
chain is the drafter's first guess, its first guess after that, and so on: the share that stands is told, where those
before it do. Of heads agreement is told too, as `yggdrasil train` tells it, but behind whole prompts and of all tokens
that the head can draft: each step on what it has of the answer's tokens so far. Lengths are those of whole answers,
played with one tree in every iteration; nothing here is timed. With --json all is written.
"""

import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from yggdrasil.artifacts import write_atomic
from yggdrasil.calibration.choose import DraftedTreePolicy
from yggdrasil.calibration.draft_vocabulary import Frequent
from yggdrasil.calibration.own_text import Document, read_documents, text_file
from yggdrasil.calibration.record import concatenate, record_document
from yggdrasil.calibration.replay import RecordedTrees, recorded_documents, replay
from yggdrasil.checkpoints.facts import check_same_tokenizer, load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.cli import checks, run_script
from yggdrasil.cli.progress import PhaseProgress
from yggdrasil.drafters.heads.block.config import BlockSettings
from yggdrasil.drafters.heads.convention import settled
from yggdrasil.drafters.heads.draft_vocabulary import DRAFT_VOCABULARY, Vocabulary
from yggdrasil.drafters.heads.eagle.eagle3 import EagleHead
from yggdrasil.drafters.heads.eagle.state_head import StateHead
from yggdrasil.drafters.heads.files import open_head
from yggdrasil.drafters.heads.kinds import is_head, kind_of
from yggdrasil.drafters.heads.loading import LoadedHead, load_head
from yggdrasil.drafters.heads.medusa.files import open_medusa
from yggdrasil.drafters.heads.medusa.module import MedusaHeads
from yggdrasil.drafters.heads.mtp.files import open_mtp
from yggdrasil.drafters.shipped_assets import whole_name
from yggdrasil.engine import decoder as engine
from yggdrasil.engine.assembly import assemble
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.fixed import ModelFreePolicy
from yggdrasil.policy.objective import Decision
from yggdrasil.pretrained import Decoder
from yggdrasil.profiling.traces import TraceSet
from yggdrasil.prompts import encode_prompt, read_prompts, spread_over
from yggdrasil.runtime.loaded import LoadedModel
from yggdrasil.runtime.loading import load_model
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.training.features import Features, side_by_side
from yggdrasil.training.medusa import medusa_steps
from yggdrasil.training.objective import Teacher, hits_of
from yggdrasil.training.settings import SHOWN
from yggdrasil.training.target_head import target_embedding, target_head
from yggdrasil.training.unroll import unroll
from yggdrasil.training.windows import Window
from yggdrasil.tree.shape import TreeShape

DEPTH, WIDTH, ROWS = 4, 4, (8, 16)
CHAIN, TREES = TreeShape(1, DEPTH, 1 + DEPTH), {f"tree, {n} rows": TreeShape(WIDTH, DEPTH, n) for n in ROWS}
WIDTHS = (1, 1 + DEPTH, *ROWS, 64)  # the last: room for what counts add to a head's tree before it is pruned
_TOGETHER = 8  # windows of a batch
COSTS = StepCosts(0.0, {1: 1.0, WIDTH: 1.0}, dict.fromkeys(WIDTHS, 1.0), 0.0, 1.0)  # lengths alone are asked for


class Whole(DraftedTreePolicy):
    """One shape in every iteration, verified as wide as it says."""

    def prune(self, decision: Decision, expected: Sequence[float], context: int) -> Decision:
        return decision


def measure(
    target: Annotated[str, typer.Option(help="Folder, .gguf file or hub id of the target.")],
    drafter: Annotated[str, typer.Option(help="A head of it, as calibrate names one, or a draft model's folder.")],
    prompts: Annotated[Path, typer.Option(callback=checks.input_file, help="JSON lines with a prompt field.")],
    chat: Annotated[bool, typer.Option("--chat", help="Plain prompts are a user's turn.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Prompts, spread over the file.")] = 20,
    tokens: Annotated[int, typer.Option(min=2 * DEPTH + 1, help="Of an answer, at most.")] = 128,
    out: Annotated[
        Path | None, typer.Option("--json", callback=checks.output_file, help="File for all figures.")
    ] = None,
) -> None:
    """Print shares and lengths."""
    asked, folder = spread_over(read_prompts(prompts, chat=chat), limit), Path(whole_name(drafter))
    if not is_head(str(folder)):
        check_same_tokenizer(*map(load_tokenizer, (Source.find(target), Source.find(str(folder)))), (target, drafter))
    with PhaseProgress() as progress:
        decoder = Decoder.from_pretrained(target, drafter="table", chat=chat, reporter=progress)
        report = progress.phase("answering")
        documents = []
        for number, prompt in enumerate(asked, start=1):
            encoded = encode_prompt(decoder.tokenizer, prompt)[-decoder.assembly.shapes.max_length // 2 :]
            documents.append(Document(list(encoded), list(decoder.generate(encoded, max_new_tokens=tokens).tokens)))
            report(number / len(asked))
        documents = [document for document in documents if len(document.answer) > 2 * DEPTH]
        if not documents:
            raise YggdrasilError(f"no answer has more than {2 * DEPTH} tokens; give other --prompts, or more --tokens")
        loaded = decoder.assembly.target.loaded
        among = frequent(decoder) if is_head(str(folder)) else None
        second = opened_beside(loaded, target, folder, among)
        chains = record(loaded, second, 1, documents, progress.phase("drafting chains"))
        trees = record(loaded, second, WIDTH, documents, progress.phase("drafting trees"))
        shares = {"a chain's guess stands": standing(chains)}
        if isinstance(second, LoadedHead) and not isinstance(second.settings, BlockSettings):  # training knows none
            progress.phase("agreement")
            shares |= agreement(target, folder, second.layers, documents, among)
    lengths = {"chain of four": played(chains, CHAIN, documents, decoder)}
    lengths |= {name: played(trees, shape, documents, decoder) for name, shape in TREES.items()}
    show(shares, lengths, len(documents))
    if out is not None:
        figures = {"documents": len(documents), "shares": shares, "aal": lengths}
        write_atomic(out, (json.dumps(figures, indent=1) + "\n").encode())


def frequent(decoder: engine.Decoder) -> Vocabulary | None:
    """The target's most frequent tokens, if its own text tells which they are."""
    plan, size = decoder.plan, decoder.assembly.target.loaded.vocab_size
    assert plan is not None, "it was opened by one"
    documents = read_documents(text_file(plan.target.fingerprint, plan.target.weights), size)
    found = Frequent(documents, size, DRAFT_VOCABULARY)
    return found.vocabulary if found.is_enough else None


def opened_beside(
    loaded: LoadedModel, target: str, drafter: Path, among: Vocabulary | None = None
) -> LoadedHead | LoadedModel:
    """The drafter as decoding has it: by the target's output layer, where it reads that, ``among`` those tokens."""
    if is_head(str(drafter)):
        head = load_head(drafter, loaded, loaded.num_threads)
        if among is not None and head.drafts_by_targets_output:
            head = load_head(drafter, loaded, loaded.num_threads, among)
        return settled(head, loaded, Source.find(target).fingerprint())
    weights = usual_weights(str(drafter), "bfloat16", "cpu")
    return load_model(str(drafter), loaded.dtype, loaded.device, loaded.num_threads, weights=weights)


def standing(traces: TraceSet) -> list[float]:
    """Of each level of a chain, the share of its guesses that stand where those before them do."""
    lengths = traces.accepted_length(*CHAIN)
    kept = [float((lengths >= level).sum()) for level in range(DEPTH + 1)]
    return [after / before if before else 0.0 for before, after in pairwise(kept)]


@torch.inference_mode()
def agreement(
    target: str, folder: Path, layers: Sequence[int], documents: Sequence[Document], among: Vocabulary | None = None
) -> dict[str, list[float]]:
    """Of each draft step, how often the target's choice is the head's first guess, and how often among four.

    What drafts by the target's output layer does so ``among`` those tokens.
    """
    head, own = opened(folder)
    loaded = load_model(target, torch.bfloat16, torch.device("cpu"), torch.get_num_threads(), pack=False)
    vocabulary = head.target_tokens(torch.arange(head.settings.draft_vocab_size))
    if among is not None and isinstance(head, StateHead):
        vocabulary = among.tokens
    teacher = Teacher.of(loaded, vocabulary)
    embedding = target_embedding(loaded).float() if own is None else own
    says = target_head(loaded).of(vocabulary).logits if isinstance(head, StateHead) else None
    parts = []
    windows = [Window([*prompt, *answer], 0, len(prompt)) for prompt, answer in documents]  # all that decoding reads
    for start in range(0, len(windows), _TOGETHER):
        with tempfile.TemporaryDirectory() as scratch:
            features = Features(loaded, layers if isinstance(head, EagleHead) else (), Path(scratch))
            batch = side_by_side(features.of("answers", windows[start : start + _TOGETHER]))
            if isinstance(head, MedusaHeads):
                steps = medusa_steps(head, batch, SHOWN)  # as many as it has
            else:
                states = batch.last if isinstance(head, StateHead) else batch.states
                steps = unroll(head, embedding, batch._replace(states=states), SHOWN, says)
            parts.append(hits_of(steps, teacher, batch))
    hits = torch.stack(parts).sum(0)
    return {
        "agreement": (hits[:, 0] / hits[:, 2]).tolist(),
        "agreement, among four": (hits[:, 1] / hits[:, 2]).tolist(),
    }


def opened(folder: Path) -> tuple[EagleHead | MedusaHeads | StateHead, Tensor | None]:
    """The head in float32, and the embedding that it learned with, where it brings one."""
    kind = kind_of(folder)
    if kind == "medusa":
        return open_medusa(folder, torch.float32), None
    return (open_mtp(folder, torch.float32), None) if kind == "mtp" else open_head(folder, torch.float32)


def record(
    loaded: LoadedModel, second: LoadedHead | LoadedModel, width: int, documents: Sequence[Document], report: Any
) -> TraceSet:
    """The drafter's trees at every place of the answers, drafted as at run time on the target's own weights.

    A node offers as many guesses as a tree is wide: of a width of one, a chain.
    """
    longest = max(len(document.prompt) + len(document.answer) for document in documents)
    shapes = Shapes(
        max_length=longest + 2 * DEPTH, draft_widths=(width,), max_depth=DEPTH, candidates=width, verify_widths=WIDTHS,
        prefill_widths=(16, 128),
    )  # fmt: skip
    assembly = assemble(loaded, second, shapes, "eager")
    parts = []
    for number, document in enumerate(documents):
        parts.append(record_document(assembly, assembly.engine.drafter, *document, number))
        report((number + 1) / len(documents))
    return concatenate(parts)


def played(
    traces: TraceSet, shape: TreeShape, documents: Sequence[Document], decoder: engine.Decoder
) -> dict[str, float]:
    """Accepted lengths, bonus included: of the drafter, of it with counts in its tree, of the counts."""
    counts, policy = decoder.assembly.engine.model_free, Whole(COSTS, shape)
    recorded = recorded_documents(traces, dict(enumerate(document.prompt for document in documents)))
    alone = replay(recorded, policy, COSTS, trees=RecordedTrees(traces, COSTS, None))
    both = replay(recorded, policy, COSTS, trees=RecordedTrees(traces, COSTS, counts), model_free=counts)
    without = replay(recorded, ModelFreePolicy(shape.verify_width), COSTS, model_free=counts)
    return {"drafter": alone.aal, "drafter and counts": both.aal, "counts": without.aal}


def show(shares: dict[str, list[float]], lengths: dict[str, dict[str, float]], count: int) -> None:
    """Two tables."""
    steps = Table("draft step", *map(str, range(1, SHOWN + 1)), title=f"of {count} answers")
    for name, row in shares.items():
        steps.add_row(name, *(f"{share:.3f}" for share in row))
    trees = Table("AAL", *next(iter(lengths.values())))
    for name, by_drafter in lengths.items():
        trees.add_row(name, *(f"{length:.2f}" for length in by_drafter.values()))
    for table in (steps, trees):
        Console().print(table)


if __name__ == "__main__":
    run_script(measure, "measure_drafter")
