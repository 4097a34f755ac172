"""A calibration uses the largest n-gram table that exists of its target, and says whose it is."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from made_up import write_artifacts
from tiny_pair import byte_tokenizer, random_model

from yggdrasil.artifacts import model_fingerprint
from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.statistics.known_tables import SHIPPED, announce_table, largest_table, with_larger_table
from yggdrasil.calibration.statistics.learning import LearnedStatistics
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.statistics.drafter import table_origin
from yggdrasil.drafters.statistics.portable import HIDDEN
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.scheduling.plan import Expectation, ModelRef

TABLE_TOO = StatisticsOptions()
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
        scorer(table).save(folder / SCORER_FILE)
        table.save(folder / TABLE_FILE)
        return folder

    return write


def scorer(table):
    """One that tells whose it is."""
    return replace(NGramScorer.default(with_table=True), bias=np.full(HIDDEN, float(table.num_tokens)))


@pytest.fixture
def shipped(tmp_path, monkeypatch, target):
    """Writes a table as one that comes with the package."""
    monkeypatch.setattr("yggdrasil.drafters.shipped_assets._TABLES", tmp_path / "tables")

    def write(table):
        folder = tmp_path / "tables" / model_fingerprint(target)
        folder.mkdir(parents=True)
        scorer(table).save(folder / SCORER_FILE)
        table.save(folder / TABLE_FILE)

    return write


@pytest.fixture
def taken(target):
    """What a calibration with a small table of its own ends with, and what it announces."""

    def take(options=TABLE_TOO, table=OWN, **settings):
        told = []

        def phase(title):
            told.append(title)
            return lambda fraction: None

        pair = SimpleNamespace(counts=options, target=str(target), weights="full")
        known = largest_table(SimpleNamespace(pair=pair, **{"table_tokens": None, "own_table": False, **settings}))
        announce_table(known, SimpleNamespace(phase=phase))
        counted = LearnedStatistics(scorer(OWN), table, EXPECTED, documents=[Document([0], [1, 2, 3])])
        return with_larger_table(counted, known), told

    return take


def test_the_largest_table_is_taken_with_its_belief(plan, taken):
    plan("larger", LARGER)
    plan("largest", LARGEST)
    plan("small", Table.of([([0], [1, 2])]))
    for own in (OWN, None):
        found, told = taken(table=own)

        assert found.table.num_tokens == LARGEST.num_tokens == 90
        assert np.array_equal(found.scorer.bias, scorer(LARGEST).bias)
        assert found.expected is EXPECTED
        assert not found.documents, "they are not what it counts"
        assert len(told) == 1
        assert told[0].startswith("using an n-gram table of 90 tokens from the plan largest (")
        assert found.table.origin.startswith("the plan largest (")


def test_ones_own_is_kept_where_it_counts_as_much(plan, taken):
    plan("as-large", Table.of([([0], [7, 8, 9])]))

    assert taken()[0].table is OWN


@pytest.mark.parametrize("change", [{"fingerprint": "another"}, {"weights": "q4_0"}])
def test_another_targets_table_is_not(plan, taken, change):
    plan("other", LARGER, **change)

    assert taken()[0].table is OWN


def test_nor_one_that_counts_otherwise_or_is_damaged(plan, taken):
    plan("text-alone", LARGER, StatisticsOptions(table=False))
    (plan("damaged", LARGER) / TABLE_FILE).write_bytes(b"damaged")

    assert taken()[0].table is OWN


def test_nor_any_where_none_was_asked_for(plan, taken):
    plan("larger", LARGER)

    assert taken(StatisticsOptions(table=False))[0].table is OWN
    assert taken(table_tokens=0)[0].table is OWN
    assert taken(table_tokens=0)[1] == taken(own_table=True)[1] == []
    assert taken(own_table=True)[0].table is OWN


def test_a_shipped_table_is_one_of_them_and_the_report_names_it(plan, shipped, taken, tmp_path):
    plan("larger", LARGER)
    shipped(LARGEST)
    found, told = taken()

    offered = f"an n-gram table of 90 tokens from {SHIPPED}"
    assert told == [f"using {offered}, if this calibration counts fewer (--own-table uses its own)"]
    found.save(tmp_path)
    assert table_origin(tmp_path) == f"n-gram table of 90 tokens from {SHIPPED}"
    OWN.save(tmp_path / TABLE_FILE)
    assert table_origin(tmp_path) is None


def test_a_table_that_was_taken_names_where_it_was_counted(plan, taken):
    plan("copy", LARGEST.taken_from("the plan first (box)"))

    assert taken()[0].table.origin == "the plan first (box)"
