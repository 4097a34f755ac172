"""Existing text to train a drafter on: chats that a model has answered, and plain text files.

The target reads such text in one forward pass per batch, which takes far less time than generating it.
"""

import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from yggdrasil.arguments import check_text
from yggdrasil.calibration.own_text import ANSWER, Document
from yggdrasil.checkpoints.tokenizer import Tokenizer
from yggdrasil.drafters.statistics.shipped_table import ANSWERS
from yggdrasil.errors import YggdrasilError
from yggdrasil.prompts import as_messages, encode_chat, encode_prompt
from yggdrasil.training.settings import CONTEXT

_SUFFIX = ".jsonl"  # of files with one conversation per line; other files are plain text
_NEEDED = "give an object with prompt and answer, or with messages that end with the assistant's"


def read_texts(files: Sequence[Path], tokenizer: Tokenizer) -> list[Document]:
    """Return the documents of ``files``, in order.

    A line of a ``.jsonl`` file is a JSON object with the strings ``prompt`` and ``answer``, or with ``messages``, of
    which the last one is the assistant's answer. Any other file is plain text in UTF-8, which is cut into documents of
    at most ``CONTEXT + ANSWER`` tokens.

    Raises:
        YggdrasilError: a file cannot be read or has no text, or a line is not such an object.
    """
    found: list[Document] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise YggdrasilError(f"--texts {file} cannot be read ({error}); give text in UTF-8") from error
        documents = list(_conversations(file, text, tokenizer) if file.suffix == _SUFFIX else _pieces(text, tokenizer))
        if not documents:
            raise YggdrasilError(f"--texts {file} has no text; give another file")
        found += documents
    return found


def read_shipped_answers(tokenizer: Tokenizer) -> list[Document]:
    """Return the chat model's answers that the package includes, concatenated and cut into documents."""
    return list(_pieces("\n\n".join(json.loads(lzma.decompress(ANSWERS.read_bytes()))), tokenizer))


def _conversations(file: Path, text: str, tokenizer: Tokenizer) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield _conversation(json.loads(line), tokenizer)
            except (YggdrasilError, ValueError, RecursionError) as error:
                raise YggdrasilError(f"--texts {file}, line {number}: {error}; {_NEEDED}") from error


def _conversation(record: Any, tokenizer: Tokenizer) -> Document:
    """Return the document of a parsed line. Of a chat, the prompt ends where the template begins the answer."""
    record = record if isinstance(record, dict) else {}
    if "messages" in record:
        *before, last = as_messages(record["messages"])
        if last.role != "assistant" or not before:
            raise YggdrasilError("the messages do not end with an answer of the assistant")
        prompt, answer = encode_chat(tokenizer, before), last.content
    else:
        given, answer = record.get("prompt"), record.get("answer")
        if not isinstance(given, str) or not isinstance(answer, str):
            raise YggdrasilError("it has no strings prompt and answer")
        check_text("the answer", answer)
        prompt = encode_prompt(tokenizer, given)
    return Document(prompt, tokenizer.encode(answer, add_special_tokens=False))


def _pieces(text: str, tokenizer: Tokenizer) -> Iterator[Document]:
    """Cut plain text into documents of ``CONTEXT`` prompt and ``ANSWER`` answer tokens.

    In a shorter last document, the prompt is at most half of the tokens. A last document of one token is dropped.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False)
    length = CONTEXT + ANSWER
    for start in range(0, len(tokens), length):
        piece = tokens[start : start + length]
        prompt = min(CONTEXT, len(piece) // 2)
        if prompt:
            yield Document(piece[:prompt], piece[prompt:])
