"""A calibration takes the largest table that any plan of the target has, and nothing else of that plan."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from made_up import write_artifacts
from tiny_pair import byte_tokenizer, random_model

from yggdrasil.artifacts import model_fingerprint
from yggdrasil.calibration.counted import Counted
from yggdrasil.calibration.elsewhere import with_largest_table
from yggdrasil.calibration.job import Job
from yggdrasil.calibration.own_text import Document
from yggdrasil.drafters.belief import Belief
from yggdrasil.drafters.counted import HIDDEN
from yggdrasil.drafters.counts import BELIEF_FILE, TABLE_FILE
from yggdrasil.drafters.options import CountsOptions
from yggdrasil.drafters.table import Table
from yggdrasil.scheduling.plan import Expectation, ModelRef

TABLE_TOO = CountsOptions()
OWN = Table.of([([0], [1, 2, 3])])
LARGER = Table.of([([0], list(range(50)))])
LARGEST = Table.of([([0], list(range(90)))])
EXPECTED = [Expectation("counts of text + table", 2.0, 1.0, 1.5)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere") / "target"
    random_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def plan(tmp_path, monkeypatch, target):
    """Writes a plan of a table; what is changed of its target makes it another's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans").mkdir()

    def write(name, table, options=TABLE_TOO, **changes):
        parts = {"source": "elsewhere", "fingerprint": model_fingerprint(target), "threads": 1, **changes}
        write_artifacts(tmp_path, name, target=ModelRef(**parts), drafters=[options])
        folder = next((tmp_path / "predictors" / name).iterdir())
        belief(table).save(folder / BELIEF_FILE)
        table.save(folder / TABLE_FILE)
        return folder

    return write


def belief(table):
    """One that tells whose it is."""
    return replace(Belief.usual(with_table=True), bias=np.full(HIDDEN, float(table.num_tokens)))


@pytest.fixture
def taken(target):
    """What is counted by a calibration that has a small table of its own; and what it says."""

    def take(options=TABLE_TOO, table_tokens=None, table=OWN):
        told = []

        def phase(title):
            told.append(title)
            return lambda fraction: None

        pair = SimpleNamespace(counts=options, target=str(target), weights="full")
        settings = SimpleNamespace(table_tokens=table_tokens)
        job = Job(settings, pair, None, None, [], None, SimpleNamespace(phase=phase))
        return with_largest_table(
            job, Counted(belief(OWN), table, EXPECTED, documents=[Document([0], [1, 2, 3])])
        ), told

    return take


def test_the_largest_table_is_taken_with_its_belief(plan, taken):
    plan("larger", LARGER)
    plan("largest", LARGEST)
    plan("small", Table.of([([0], [1, 2])]))
    for own in (OWN, None):
        found, told = taken(table=own)

        assert found.table.num_tokens == LARGEST.num_tokens == 90
        assert np.array_equal(found.belief.bias, belief(LARGEST).bias)
        assert found.expected is EXPECTED
        assert not found.documents, "they are not what it counts"
        assert len(told) == 1
        assert told[0].startswith("taking the table of largest (")
        assert told[0].endswith("), of 90 tokens")


def test_ones_own_is_kept_where_it_counts_as_much(plan, taken):
    plan("as-large", Table.of([([0], [7, 8, 9])]))
    found, told = taken()

    assert found.table is OWN
    assert told == []


@pytest.mark.parametrize("change", [{"fingerprint": "another"}, {"weights": "q4_0"}])
def test_another_targets_table_is_not(plan, taken, change):
    plan("other", LARGER, **change)

    assert taken()[0].table is OWN


def test_nor_one_that_counts_otherwise_or_is_damaged(plan, taken):
    plan("recycling", LARGER, CountsOptions(recycling=True))
    plan("text-alone", LARGER, CountsOptions(table=False))
    (plan("damaged", LARGER) / TABLE_FILE).write_bytes(b"damaged")

    assert taken()[0].table is OWN
    assert taken(CountsOptions(recycling=True))[0].table.num_tokens == 50


def test_nor_any_where_none_was_asked_for(plan, taken):
    plan("larger", LARGER)

    assert taken(CountsOptions(table=False))[0].table is OWN
    assert taken(table_tokens=0)[0].table is OWN
