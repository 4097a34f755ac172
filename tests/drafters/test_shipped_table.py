"""The table of the shipped text: made once a tokenizer, used as soon as it is there, made again where it is damaged."""

import copy
import json
import lzma
import subprocess
import sys
import threading

import pytest
from tiny_pair import byte_tokenizer

from yggdrasil.artifacts.lock import locked
from yggdrasil.drafters.protocol import Budget
from yggdrasil.drafters.statistics import shipped_table
from yggdrasil.drafters.statistics.contexts import table_key
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter
from yggdrasil.drafters.statistics.scorer import SHAPES, NGramScorer
from yggdrasil.drafters.statistics.shipped_table import ANSWERS_WEIGHT, make_table, make_table_in_background, table_file
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.tree.token_tree import TokenTree


@pytest.fixture
def short_text(tmp_path, monkeypatch):
    """Little text in the place of the package's, and a tokenizer's file."""
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(b"the cat sat on the mat. " * 50))
    monkeypatch.setattr(shipped_table, "TEXT", path)
    answers = tmp_path / "answers.xz"
    answers.write_bytes(lzma.compress(json.dumps(["Dogs bark.", "Dogs bite."]).encode()))
    monkeypatch.setattr(shipped_table, "ANSWERS", answers)
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


def test_answers_of_chat_models_count_more_than_other_text(short_text, tmp_path):
    answers = ["Dogs bark.", "Dogs bite."]
    make_table(short_text, tmp_path / "with")
    shipped_table.ANSWERS.write_bytes(lzma.compress(b"[]"))
    make_table(short_text, tmp_path / "without")
    own = Table.of(((), byte_tokenizer()(answer)["input_ids"]) for answer in answers)
    both, alone = Table.load(tmp_path / "with"), Table.load(tmp_path / "without")

    assert both.num_tokens == alone.num_tokens + ANSWERS_WEIGHT * own.num_tokens
    (before_dogs,) = own.totals[own.keys == table_key(byte_tokenizer()("og")["input_ids"])]
    rows = [
        int(each.totals[each.keys == table_key(byte_tokenizer()("og")["input_ids"])].sum()) for each in (both, alone)
    ]
    assert rows[0] - rows[1] == ANSWERS_WEIGHT * before_dogs == ANSWERS_WEIGHT * 2


def test_a_table_that_another_process_writes_is_waited_for(short_text, tmp_path, monkeypatch):
    file, waits = tmp_path / "table", threading.Event()
    monkeypatch.setattr(shipped_table, "tell", lambda sentence: waits.set())
    second = threading.Thread(target=make_table, args=(short_text, file))
    with locked(file.with_suffix(".lock"), "a test"):
        second.start()
        assert waits.wait(60)
        file.write_bytes(b"written")
    second.join()

    assert file.read_bytes() == b"written"


def test_the_shipped_answers_are_text_of_a_size():
    answers = json.loads(lzma.decompress(shipped_table.ANSWERS.read_bytes()))

    assert all(isinstance(answer, str) and answer.strip() for answer in answers)
    assert sum(map(len, answers)) > 900_000
    assert not any("<|im_end|>" in answer for answer in answers)


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
