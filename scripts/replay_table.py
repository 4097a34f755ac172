#!/usr/bin/env python3
"""Tokens a pass of model-free trees over recorded answers, with tables that know more and more of the model's answers.

    scripts/replay_table.py my/model answers.jsonl --held-out 50 --grown 100 --grown 230
    scripts/replay_table.py model.gguf answers.jsonl --prompts one_user.jsonl --chat --held-out 50 --grown 100

The answers are those of one model, as ``yggdrasil calibrate`` keeps them in ``~/.cache/yggdrasil/texts``. With
``--prompts``, the model first answers those prompts that have no answer in the file; an interrupted command goes on.
Answers are shuffled by a seed; the first are held out. Nothing is decoded or timed then: a tree of W rows grows
at every position that decoding would reach, and the answer says how many of its nodes are accepted.
"""

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer

from yggdrasil.artifacts import current_machine
from yggdrasil.calibration.own_text import Document, prompt_key, read_documents
from yggdrasil.calibration.row_writer import RowWriter, Task
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.cli import run_script
from yggdrasil.drafters.protocol import Budget
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.grown_table import with_answers
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.shipped_table import make_table, table_file
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.engine.end_tokens import end_tokens
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.native.one_thread import one_thread
from yggdrasil.prompts import encode_prompt, read_prompts
from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.kept_tensors import open_model
from yggdrasil.runtime.side_by_side import SIDE_BY_SIDE
from yggdrasil.tree.token_tree import TokenTree

_DEPTH = 12


def main(  # noqa: PLR0913
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a GGUF file.")],
    answers: Annotated[Path, typer.Argument(help="Its recorded answers, JSON lines.")],
    held_out: Annotated[int, typer.Option(min=1, help="Answers to replay.")] = 50,
    grown: Annotated[list[int], typer.Option(help="Answers that a table has counted.")] = [100],  # noqa: B006
    width: Annotated[list[int], typer.Option(help="Rows of a tree, its root included.")] = [4, 8, 16],  # noqa: B006
    seed: int = 0,
    prompts: Annotated[list[Path], typer.Option(help="Prompts of one user, JSON lines: replay only these.")] = [],  # noqa: B006
    chat: Annotated[bool, typer.Option(help="Ask the prompts as chats.")] = False,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 56,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Leave longer prompts out.")] = 320,
) -> None:
    """Print a Markdown table: which n-gram table, and the tokens a pass at every width."""
    torch.set_num_threads(1)
    if prompts:
        tokenizer = load_tokenizer(model)
        read = [prompt for file in prompts for prompt in read_prompts(file, chat=chat)]
        encoded = dict.fromkeys(tuple(encode_prompt(tokenizer, prompt)) for prompt in read)
        questions = [list(prompt) for prompt in encoded if len(prompt) <= prompt_tokens]
        answer(model, questions, answers, tokens)
        of_user = {each.prompt_key: each for each in read_documents(answers)}
        recorded = [of_user[prompt_key(prompt)] for prompt in questions]
    else:
        recorded = read_documents(answers)
    documents = [each for each in recorded if len(each.answer) > 1]
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
        tables.append((name, with_answers(shipped, own)))
    print(f"| table | {' | '.join(f'{each} rows' for each in width)} |\n|---|{'---|' * len(width)}")
    for name, table in tables:
        cells = [f"{tokens_a_pass(table, replayed, each):.2f}" for each in width]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def answer(model: str, prompts: Sequence[list[int]], file: Path, tokens: int) -> None:
    """Append the greedy answers of ``model`` to those ``prompts`` that ``file`` does not have."""
    answered = {document.prompt_key for document in read_documents(file)}
    waiting = sorted((prompt for prompt in prompts if prompt_key(prompt) not in answered), key=len)
    if not waiting:
        return
    source = Source.find(model)
    weights = usual_weights(source, "bfloat16", "cpu")
    loaded = open_model(source, torch.bfloat16, torch.device("cpu"), current_machine().cores, weights=weights)
    ends = end_tokens(str(source.folder), loaded.sizes.eos, load_tokenizer(model))
    with one_thread() if is_native() else nullcontext(), own_attention(loaded.model, SIDE_BY_SIDE):
        writer = RowWriter(loaded, ends, max(map(len, waiting)) + tokens, seed=0)
        for batch in writer.write(Task(prompt, tokens) for prompt in waiting):
            with file.open("a", encoding="utf-8") as lines:
                for each in batch:
                    lines.write(json.dumps(Document(each.task.prompt, each.tokens)._asdict()) + "\n")


def tokens_a_pass(table: Table | None, documents: Sequence[Document], width: int) -> float:
    """Tokens that become certain in a pass, the target's own among them, over all ``documents``."""
    scorer = NGramScorer.default(with_table=False) if table is None else NGramScorer.of_shipped_text()
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
