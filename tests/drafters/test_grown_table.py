"""A table that grows with use: sums of counts, what is kept of them, and a decoder that knows an answer again."""

import gc
import os
import subprocess
import weakref
from pathlib import Path

import pytest
from full_disk import full_disk
from hypothesis import given
from hypothesis import strategies as st
from made_up import write_artifacts
from tiny_pair import SHAPES, TEXT, byte_tokenizer, random_model

from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.artifacts import model_fingerprint, tokenizer_fingerprint
from yggdrasil.artifacts.lock import locked
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.statistics import grown_table, table_files
from yggdrasil.drafters.statistics.contexts import BRANCHES, table_key
from yggdrasil.drafters.statistics.grown_table import OWN_WEIGHT, AnswerCounts, answers_folder, forget_answers, merge
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE, WatchedTable
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.scheduling.plan import ModelRef

FEW = st.integers(0, BRANCHES - 1)  # so many tokens that no continuation is left out
DOCUMENTS = st.lists(st.tuples(st.lists(FEW, max_size=4), st.lists(FEW, min_size=1, max_size=30)), max_size=6)
ANSWER = [3, 1, 4, 1, 5, 9, 2, 6]


def read(table):
    """Context -> (how often, {continuation: how often})."""
    parts = zip(table.keys.tolist(), table.totals.tolist(), table.starts[:-1], table.starts[1:], strict=True)
    return {
        key: (total, dict(zip(table.tokens[a:b].tolist(), table.counts[a:b].tolist(), strict=True)))
        for key, total, a, b in parts
    }


@given(DOCUMENTS, DOCUMENTS)
def test_a_sum_is_the_count_of_both(some, others):
    total = Table.of(some).plus(Table.of(others))

    assert read(total) == read(Table.of([*some, *others]))
    for key in range(len(total.keys)):
        counts = total.counts[total.starts[key] : total.starts[key + 1]]
        assert (counts[:-1] >= counts[1:]).all()


def test_a_sum_keeps_the_most_frequent():
    first, second = (
        Table.of([([], [token for each in tokens for token in (0, each)])])
        for tokens in ([*range(1, BRANCHES + 1)] * 2, [*range(BRANCHES, BRANCHES + 5), *[40] * 5])
    )
    total, continuations = read(first.plus(second))[table_key((0,))]

    assert total == 2 * BRANCHES + 10
    assert len(continuations) == BRANCHES
    assert continuations[40] == 5
    assert continuations[BRANCHES] == 3


@given(DOCUMENTS)
def test_half_of_every_count_is_kept(documents):
    expected = {}
    for key, (total, continuations) in read(Table.of(documents)).items():
        if total >= 2:
            expected[key] = (total // 2, {token: count // 2 for token, count in continuations.items() if count >= 2})

    assert read(Table.of(documents).halved()) == expected


@given(DOCUMENTS, st.integers(1, 4))
def test_text_that_is_counted_several_times(documents, times):
    assert read(Table.of(documents).times(times)) == read(Table.of(documents * times))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of one model's answers; so few tokens are merged that an answer of eight is enough."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    monkeypatch.setattr(grown_table, "MERGE_TOKENS", len(ANSWER))
    return answers_folder("target", "file")


@pytest.fixture
def base(tmp_path):
    """The file of a table that answers are added to."""
    path = tmp_path / "base.safetensors"
    Table.of([([], [7, 8])]).save(path)
    return path


@pytest.fixture
def started(monkeypatch):
    """Processes that would have been started."""
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: commands.append(command[2:]))
    return commands


def waiting(folder):
    return sorted(folder.glob("new-*.safetensors"))


def test_answers_are_merged_by_a_process_once_they_are_many(folder, base, started):
    counts = AnswerCounts(folder, base)
    counts.add([1, 2], ANSWER[:-1])
    counts.add([1, 2], [])
    assert waiting(folder) == []
    counts.add([3], ANSWER[-1:])
    (file,) = waiting(folder)

    assert read(Table.load(file)) == read(Table.of([([1, 2], ANSWER[:-1]), ([3], ANSWER[-1:])]))
    assert started == [["yggdrasil.drafters.statistics.grown_table", str(folder), str(base)]]


