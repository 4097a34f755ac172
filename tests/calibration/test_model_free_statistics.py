"""What counting drafters learn from: the target's own text, and the simulation that decodes with them."""

import json
import threading
from copy import copy
from dataclasses import replace
from itertools import count
from math import inf
from types import SimpleNamespace

import made_up
import numpy as np
import pytest
import torch
from full_disk import full_disk
from own_drafter import Nobody as Silent
from tiny_pair import SHAPES, TEXT
from transformers import AutoModelForCausalLM

from yggdrasil.artifacts.lock import locked
from yggdrasil.calibration import own_text
from yggdrasil.calibration.calibration_settings import TextBudget
from yggdrasil.calibration.job import Job
from yggdrasil.calibration.own_text import Document, OwnText, read_documents
from yggdrasil.calibration.replay import replay
from yggdrasil.calibration.statistics.learning import fit_statistics
from yggdrasil.calibration.statistics.model_free import model_free_without
from yggdrasil.calibration.statistics.prediction import predict_model_free
from yggdrasil.calibration.statistics.scorer_fit import fit_scorer
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.drafters.model_free_options import NGramOptions, StatisticsOptions
from yggdrasil.drafters.ngram import NGramDrafter
from yggdrasil.drafters.protocol import Capabilities, Step, group_of
from yggdrasil.drafters.registry import NamedDrafters, named_drafters, names_of
from yggdrasil.drafters.statistics.contexts import is_longest
from yggdrasil.drafters.statistics.drafter import StatisticsDrafter, default_statistics
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.engine.end_tokens import end_tokens
from yggdrasil.engine.plan_parts import drafting_by, planned_model_free, planned_policy
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.policy.costs import StepCosts
from yggdrasil.policy.objective import least_useful_probability
from yggdrasil.policy.policy import ObjectivePolicy
from yggdrasil.prompts import encode_chat
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.side_by_side import Rows
from yggdrasil.scheduling.plan import resolve_source

TARGET = resolve_source("yggdrasil:assets/tiny/target")
WORDS = ("The first of", "def add(a, b):", "In winter the old town by the sea is quiet, and", "1 2 3 4")
TEXT_ALONE = StatisticsOptions(table=False)
COSTS = StepCosts(
    0.01,
    dict.fromkeys(SHAPES.draft_widths, 0.01),
    {width: 1 + 0.02 * width for width in SHAPES.verify_widths},
    overhead_ms=0.02,
    plain_ms=1.02,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TARGET)


@pytest.fixture(scope="module")
def loaded():
    return load_model(TARGET, torch.float32, torch.device("cpu"), 1)


def silent(_):
    return lambda fraction: None


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"prompt": [1]}', b'{"prompt": [1], "answer": []}',
     *(b'{"prompt": [1], "answer": [2, %s]}' % token for token in
       (b"-1", b"96", b"1.5", b"true", b"null", b'"1"', b"[1]", b"NaN", b"9" * 5000, b"9" * 30))],
)  # fmt: skip
def test_kept_text_is_what_is_whole_of_it(tmp_path, line):
    file, good = tmp_path / "own.jsonl", b'{"prompt": [1, 2], "answer": [95, 0]}'
    file.write_bytes(b"\n".join((good, line, good, good[:-3])))

    assert read_documents(file, 96) == [Document([1, 2], [95, 0])] * 2
    assert read_documents(tmp_path / "none.jsonl", 96) == []


@pytest.mark.parametrize(
    ("budget", "share"), [(TextBudget(inf, 0), 1.0), (TextBudget(inf, 8), 0.5), (TextBudget(8.0), 0.25)]
)
def test_a_budget_of_no_tokens_is_used_up(budget, share):
    assert budget.share(4, 2.0) == share


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "", "x", "\0"])
def test_time_that_nothing_took_is_forgotten(tmp_path, loaded, tokenizer, text):
    """NaN would never be enough: a calibration without end."""
    file, spent = tmp_path / "own.jsonl", tmp_path / "spent.json"
    file.write_text('{"prompt": [1, 2], "answer": [5')
    spent.write_text(text)
    prompts = [list(tokenizer(words)["input_ids"]) for words in WORDS]

    written = OwnText(loaded, tokenizer, prompts, file).write(TextBudget(1e-6), spent, silent)

    assert 0 < float(spent.read_text()) < 60
    assert read_documents(file, loaded.vocab_size) == written == []  # in no time at all


