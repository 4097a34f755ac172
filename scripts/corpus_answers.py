#!/usr/bin/env python3
"""Let a model write answers, and pack them as the part of the shipped text that is in the register of an assistant.

    scripts/corpus_answers.py model.gguf answers.jsonl --tokens 300000
    scripts/corpus_answers.py model.gguf answers.jsonl --pack yggdrasil/assets/corpus/answers.xz

The model asks itself: it samples user turns that begin like those of the shipped prompts for calibration, and answers
them greedily. An interrupted command goes on. Check the licence of the model before its answers are published.
"""

import json
import lzma
from math import inf
from pathlib import Path
from typing import Annotated

import torch
import typer

from yggdrasil.artifacts import current_machine, write_atomic
from yggdrasil.calibration.calibration_settings import TextBudget
from yggdrasil.calibration.own_text import OwnText, read_documents
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.checkpoints.usual_weights import usual_weights
from yggdrasil.cli import run_script
from yggdrasil.cli.progress import PhaseProgress
from yggdrasil.prompts import CHAT_PROMPTS, encode_prompt, read_prompts
from yggdrasil.runtime.kept_tensors import open_model


def main(
    model: Annotated[str, typer.Argument(help="A chat model: folder, .gguf file or hub id.")],
    answers: Annotated[Path, typer.Argument(help="JSON lines of prompts and answers in token ids; it grows.")],
    tokens: Annotated[int, typer.Option(min=0, help="Write until the file has so many tokens of answers.")] = 0,
    pack: Annotated[Path | None, typer.Option(help="Write the answers as compressed text to this file.")] = None,
) -> None:
    """Write answers, or pack those that are written, or both."""
    tokenizer, source = load_tokenizer(model), Source.find(model)
    if tokens:
        prompts = [encode_prompt(tokenizer, prompt) for prompt in read_prompts(CHAT_PROMPTS, chat=True)]
        weights = usual_weights(source, "bfloat16", "cpu")
        loaded = open_model(source, torch.bfloat16, torch.device("cpu"), current_machine().cores, weights=weights)
        with PhaseProgress() as progress:
            writer = OwnText(loaded, tokenizer, prompts, answers)
            writer.write(TextBudget(inf, tokens), answers.with_suffix(".seconds"), progress.phase)
    if pack is not None:
        texts = [
            tokenizer.decode(document.answer, skip_special_tokens=True).strip() for document in read_documents(answers)
        ]
        found = [text for text in dict.fromkeys(texts) if text]  # the same question may be sampled twice
        whole = json.dumps(found, ensure_ascii=False).encode()
        write_atomic(pack, lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME))
        print(f"{pack}: {len(found):,} answers, {len(whole):,} bytes of text")


if __name__ == "__main__":
    run_script(main, "corpus_answers")
