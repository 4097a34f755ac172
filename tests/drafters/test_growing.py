"""A table that grows with use: sums of counts, what is kept of them, and a decoder that knows an answer again."""

import gc

import numpy as np
import pytest
from full_disk import full_disk
from hypothesis import given
from hypothesis import strategies as st
from made_up import write_artifacts
from tiny_pair import SHAPES, TEXT, byte_tokenizer, random_model

from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.artifacts import model_fingerprint, tokenizer_fingerprint
from yggdrasil.artifacts.lock import locked
from yggdrasil.drafters import growing, table
from yggdrasil.drafters.belief import Belief
from yggdrasil.drafters.best_first import BRANCHES
from yggdrasil.drafters.counted import table_key
from yggdrasil.drafters.counts import BELIEF_FILE, TABLE_FILE
from yggdrasil.drafters.growing import GrowingTable, grown_file
from yggdrasil.drafters.options import CountsOptions
from yggdrasil.drafters.table import Table
from yggdrasil.engine.decoder import Decoder
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.scheduling.plan import ModelRef

FEW = st.integers(0, BRANCHES - 1)  # so many tokens that no follower is left out
DOCUMENTS = st.lists(st.tuples(st.lists(FEW, max_size=4), st.lists(FEW, min_size=1, max_size=30)), max_size=6)
ANSWER = [3, 1, 4, 1, 5, 9, 2, 6]


def read(table):
    """Context -> (how often, {follower: how often})."""
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


@given(DOCUMENTS, DOCUMENTS, DOCUMENTS)
def test_a_difference_is_the_count_of_the_rest(some, others, strangers):
    """Of text that was never counted here, nothing can be taken away but what looks like it."""
    both = Table.of([*some, *others])

    assert read(both.minus(Table.of(others))) == read(Table.of(some))
    unlike = Table.of(
        [([90 + token for token in prompt], [90 + token for token in answer]) for prompt, answer in strangers]
    )
    assert read(both.minus(unlike)) == read(both)
    assert both.minus(both).num_tokens == 0


def test_what_was_not_kept_takes_no_more_away_than_there_was():
    """Nine followers of one context, of which eight are kept: without them the ninth is all that is left."""
    every = [token for follower in range(1, BRANCHES + 1) for token in (0, follower, 0, follower)]
    left = (
        Table.of([([], [0, 99, 0, 99, 0, 99])]).plus(Table.of([([], every)])).minus(Table.of([([], [*every, 0, 99])]))
    )
    assert (left.counts <= np.repeat(left.totals, np.diff(left.starts))).all()


def test_a_sum_keeps_the_most_frequent():
    first, second = (
        Table.of([([], [token for each in tokens for token in (0, each)])])
        for tokens in ([*range(1, BRANCHES + 1)] * 2, [*range(BRANCHES, BRANCHES + 5), *[40] * 5])
    )
    total, followers = read(first.plus(second))[table_key((0,))]

    assert total == 2 * BRANCHES + 10
    assert len(followers) == BRANCHES
    assert followers[40] == 5
    assert followers[BRANCHES] == 3