def test_text_that_a_full_disk_does_not_take_is_a_sentence(tmp_path, loaded, tokenizer, monkeypatch):
    """What was written before is there, and goes on the next time."""
    file, spent = tmp_path / "own.jsonl", tmp_path / "spent.json"
    first, second = Document([1, 2], [3]), Document([4, 5], [6])
    monkeypatch.setattr(OwnText, "_answered", lambda *_: iter([[first], [second]]))
    writer = OwnText(loaded, tokenizer, [], file)
    with full_disk(40), pytest.raises(ArtifactError, match=f"cannot write {file} .*; check the folder's .* free space"):
        writer.write(TextBudget(60.0, 9), spent, silent)

    assert read_documents(file) == [first]


@pytest.fixture
def few_rows(monkeypatch):
    """Few answers at once, and short ones."""
    monkeypatch.setattr("yggdrasil.calibration.row_writer.ROWS", 12)
    monkeypatch.setattr("yggdrasil.calibration.own_text.ANSWER", 64)


@pytest.fixture(scope="module")
def answers(tokenizer):
    """transformers' answers to the prompts, by prompt."""
    model, found = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32), {}
    for words in WORDS:
        prompt = list(tokenizer(words)["input_ids"])
        text = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0].tolist()
        found[tuple(prompt)] = text[len(prompt) :]
    return found


def test_own_text_is_what_the_target_alone_would_say(tmp_path, loaded, tokenizer, few_rows, answers):
    """Batched and padded, in the middle of a calibration; and what is written once is not written again."""
    prompts = [list(tokenizer(words)["input_ids"]) for words in WORDS]
    file, spent = tmp_path / "texts" / "own.jsonl", tmp_path / "spent.json"
    writer = OwnText(loaded, tokenizer, prompts, file)
    documents = writer.write(TextBudget(60.0, 1), spent, silent)
    assert sorted(document.prompt for document in documents) == sorted(prompts)
    assert {tuple(document.prompt): document.answer for document in documents} == answers

    longer = writer.write(TextBudget(60.0, sum(len(each.answer) for each in documents) + 1), spent, silent)
    assert longer[: len(documents)] == documents
    assert not {tuple(prompt) for prompt in prompts} & {tuple(each.prompt) for each in longer[len(documents) :]}
    documents = longer
    assert writer.write(TextBudget(60.0, 1), spent, lambda title: pytest.fail(title)) == documents
    assert writer.write(TextBudget(0.0), spent, lambda title: pytest.fail(title)) == documents
    with file.open("a") as lines:
        lines.write('{"prompt": [1, 2], "answer": [3')  # cut by an interruption
    assert read_documents(file, loaded.vocab_size) == documents


@pytest.mark.parametrize(("seconds", "is_kept"), [(8.0, False), (40.0, True)])
def test_when_time_is_up_answers_end_where_they_are(
    tmp_path, loaded, tokenizer, few_rows, answers, monkeypatch, seconds, is_kept
):
    """Those of which next to nothing was written are not kept, and generated again."""
    prompts = [list(tokenizer(words)["input_ids"]) for words in WORDS]
    file, spent, clock = tmp_path / "own.jsonl", tmp_path / "spent", count()
    with monkeypatch.context() as patch:
        patch.setattr("yggdrasil.calibration.own_text.monotonic", lambda: float(next(clock)))
        cut = OwnText(loaded, tokenizer, prompts, file).write(TextBudget(seconds), spent, silent)

    assert next(clock) < seconds + len(prompts) + 4  # looked at once a pass: no pass came behind
    assert len(cut) == (len(prompts) if is_kept else 0)
    assert float(spent.read_text()) >= seconds
    for document in cut:
        answer = answers[tuple(document.prompt)]
        assert 16 <= len(document.answer) < len(answer)
        assert document.answer == answer[: len(document.answer)]
    again = OwnText(loaded, tokenizer, prompts, file).write(TextBudget(60.0, 200), spent, silent)
    asked_again = {tuple(each.prompt) for each in again[len(cut) :]} & set(answers)
    assert asked_again == (set() if is_kept else set(answers))


