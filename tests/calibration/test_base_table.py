"""A calibration adds the counts of its own text to a table of shipped text, and says so."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_pair import byte_tokenizer, random_model

from yggdrasil.artifacts import model_fingerprint
from yggdrasil.calibration import pipeline
from yggdrasil.calibration.calibration_settings import QUICK, CalibrationSettings, PairSource
from yggdrasil.calibration.own_text import Document
from yggdrasil.calibration.statistics import base_table as base_tables
from yggdrasil.calibration.statistics import model_free
from yggdrasil.calibration.statistics.base_table import BaseTable, base_table, count_documents
from yggdrasil.calibration.statistics.learning import fit_statistics
from yggdrasil.calibration.statistics.scorer_fit import fit_scorer
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.protocol import group_of
from yggdrasil.drafters.statistics import shipped_table
from yggdrasil.drafters.statistics.contexts import HIDDEN, table_key
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter, table_origin
from yggdrasil.drafters.statistics.grown_table import OWN_WEIGHT
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.policy.costs import StepCosts
from yggdrasil.scheduling.plan import Shapes

COSTS = StepCosts(0.01, {}, {1: 1.0, 2: 1.02, 4: 1.1, 8: 1.2}, overhead_ms=0.02, plain_ms=1.02)
TABLE_TOO = StatisticsOptions()
SHIPPED = Table.of([([0], list(range(90)))])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere") / "target"
    random_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def found(target, monkeypatch, tmp_path):
    """Returns the base table of a calibration and what it announces."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("yggdrasil.drafters.shipped_assets._TABLES", tmp_path / "tables")
    monkeypatch.setattr(shipped_table, "CODE_CHARACTERS", 2000)

    def find(options=TABLE_TOO, weights="full", num_bytes=shipped_table.LEAST_BYTES, *, own_table=False):
        titles = []

        def phase(title):
            titles.append(title)
            return lambda fraction: None

        pair = SimpleNamespace(counts=options, target=str(target), weights=weights)
        loaded = SimpleNamespace(tensors={"weight": torch.empty(num_bytes, dtype=torch.uint8, device="meta")})
        settings = SimpleNamespace(pair=pair, own_table=own_table)
        return base_table(settings, loaded, SimpleNamespace(phase=phase)), titles

    return find


@pytest.fixture
def shipped(target, tmp_path):
    folder = tmp_path / "tables" / model_fingerprint(target)
    folder.mkdir(parents=True)
    NGramScorer.default(with_table=True).save(folder / SCORER_FILE)
    SHIPPED.save(folder / TABLE_FILE)


def test_a_models_own_shipped_table_comes_first(found, shipped, monkeypatch):
    base, titles = found()

    assert np.array_equal(base.table.keys, SHIPPED.keys)
    assert np.array_equal(base.scorer.bias, NGramScorer.default(with_table=True).bias)
    assert base.table.origin == "90 tokens of shipped answers of this model"
    assert titles == [f"the n-gram table starts from {base.table.origin} (--own-table leaves that out)"]
    of_text = Table.of([([0], list(range(50)))])
    monkeypatch.setattr(base_tables, "make_table", lambda tokenizer, file: of_text.save(file))
    base, titles = found(weights="q4_0")  # weights that are rounded further give other answers
    assert base.table.num_tokens == 50
    assert titles[0].endswith("tokens of shipped text (--own-table leaves that out)")


def test_other_models_start_from_the_shipped_text_in_their_own_tokens(found):
    base, _ = found()
    again, _ = found()

    assert base.table.num_tokens > 100_000
    assert np.array_equal(base.table.counts, again.table.counts)
    assert np.array_equal(base.scorer.bias, NGramScorer.of_shipped_text().bias)


@pytest.mark.parametrize(
    "without",
    [
        {"options": StatisticsOptions(table=False)},
        {"options": None},
        {"own_table": True},
        {"num_bytes": shipped_table.LEAST_BYTES - 1},
    ],
)
def test_there_is_none_where_none_is_asked_for_or_passes_are_short(found, without):
    assert found(**without) == (None, [])


def test_the_text_that_is_counted_first_is_waited_for(found, monkeypatch, target):
    monkeypatch.setattr(base_tables, "make_table", lambda tokenizer, file: SHIPPED.save(file))

    assert found()[0].table.num_tokens == 90