@given(DOCUMENTS)
def test_half_of_every_count_is_kept(documents):
    expected = {}
    for key, (total, followers) in read(Table.of(documents)).items():
        if total >= 2:
            expected[key] = (total // 2, {token: count // 2 for token, count in followers.items() if count >= 2})

    assert read(Table.of(documents).halved()) == expected


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tables" / "one.safetensors"


@pytest.fixture
def used():
    return []


def test_what_was_counted_is_there_the_next_time(file, used):
    known = Table.of([([], [7, 8])])
    growing_table = GrowingTable(file, known, used.append)
    growing_table.add([1, 2], ANSWER)
    assert used == []  # nothing was counted before, and one answer is not enough to stop for
    growing_table.keep()
    growing_table.keep()
    again = GrowingTable(file, known, used.append)
    again.add([1, 2], ANSWER)
    again.keep()

    assert read(used[0]) == read(Table.of([([], [7, 8]), ([1, 2], ANSWER)]).without_rare())
    assert read(Table.load(file)) == read(Table.of([([1, 2], ANSWER)] * 2))


def test_a_running_decoder_takes_up_what_it_said(file, used, monkeypatch):
    monkeypatch.setattr(growing, "EVERY", 2 * len(ANSWER))
    known = Table.of([([], [7, 8])])
    growing_table = GrowingTable(file, known, used.append)
    for prompt in ([1], [2], [3]):
        growing_table.add(prompt, ANSWER)
    growing_table.add([4], [])

    assert [read(each) for each in used] == [
        read(Table.of([([], [7, 8]), ([1], ANSWER), ([2], ANSWER)]).without_rare())
    ]


def test_rare_contexts_go_before_anything_fades(file, used, monkeypatch):
    """Forty tokens in a row that never come again: of them and of their pairs a table has as many as of threes."""
    documents = [([], list(range(1, 41)))]
    monkeypatch.setattr(growing, "MOST_KEPT", len(Table.of(documents).without_rare().tokens))
    growing_table = GrowingTable(file, Table.of([]), used.append)
    growing_table.add(*documents[0])
    growing_table.keep()

    assert read(Table.load(file)) == read(Table.of(documents).without_rare()), "halved, nothing would be left"


def test_counts_of_another_form_are_another_file():
    """Where keys or counts mean something else, what an earlier version wrote is not in the way."""
    assert grown_file("target", "file").stem == f"target-file-{table.SCHEMA_VERSION}"


def test_the_file_does_not_grow_for_ever(file, used, monkeypatch):
    monkeypatch.setattr(growing, "MOST_KEPT", 40)
    growing_table = GrowingTable(file, Table.of([]), used.append)
    for start in range(0, 400, 20):
        growing_table.add([], [0, 1, 0, 1, 0, 1, *range(start, start + 20)])
        growing_table.keep()
        assert len(Table.load(file).tokens) <= 40

    assert table_key((0,)) in Table.load(file).keys  # what came often is still there


def test_nothing_is_lost_while_another_process_writes(file, used, monkeypatch):
    monkeypatch.setattr(growing, "EVERY", len(ANSWER) + 2)
    growing_table = GrowingTable(file, Table.of([]), used.append)
    growing_table.add([1], [*ANSWER, 7])
    with locked(file.with_suffix(".lock"), "another's writing"):
        with pytest.warns(UserWarning, match="what was said is not added to the table yet: writing .* is under way"):
            assert growing_table.keep() is None
        assert not file.exists()
        monkeypatch.setattr(growing_table, "keep", lambda: pytest.fail("it is tried again at once"))
        growing_table.add([1], [3])
        monkeypatch.undo()
    growing_table.keep()

    assert read(Table.load(file)) == read(Table.of([([1], [*ANSWER, 7]), ([1], [3])]))


def test_it_is_said_where_nothing_can_be_written(file, used):
    growing_table = GrowingTable(file, Table.of([]), used.append)
    growing_table.add([1], ANSWER)
    file.parent.write_text("no folder")
    with pytest.warns(UserWarning, match="not added to the table yet: cannot write"):
        assert growing_table.keep() is None
    file.parent.unlink()

    assert read(growing_table.keep()) == read(Table.of([([1], ANSWER)]))


def test_on_a_full_disk_or_in_a_folder_of_somebody_else_it_is_said(file, used, monkeypatch):
    growing_table = GrowingTable(file, Table.of([]), used.append)
    growing_table.add([1], ANSWER)
    with full_disk(), pytest.warns(UserWarning, match=f"not added to the table yet: cannot write {file} "):
        assert growing_table.keep() is None

    def forbid():
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(growing_table, "_kept", forbid)
    with pytest.warns(UserWarning, match=f"not added to the table yet: .*Permission denied: '{file}'"):
        assert growing_table.keep() is None
    monkeypatch.undo()

    assert read(growing_table.keep()) == read(Table.of([([1], ANSWER)]))


def test_a_damaged_file_is_named(file, used):
    file.parent.mkdir()
    file.write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match=r"one\.safetensors cannot be read .*; remove it, and counting begins anew"):
        GrowingTable(file, Table.of([]), used.append)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Of a tiny model, with a table that knows nothing of what it says."""
    folder = tmp_path_factory.mktemp("growing")
    random_model().save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    target = ModelRef(str(folder / "target"), model_fingerprint(folder / "target"), 1)
    path = write_artifacts(
        folder, "grows", target=target, drafters=[CountsOptions()], depth_from="mean",
        tokenizer=tokenizer_fingerprint(folder / "target"),
    )  # fmt: skip
    predictor = next((folder / "predictors" / "grows").iterdir())
    Belief.usual(with_table=True).save(predictor / BELIEF_FILE)
    Table.of([([], [0, 0])]).save(predictor / TABLE_FILE)
    return path


def iterations(decoder, **options):
    generation = decoder.generate(list(TEXT[:12]), max_new_tokens=60, ignore_eos=True, **options)
    return generation.metrics.iterations, generation.tokens


def test_a_later_decoder_knows_the_answer(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    first = Decoder.from_plan(plan, backend="eager")
    iterations(first)
    iterations(first)
    folder = grown_file("", "").parent
    assert folder.parent == tmp_path
    assert not folder.exists()  # nobody asked for it

    first.grow_table()
    before, tokens = iterations(first)
    iterations(first, speculation=Speculation(rule="typical"))  # not the target's own law: not counted
    assert not folder.exists()  # kept when the decoder goes
    del first
    gc.collect()
    (kept,) = folder.glob("*.safetensors")
    assert Table.load(kept).totals.sum() == 3 * len(tokens)  # contexts of one token, of two and of three

    second = Decoder.from_plan(plan, backend="eager")
    second.grow_table()
    after, again = iterations(second)
    assert again == tokens
    assert after < before


def test_an_answer_that_was_broken_off_counts_as_far_as_it_came(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path))
    decoder = Decoder.from_plan(plan, backend="eager")
    decoder.grow_table()
    request = decoder.start(list(TEXT[:12]), max_new_tokens=60, ignore_eos=True)
    for _ in request:
        if len(request.tokens) > 4:
            break
    tokens = request.result().tokens
    assert 4 < len(tokens) < 60
    del decoder, request
    gc.collect()

    (kept,) = grown_file("", "").parent.glob("*.safetensors")
    assert Table.load(kept).num_tokens == len(tokens)


def test_a_decoder_without_a_table_says_so(pair):
    with pytest.raises(YggdrasilError, match="no table that could grow; calibrate one with --drafter table"):
        pair.decoder(None, SHAPES).grow_table()