@pytest.mark.parametrize(("seconds", "whole"), [(90.0, 1), (140.0, 2)])
def test_a_slow_model_begins_what_it_can_end(tmp_path, loaded, tokenizer, monkeypatch, seconds, whole):
    """All four answers at once, none would get to its end in the time: a token takes a second here."""
    clock, read = [0.0], Rows.read

    def slow(rows, tokens, places, prompts):
        assert not prompts or len(tokens) + len(prompts) <= max(1.0, (seconds - clock[0]) / 64)
        clock[0] += len(tokens) + sum(map(len, prompts))
        return read(rows, tokens, places, prompts)

    monkeypatch.setattr(Rows, "read", slow)
    monkeypatch.setattr("yggdrasil.calibration.own_text.ANSWER", 64)
    monkeypatch.setattr("yggdrasil.calibration.own_text.monotonic", lambda: clock[0])
    monkeypatch.setattr("yggdrasil.calibration.row_writer.perf_counter", lambda: clock[0])
    prompts = [list(tokenizer(words)["input_ids"]) for words in WORDS]
    documents = OwnText(loaded, tokenizer, prompts, tmp_path / "own").write(
        TextBudget(seconds), tmp_path / "spent", silent
    )

    assert [len(document.answer) for document in documents[:whole]] == [64] * whole


@pytest.mark.usefixtures("few_rows")
def test_nor_does_it_go_on_with_what_it_asked_itself_when_time_is_up(tmp_path, loaded, tokenizer, monkeypatch):
    for name, tokens in {"OPENING": 4, "ANSWER": 48, "_LEAST": 1}.items():
        monkeypatch.setattr(f"yggdrasil.calibration.own_text.{name}", tokens)
    clock, ends = count(), end_tokens(str(TARGET), loaded.sizes.eos, tokenizer)
    monkeypatch.setattr("yggdrasil.calibration.own_text.monotonic", lambda: float(next(clock)))
    documents = OwnText(loaded, tokenizer, [], tmp_path / "own").write(TextBudget(40.0), tmp_path / "spent", silent)

    assert any(len(each.answer) < 48 and each.answer[-1] not in ends for each in documents)


@pytest.mark.usefixtures("few_rows")
def test_prompts_that_the_model_samples_begin_as_the_given_ones_do(tmp_path, loaded, tokenizer, monkeypatch):
    """One opening has no words; prompts that are too short or no chat give none."""
    for name, tokens in {"OPENING": 4, "ANSWER": 16, "_LEAST": 1}.items():
        monkeypatch.setattr(f"yggdrasil.calibration.own_text.{name}", tokens)
    tokenizer = copy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}ask:\n{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}say:\n{% endif %}"
    )
    turns = [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in ("Why is it", "Add two", "Why is")]
    start = list(tokenizer("ask:\n")["input_ids"])
    openings = [turn[: len(start) + 2] for turn in turns[:2]]
    given = [*turns, list(tokenizer("def add(a, b):")["input_ids"]), openings[0]]
    writer = OwnText(loaded, tokenizer, given, tmp_path / "own")
    documents = writer.write(TextBudget(60.0, 400), tmp_path / "spent", silent)
    sampled = [tokenizer.decode(each.prompt) for each in documents if each.prompt not in given]

    assert writer._openings() == [start, *openings]
    for opening in openings:
        assert any(each.startswith(tokenizer.decode(opening)) for each in sampled)
    assert all(each.startswith("ask:\n") for each in sampled)


def test_answers_of_one_token_foresee_nothing():
    documents = [Document([5, number], [0]) for number in range(30)]
    counted = fit_statistics(documents, COSTS, with_table=True)

    assert counted.expected == []
    assert counted.table.num_tokens == 30