def test_few_answers_wait_and_the_next_run_merges_them(folder, base, started):
    for _ in range(2):
        counts = AnswerCounts(folder, base)
        assert started == []
        counts.add([], ANSWER[:4])
        counts.save()
        counts.save()
    assert len(waiting(folder)) == 2

    assert len(started) == 1
    AnswerCounts(folder, base)
    assert len(started) == 2, "the first one did nothing"


def test_the_sum_of_the_base_and_all_answers_is_written(folder, base, started):
    counts, documents = AnswerCounts(folder, base), [([1, 2], ANSWER), ([3], [7, 8, 7]), ([], [7, 8])]
    for document in documents[:2]:
        counts.add(*document)
    counts.save()
    merge(folder, base)
    counts.add(*documents[2])
    counts.save()
    merge(folder, base)

    expected = Table.of([([], [7, 8])]).plus(Table.of(documents * OWN_WEIGHT)).without_rare()
    assert read(Table.load(counts.merged)) == read(expected)
    assert waiting(folder) == []


def test_nothing_is_merged_before_there_is_a_base(folder, tmp_path, started):
    AnswerCounts(folder, tmp_path / "none.safetensors").add([], ANSWER)

    assert len(waiting(folder)) == 1
    assert started == []


def test_beside_a_base_that_was_made_again_answers_are_merged_again(folder, base, started):
    counts = AnswerCounts(folder, base)
    counts.add([], ANSWER)
    merge(folder, base)
    started.clear()
    AnswerCounts(folder, base)
    assert started == []
    os.utime(base, ns=(0, counts.merged.stat().st_mtime_ns + 1))
    AnswerCounts(folder, base)

    assert not counts.merged.exists()
    assert len(started) == 1


def test_rare_contexts_go_before_anything_fades(folder, base, started, monkeypatch):
    """Forty tokens in a row that never come again: of them and of their pairs a table has as many as of threes."""
    documents = [([], list(range(1, 41)))]
    monkeypatch.setattr(grown_table, "MOST_KEPT", len(Table.of(documents).without_rare().tokens))
    AnswerCounts(folder, base).add(*documents[0])
    merge(folder, base)

    assert read(Table.load(folder / "all.safetensors")) == read(Table.of(documents).without_rare())


def test_the_counts_are_bounded(folder, base, started, monkeypatch):
    monkeypatch.setattr(grown_table, "MOST_KEPT", 40)
    counts = AnswerCounts(folder, base)
    for start in range(0, 400, 20):
        counts.add([], [0, 1, 0, 1, 0, 1, *range(start, start + 20)])
        merge(folder, base)
        assert len(Table.load(folder / "all.safetensors").tokens) <= 40

    assert table_key((0,)) in Table.load(folder / "all.safetensors").keys  # what came often is still there


def test_two_processes_do_not_merge_at_once(folder, base, started):
    AnswerCounts(folder, base).add([], ANSWER)
    with locked(folder / "merge.lock", "another's merging"), pytest.raises(ArtifactError, match="under way"):
        merge(folder, base)

    assert len(waiting(folder)) == 1


def test_damaged_counts_are_left_out(folder, base, started):
    counts = AnswerCounts(folder, base)
    counts.add([1], ANSWER)
    (folder / "all.safetensors").write_bytes(b"damaged")
    (folder / "new-8-x.safetensors").write_bytes(b"damaged")
    merge(folder, base)

    assert read(Table.load(folder / "all.safetensors")) == read(Table.of([([1], ANSWER)]))
    assert waiting(folder) == []


def test_on_a_full_disk_it_is_said(folder, base, started):
    with full_disk(), pytest.warns(UserWarning, match="answers are not added to the n-gram table: cannot write"):
        AnswerCounts(folder, base).add([1], ANSWER)


def test_answers_are_forgotten(folder, base, started):
    for model in ("target", "another"):
        AnswerCounts(answers_folder(model, "file"), base).add([], ANSWER)

    assert forget_answers("target") > 0
    assert not folder.exists()
    assert answers_folder("another", "file").exists()
    assert forget_answers() > 0
    assert forget_answers() == 0


