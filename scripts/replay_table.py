#!/usr/bin/env python3
"""Tokens a pass of model-free trees over recorded answers, with tables that know more and more of the model's answers.

    scripts/replay_table.py my/model answers.jsonl --held-out 50 --grown 100 --grown 230

The answers are those of one model, as ``yggdrasil calibrate`` keeps them in ``~/.cache/yggdrasil/texts``. They are
shuffled by a seed; the first are held out. Nothing is decoded and nothing is timed: a tree of W rows is grown at every
position that decoding would reach, and the answer says how many of its nodes are accepted.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from yggdrasil.calibration.own_text import Document, read_documents
from yggdrasil.checkpoints.source import Source
from yggdrasil.cli import run_script
from yggdrasil.drafters.protocol import Budget
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.grown_table import OWN_WEIGHT
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.shipped_table import make_table, table_file
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.errors import YggdrasilError
from yggdrasil.tree.token_tree import TokenTree

_DEPTH = 12


def main(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a GGUF file.")],
    answers: Annotated[Path, typer.Argument(help="Its recorded answers, JSON lines.")],
    held_out: Annotated[int, typer.Option(min=1, help="Answers to replay.")] = 50,
    grown: Annotated[list[int], typer.Option(help="Answers that a table has counted.")] = [100],  # noqa: B006
    width: Annotated[list[int], typer.Option(help="Rows of a tree, its root included.")] = [4, 8, 16],  # noqa: B006
    seed: int = 0,
) -> None:
    """Print a Markdown table: which n-gram table, and the tokens a pass at every width."""
    torch.set_num_threads(1)
    documents = [each for each in read_documents(answers) if len(each.answer) > 1]
    if len(documents) < held_out + max(grown):
        raise YggdrasilError(f"{answers} has {len(documents)} answers; hold out or count fewer")
    random.Random(seed).shuffle(documents)
    source = Source.find(model)
    file = table_file(source.tokenizer_fingerprint())
    make_table(source.folder / "tokenizer.json", file)
    shipped, replayed, known = Table.load(file), documents[:held_out], documents[held_out:]
    tables: list[tuple[str, Table | None]] = [("none", None), ("shipped text", shipped)]
    for count in grown:
        own = Table.of(known[:count])
        name = f"and {count} answers, {own.num_tokens:,} tokens"
        tables.append((name, shipped.plus(own.times(OWN_WEIGHT)).without_rare()))
    print(f"| table | {' | '.join(f'{each} rows' for each in width)} |\n|---|{'---|' * len(width)}")
    for name, table in tables:
        cells = [f"{tokens_a_pass(table, replayed, each):.2f}" for each in width]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def tokens_a_pass(table: Table | None, documents: Sequence[Document], width: int) -> float:
    """Tokens that become certain in a pass, the target's own among them, over all ``documents``."""
    scorer = NGramScorer.usual(with_table=False) if table is None else NGramScorer.of_shipped_text()
    drafter, tree, tokens, passes = StatisticsDrafter(scorer, table), TokenTree.on_host(16), 0, 0
    for document in documents:
        drafter.begin([*document.prompt, document.answer[0]])
        certain = 1
        while certain < len(document.answer):
            drafter.propose(tree, Budget(_DEPTH))
            new = document.answer[certain : certain + 1 + _accepted(tree, width, document.answer[certain:])]
            drafter.extend(new, {})
            certain, tokens, passes = certain + len(new), tokens + len(new), passes + 1
    return tokens / passes


def _accepted(tree: TokenTree, width: int, following: Sequence[int]) -> int:
    """How many tokens of ``following`` lead down from the root through the first ``width`` nodes, the best ones."""
    rows = zip(tree.parents.tolist(), tree.tokens.tolist(), torch.isfinite(tree.scores).tolist(), strict=True)
    children = {
        (parent, token): node for node, (parent, token, exists) in enumerate(rows) if 0 < node < width and exists
    }
    node = count = 0
    for token in following:
        if (node := children.get((node, token), -1)) < 0:
            break
        count += 1
    return count


if __name__ == "__main__":
    run_script(main, "replay_table")