def test_of_two_that_write_at_once_the_second_waits_and_answers_what_is_left(
    tmp_path, loaded, tokenizer, few_rows, monkeypatch
):
    """A prompt that is given twice is answered once too."""
    messages, waits = [], threading.Event()
    monkeypatch.setattr(own_text, "tell", lambda sentence: (messages.append(sentence), waits.set()))
    prompts = [list(tokenizer(words)["input_ids"]) for words in WORDS]
    file, written = tmp_path / "own.jsonl", []

    writer = OwnText(loaded, tokenizer, prompts * 2, file)

    def write():
        written.extend(writer.write(TextBudget(60.0, 10), tmp_path / "t", silent))

    second = threading.Thread(target=write)
    with locked(file.with_suffix(".lock"), "a test"):
        second.start()
        assert waits.wait(60)
        file.write_text("".join(json.dumps({"prompt": prompt, "answer": [1, 2, 3]}) + "\n" for prompt in prompts[1:]))
    second.join()

    assert sorted(each.prompt for each in written) == sorted(prompts)
    assert read_documents(file, loaded.vocab_size) == written
    assert writer.waited > 0.0
    assert len(messages) == 1
    assert "waiting for its end" in messages[0]


def test_without_prompts_the_target_finds_its_own(tmp_path, loaded, tokenizer, few_rows):
    documents = OwnText(loaded, tokenizer, [], tmp_path / "own.jsonl").write(
        TextBudget(60.0, 1), tmp_path / "spent", silent
    )
    assert len({tuple(document.prompt) for document in documents}) > 8
    assert all(document.answer for document in documents)
    lines = (tmp_path / "own.jsonl").read_text().splitlines()
    assert [Document(**json.loads(line)) for line in lines] == documents


ROOM = 128  # tokens of an answer, which the tiny pair has slots for
MAKE_FREE = {
    "text": lambda: group_of([default_statistics()]),
    "n-gram": lambda: group_of([NGramDrafter()]),
    "both": lambda: group_of([NGramDrafter(), default_statistics()]),
}


@pytest.mark.parametrize("kind", MAKE_FREE)
def test_the_simulation_decodes_as_the_engine_does(pair, kind, monkeypatch):
    """The same policy over the same drafter: as many iterations for the same tokens."""
    monkeypatch.setattr("yggdrasil.calibration.replay.ANSWER", ROOM)
    reference = pair.reference(TEXT[:20], ROOM)
    drafter = MAKE_FREE[kind]()
    document = Document(list(TEXT[:20]), reference)

    class Costly(ObjectivePolicy):
        """Told what the costs say, not what this machine took."""

        def observe(self, decision, tokens, milliseconds):
            super().observe(decision, tokens, COSTS.iteration_ms(*decision.shape))

    def policy():
        return Costly({0: COSTS}, {}, np.empty(0, dtype=np.float32), None)

    played = replay([document], policy(), COSTS, model_free=drafter)
    decoder = pair.decoder(policy(), replace(SHAPES, draft_widths=()), drafter=None, model_free=MAKE_FREE[kind]())
    generation = decoder.generate(TEXT[:20], max_new_tokens=ROOM)
    assert generation.tokens == reference
    assert (played.tokens, played.iterations) == (ROOM - 1, generation.metrics.iterations)
    assert generation.metrics.model_free_trees > 5
    expected = predict_model_free(MAKE_FREE[kind](), [document], COSTS)
    assert expected[0].aal == round(played.aal, 3)
    assert expected[0].speedup >= expected[-1].speedup == 1.0
    assert [each.policy.split(" width")[0] for each in expected[1:]] == ["fixed verify", "plain decoding"]


