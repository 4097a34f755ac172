"""The table of the shipped text: made once a tokenizer, used as soon as it is there, made again where it is damaged."""

import copy
import json
import lzma
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_pair import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers

from yggdrasil.drafters.protocol import Budget
from yggdrasil.drafters.statistics import shipped_table
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.scorer import SHAPES, NGramScorer
from yggdrasil.drafters.statistics.shipped_table import VOCABULARY, make_table, make_table_in_background, table_file
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import TABLE_FILE
from yggdrasil.tree.token_tree import TokenTree


@pytest.fixture
def short_text(tmp_path, monkeypatch):
    """Little text in the place of the package's, and a tokenizer's file."""
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(b"the cat sat on the mat. " * 50))
    monkeypatch.setattr(shipped_table, "TEXT", path)
    monkeypatch.setattr(shipped_table, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(shipped_table, "CODE_CHARACTERS", 2000)
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.backend_tokenizer.enable_padding(length=9000)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path / "tokenizer.json"


@pytest.fixture
def started(monkeypatch):
    """Processes that would have been started."""
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: commands.append(command))
    return commands


def test_the_table_counts_the_text_and_a_part_of_pythons_library(short_text):
    tokenizer = byte_tokenizer()
    make_table(short_text, table_file("x"))
    table = Table.load(table_file("x"))
    tree = TokenTree.on_host(4)
    drafter = StatisticsDrafter(NGramScorer.of_shipped_text(), table)
    drafter.begin(tokenizer("the cat s")["input_ids"])
    drafter.propose(tree, Budget(depth=3))

    assert 1200 + 500 < table.num_tokens <= 1200 + 2000  # this vocabulary lacks some characters of code
    assert "a" in tokenizer.decode(tree.tokens[1:])


def test_tables_of_other_models_are_added_in_the_tokens_of_this_one(short_text, tmp_path):
    """The other model has the same tokens under other ids, but for one."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("a dog and a doe")["input_ids"]
    missing = tokenizer("o")["input_ids"][0]
    strings = [tokenizer.decode([number]) for number in range(len(tokenizer))][::-1]
    folder = tmp_path / "tables" / "other"
    folder.mkdir(parents=True)
    Table.of([((), [len(strings) - 1 - number for number in ids])]).save(folder / TABLE_FILE)
    strings[len(strings) - 1 - missing] = None
    (folder / VOCABULARY).write_bytes(lzma.compress(json.dumps(strings).encode()))
    make_table(short_text, tmp_path / "without")
    (folder / VOCABULARY).rename(folder / "vocabulary")
    make_table(short_text, tmp_path / "text alone")
    added, own = Table.load(tmp_path / "without"), Table.load(tmp_path / "text alone")

    assert tables_equal(added, own.plus(without(Table.of([((), ids)]), missing)))


def without(table, token):
    """The table without contexts and continuations that hold ``token``."""
    ids = np.arange(token + 1000)
    ids[token] = -1
    return table.translated(ids)


def tables_equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first.tensors(), second.tensors(), strict=True))


def test_a_translated_table_is_that_of_the_translated_text():
    numbers = np.random.default_rng(0)
    text, ids = numbers.integers(0, 8, 4000), numbers.permutation(3000)[:8]
    table = Table.of([((), text)])

    assert tables_equal(table.translated(ids), Table.of([((), ids[text])]))


@pytest.mark.parametrize("starts", ["", "▁"])
def test_tokens_are_found_in_tokenizers_that_begin_a_text_with_a_space(starts):
    vocabulary = ["▁", "\n", "▁the", "the", "he", "t", "h", "e", "a", "▁a", "▁at"]
    merges = [("h", "e"), ("t", "he"), ("▁", "the"), ("▁", "a"), ("▁a", "t")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, merges))
    steps = [normalizers.Prepend(starts)] if starts else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])

    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", len(starts), 0)]
    tokenizer.decoder = decoders.Sequence(parts)

    strings = ["at", " at", "the", " the", "no", None, "e", "e"]
    assert shipped_table._ids(strings, tokenizer).tolist() == [-1, 10, 3, 2, -1, -1, 7, -1]


def test_it_is_made_by_a_process_unless_it_is_there(short_text, started):
    make_table_in_background(short_text, table_file("x"))

    ((*_, module, tokenizer, file),) = started
    assert (module, tokenizer, file) == (
        "yggdrasil.drafters.statistics.shipped_table",
        str(short_text),
        str(table_file("x")),
    )
    make_table(short_text, table_file("x"))
    make_table_in_background(short_text, table_file("x"))
    assert len(started) == 1


def test_without_a_tokenizer_file_there_is_no_table(tmp_path, started):
    make_table_in_background(tmp_path / "tokenizer.json", tmp_path / "table")
    assert started == []


def test_the_module_is_the_program_that_makes_it(short_text, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", shipped_table.__name__, str(tmp_path / "none.json"), str(tmp_path / "table")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode != 0
    assert "none.json" in done.stderr or "No such file" in done.stderr


def test_the_shipped_scorer_is_whole():
    scorer = NGramScorer.of_shipped_text()

    assert all(getattr(scorer, name).shape == shape for name, shape in SHAPES.items())