def test_a_table_is_taken_up_when_its_file_changes(tmp_path):
    first, second, used = tmp_path / "first", tmp_path / "second", []
    watched = WatchedTable((first, second), used.append)
    assert not watched.load_newest()
    Table.of([([], [1, 2])]).save(second)
    assert watched.load_newest()
    assert watched.load_newest()
    Table.of([([], [3, 4])]).save(first)
    assert watched.load_newest()
    Table.of([([], [5, 6])]).save(first)
    assert watched.load_newest()
    first.write_bytes(b"damaged")
    assert watched.load_newest()

    assert [read(each) for each in used[:3]] == [read(Table.of([([], [n, n + 1])])) for n in (1, 3, 5)]
    assert not first.exists()


def test_the_arrays_of_a_table_are_freed_before_the_heap_is_trimmed(tmp_path, monkeypatch):
    """Drafting keeps a copy of its own; what the arrays took would stay in the heap."""
    file, used, alive = tmp_path / "table", [], []
    Table.of([([], [1, 2])]).save(file)
    monkeypatch.setattr(table_files, "trim_heap", lambda: alive.append(used[0]()))
    assert WatchedTable((file,), lambda table: used.append(weakref.ref(table))).load_newest()

    assert alive == [None]


def test_a_table_in_use_is_not_loaded_again(tmp_path):
    file, used = tmp_path / "table", []
    Table.of([([], [1, 2])]).save(file)
    watched = WatchedTable((file,), used.append, file)
    assert watched.load_newest()
    assert not used
    Table.of([([], [3, 4])]).save(file)
    assert watched.load_newest()
    assert [read(each) for each in used] == [read(Table.of([([], [3, 4])]))]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Of a tiny model, with a table that knows nothing of what it says."""
    folder = tmp_path_factory.mktemp("growing")
    random_model().save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    target = ModelRef(str(folder / "target"), model_fingerprint(folder / "target"), 1)
    path = write_artifacts(
        folder, "grows", target=target, drafters=[StatisticsOptions()], depth_from="mean",
        tokenizer=tokenizer_fingerprint(folder / "target"),
    )  # fmt: skip
    predictor = next((folder / "predictors" / "grows").iterdir())
    NGramScorer.default(with_table=True).save(predictor / SCORER_FILE)
    Table.of([([], [0, 0])]).save(predictor / TABLE_FILE)
    return path


def iterations(decoder, **options):
    generation = decoder.generate(list(TEXT[:12]), max_new_tokens=60, ignore_eos=True, **options)
    return generation.metrics.iterations, generation.tokens


def test_a_later_decoder_knows_the_answer(plan, folder, started):
    first = Decoder.from_plan(plan, backend="eager")
    assert first.has_table
    iterations(first)
    assert not folder.parent.exists()  # nothing is kept before ``grow_table``

    first.grow_table()
    before, tokens = iterations(first)
    iterations(first, speculation=Speculation(rule="typical"))  # not the target's own law: not counted
    ((_, kept, base),) = started
    (file,) = waiting(Path(kept))
    assert Table.load(file).totals.sum() == 3 * len(tokens)  # contexts of one token, of two and of three
    merge(Path(kept), Path(base))
    iterations(first)
    after, again = iterations(first)
    assert again == tokens
    assert after < before

    second = Decoder.from_plan(plan, backend="eager")
    second.grow_table()
    assert iterations(second)[0] < before


def test_an_answer_that_was_broken_off_counts_as_far_as_it_came(plan, folder, started):
    decoder = Decoder.from_plan(plan, backend="eager")
    decoder.grow_table()
    request = decoder.start(list(TEXT[:12]), max_new_tokens=60, ignore_eos=True)
    for _ in request:
        if 4 < len(request.tokens) < len(ANSWER):
            break
    tokens = request.result().tokens
    del decoder, request
    gc.collect()  # what is queued is kept when the decoder goes

    (file,) = waiting(next(folder.parent.iterdir()))
    assert Table.load(file).num_tokens == len(tokens) < 60


def test_a_decoder_without_a_table_says_so(pair):
    with pytest.raises(YggdrasilError, match="no n-gram table that could grow; calibrate one with --drafter table"):
        pair.decoder(None, SHAPES).grow_table()