def test_what_is_learned_from_a_text_that_repeats_itself_pays():
    generator = np.random.default_rng(0)
    phrases = generator.integers(0, 60, (12, 9)).tolist()
    documents = [
        Document([1, 2], [token for phrase in generator.choice(12, 8) for token in phrases[phrase]]) for _ in range(60)
    ]
    learned = fit_statistics(documents, COSTS, with_table=True)
    assert learned.options() == StatisticsOptions(table=True)
    assert learned.expected[0].speedup > 2.0
    assert (learned.table.totals[is_longest(learned.table.keys)] > 1).all()
    alone = fit_statistics(documents, COSTS, with_table=False)
    assert alone.options() == StatisticsOptions(table=False)
    assert learned.expected[0].aal > alone.expected[0].aal > 1.2
    nothing = fit_statistics([], COSTS, with_table=True)
    assert (nothing.table, nothing.expected) == (None, [])
    few = fit_scorer(documents[:3], with_table=True)
    assert np.array_equal(few.counts, NGramScorer.default(with_table=True).counts)


def test_a_belief_that_says_less_of_unseen_text_than_the_usual_is_not_taken():
    """Text that is one token again and again, but for its end."""
    generator = np.random.default_rng(0)
    recorded = [Document([1, 2], [7] * 100)] * 50
    others = [Document([1, 2], generator.integers(0, 40, 100).tolist()) for _ in range(30)]
    usual = NGramScorer.default(with_table=False)

    assert np.array_equal(fit_scorer([*recorded, *others[:10]], with_table=False).bias, usual.bias)
    assert not np.array_equal(fit_scorer(others, with_table=False).bias, usual.bias)


def test_a_table_that_is_to_predict_knows_nothing_of_the_prompts_it_predicts_for():
    documents = [Document([9, start], [start, *range(20, 30), start] * 8) for start in range(8)] * 30
    learned = fit_statistics(documents, COSTS, with_table=True)
    prompts_of_user = [[7, 7, 9, 3], [9, 5]]
    recorded = [document for document in documents if document.prompt in ([9, 3], [9, 5])]
    ignorant, whole = learned.drafter_without(recorded), StatisticsDrafter(learned.scorer, learned.table)

    for drafter, is_known in ((ignorant, False), (whole, True)):
        for prompt in prompts_of_user:
            drafter.begin(prompt)
            continuations = drafter.features(())[:, 0].tolist()
            assert (prompt[-1] in continuations) == is_known
    ignorant.begin([9, 4])
    assert 4 in ignorant.features(())[:, 0].tolist()


def test_what_guesses_beside_a_drafter_knows_nothing_of_the_texts_it_is_played_on():
    documents = [Document([9, start], [start, *range(20, 30), start] * 8) for start in range(8)] * 30
    learned = fit_statistics(documents, COSTS, with_table=True)
    assembly = SimpleNamespace(
        engine=SimpleNamespace(model_free=group_of([StatisticsDrafter(learned.scorer, learned.table)]))
    )
    job = Job(None, None, assembly, None, [], None, None)
    (beside,) = model_free_without(job, learned, [documents[3], documents[5]], COSTS).drafters

    for prompt, is_known in (([9, 3], False), ([9, 5], False), ([9, 4], True)):
        beside.begin(prompt)
        assert (prompt[-1] in beside.features(())[:, 0].tolist()) == is_known


def test_no_path_is_looked_for_that_no_row_is_worth(monkeypatch, tmp_path):
    """Neither where a plan's counts guess nor where it is predicted what they give."""
    least, own = [], StatisticsDrafter.leave_out_below
    monkeypatch.setattr(
        StatisticsDrafter, "leave_out_below", lambda drafter, likely: least.append(likely) or own(drafter, likely)
    )
    learned = fit_statistics([Document([1, 2], [1, 2, 3] * 20)] * 12, COSTS, with_table=True)
    assert least == [least_useful_probability([COSTS])]
    learned.save(tmp_path)

    plan = made_up.plan(drafters=(learned.options(),))
    planned_model_free(plan, tmp_path)
    alone = made_up.plan().drafters[:1]
    drafting_by(made_up.plan(drafters=alone), tmp_path, Silent())  # beside a drafter of one's own

    assert least[1:] == [least_useful_probability(entry.steps() for entry in plan.costs)] * 2
    assert min(least) > 0.0


def test_what_is_predicted_was_not_learned():
    """Of texts that have nothing in common a table says nothing of another one."""
    texts = np.random.default_rng(0).integers(0, 5000, (60, 80)).tolist()
    learned = fit_statistics([Document([1, 2], text) for text in texts], COSTS, with_table=True)
    assert learned.expected[0].aal < 1.1