def documents(seed=0):
    generator = np.random.default_rng(seed)
    phrases = generator.integers(0, 60, (12, 9)).tolist()
    return [
        Document([100, 100 + i], [token for phrase in generator.choice(12, 8) for token in phrases[phrase]])
        for i in range(60)
    ]


def test_own_text_is_added_with_its_weight_and_the_report_names_both(tmp_path):
    own, base = documents(), BaseTable(NGramScorer.of_shipped_text(), SHIPPED.with_origin("90 tokens of a book"))
    learned = fit_statistics(own, COSTS, with_table=True, base=base)
    key = table_key((5,))
    shipped_total = int(SHIPPED.totals[SHIPPED.keys == key].sum())
    own_total = sum(token == 5 for each in own for token in each.answer[:-1])

    assert learned.table.totals[learned.table.keys == key] == shipped_total + OWN_WEIGHT * own_total
    learned.save(tmp_path)
    num_tokens = sum(len(each.answer) for each in own)
    assert (
        table_origin(tmp_path) == f"n-gram table of 90 tokens of a book and {num_tokens:,} tokens that the target wrote"
    )
    alone = fit_statistics(own, COSTS, with_table=True)
    assert alone.table.totals[alone.table.keys == key] == own_total
    alone.save(tmp_path)
    assert table_origin(tmp_path) is None


def test_the_prediction_and_a_fair_evaluation_read_the_shipped_text_too():
    """All of the text is in the shipped table, and none of it in what the target wrote."""
    own = [Document([100, i], np.random.default_rng(i).integers(0, 5000, 80).tolist()) for i in range(60)]
    base = BaseTable(NGramScorer.of_shipped_text(), Table.of(own * 3))

    with_base = fit_statistics(own, COSTS, with_table=True, base=base)
    assert with_base.expected[0].aal > 1.5 > fit_statistics(own, COSTS, with_table=True).expected[0].aal
    drafter = with_base.drafter_without(own)
    drafter.begin([*own[0].prompt, *own[0].answer[:5]])
    assert own[0].answer[5] in drafter.features(())[:, 0].tolist()


def test_a_scorer_that_is_not_fitted_is_the_one_of_the_shipped_text():
    mark = NGramScorer.of_shipped_text()
    mark = type(mark)(**{**vars(mark), "bias": np.full(HIDDEN, 7.0)})

    assert fit_scorer(documents()[:3], with_table=True, base=BaseTable(mark, SHIPPED)) is mark
    assert count_documents([], None).num_tokens == 0


def test_a_calibration_adds_its_text_to_the_base_table(monkeypatch, tmp_path):
    """From the first line of a calibration to what its plan records, with measuring and generating left out."""
    own, base, known = documents(), BaseTable(NGramScorer.of_shipped_text(), SHIPPED.with_origin("a book")), []

    class ChoosingError(Exception):
        """The statistics are fitted."""

    def choose(job, counted, costs):
        known.append(counted)
        raise ChoosingError

    def phase(title):
        return lambda fraction: None

    drafter = StatisticsDrafter(NGramScorer.default(with_table=True))
    engine = SimpleNamespace(model_free=group_of([drafter]))
    assembly = SimpleNamespace(target=SimpleNamespace(loaded=None), engine=engine, complete=lambda _: None)
    for name, stand_in in {
        "base_table": lambda *given: base,
        "_choose_threads": lambda assembly, pair, work, reporter: pair,
        "restrict_vocabulary": lambda job: job,
        "_measure": lambda job: [],
        "useful_verify_widths": lambda samples, shapes: (1, 2),
        "costs_from": lambda samples, shapes: [SimpleNamespace(steps=lambda: COSTS)],
        "_choose": choose,
    }.items():
        monkeypatch.setattr(pipeline, name, stand_in)
    monkeypatch.setattr(model_free, "own_text", lambda job: own)
    pair = PairSource("target", None, "bfloat16", 1, 1, Shapes(), model_free=(TABLE_TOO,))
    settings = CalibrationSettings(pair, tmp_path, "mine", tmp_path, QUICK)
    with pytest.raises(ChoosingError):
        pipeline._calibrate(settings, assembly, None, [], tmp_path, SimpleNamespace(phase=phase))

    assert tables_equal(known[0].table, count_documents(own, base))
    assert not tables_equal(known[0].table, count_documents(own, None))
    assert known[0].table.origin.startswith("a book and ")
    assert drafter.has_table


def tables_equal(first, second):
    return all(np.array_equal(*pair) for pair in zip(first.tensors(), second.tensors(), strict=True))