def test_a_prediction_says_how_much_of_its_text_repeats_itself():
    """Of the texts that it was predicted by: every tenth is a loop of eight here, the others never repeat."""
    loops, others = [Document([90], [*range(8)] * 10)] * 6, [Document([90], list(range(i, i + 80))) for i in range(54)]
    held_out_first = [text for i in range(6) for text in (loops[i], *others[9 * i : 9 * i + 9])]
    expected = fit_statistics(held_out_first, COSTS, with_table=True).expected
    assert expected[0].repeats == round((80 - 8 - 3) / 80, 3)
    assert expected[0].describe().endswith("ms per token, on text of which 86% repeats itself")
    assert [each.repeats for each in expected[1:]] == [None] * len(expected[1:])
    assert "repeats" not in expected[1].describe()


TABLE_TOO, LOOK_UP = StatisticsOptions(table=True), NGramOptions()


@pytest.mark.parametrize(
    ("names", "model", "free"),
    [
        (["text"], None, [TEXT_ALONE]),
        (["table"], None, [TABLE_TOO]),
        (["text", "table"], None, [TABLE_TOO]),
        (["ngram"], None, [LOOK_UP]),
        (["ngram", "text"], None, [LOOK_UP, TEXT_ALONE]),
        (["some/model"], "some/model", [TEXT_ALONE]),
        (["some/model", "text"], "some/model", [TEXT_ALONE]),
        (["table", "some/model"], "some/model", [TABLE_TOO]),
        (["ngram", "table", "some/model"], "some/model", [LOOK_UP, TABLE_TOO]),
        (["none"], None, []),
    ],
)
def test_drafters_by_name(names, model, free):
    named = named_drafters(names)
    assert named == NamedDrafters(model, tuple(free))
    assert named.has_table == ("table" in names)
    assert named.is_plain == (names == ["none"])
    assert set(names) - {model} <= names_of(free)


def test_drafters_that_do_not_go_group_of():
    assert named_drafters(["ngram"], "max_draft_len=3").model_free == (NGramOptions(max_draft_len=3),)
    for names in (["a/model", "b/model"], ["none", "text"], ["none", "some/model"]):
        with pytest.raises(YggdrasilError, match=f"{names[0]} and {names[1]} do not draft together"):
            named_drafters(names)
    with pytest.raises(YggdrasilError, match="--ngram is for --drafter ngram"):
        named_drafters(["text"], "max_draft_len=3")


class Nobody:
    """A user's drafter that runs passes of its own."""

    name, capabilities = "nobody", Capabilities()

    def cost(self, budget):
        return [Step("own", budget.width)]


def test_who_drafts_in_the_place_of_a_plans_own(tmp_path):
    """What costs no pass joins the counts; a look-up stands alone; of another's trees nothing is known."""
    plan = made_up.plan(drafters=[], shapes=replace(SHAPES, draft_widths=()))
    plan = replace(plan, costs=[replace(entry, draft_ms={}, head_ms=0.0) for entry in plan.costs])
    own, look_up, free = Nobody(), NGramDrafter(), default_statistics()

    adapted, drafter, beside = drafting_by(plan, tmp_path, own)
    assert drafter is own
    assert [each.name for each in beside] == ["text"]
    assert drafting_by(plan, tmp_path, look_up)[1:] == (None, [look_up])
    assert drafting_by(plan, tmp_path, free)[1:2] == (None,)
    policy = planned_policy(adapted, None)
    policy.begin()
    for _ in range(2):
        policy.observe(policy.choose(64), 1, made_up.PLAIN_MS)
    assert policy.choose(64).kind == "drafted", "it is tried"
    only_plain = replace(plan, shapes=replace(plan.shapes, verify_widths=(1,)), costs=[
        replace(entry, verify_ms={1: 1.0}) for entry in plan.costs
    ])  # fmt: skip
    with pytest.raises(YggdrasilError, match="decodes plainly alone"):
        drafting_by(only_plain, tmp_path, own)
