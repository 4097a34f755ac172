"""A calibration has a head draft among its target's most frequent tokens, where the target's own text tells which."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from head_cases import FirstCase
from made_up import stage_samples
from tiny_pair import VOCAB_SIZE, byte_tokenizer, make_pair

from yggdrasil.artifacts import plan_path
from yggdrasil.calibration import draft_vocabulary, pipeline
from yggdrasil.calibration.calibration_settings import PairSource, TextBudget
from yggdrasil.calibration.choose import Choice
from yggdrasil.calibration.draft_vocabulary import Frequent, restrict_vocabulary
from yggdrasil.calibration.job import Job
from yggdrasil.calibration.own_text import Document, text_file
from yggdrasil.calibration.pair import build_assembly
from yggdrasil.calibration.results import write_results
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.heads.draft_vocabulary import FILE_NAME
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.engine.plan_parts import planned_vocabulary
from yggdrasil.scheduling.plan import Costs, Expectation, Plan, Shapes

MOST = 24
SHAPES = Shapes(
    max_length=160, draft_widths=(1, 2), max_depth=2, candidates=4, verify_widths=(1, 2, 4), prefill_widths=(16,)
)  # fmt: skip
COSTS = Costs(64, 0.1, {1: 0.1, 2: 0.1}, {1: 1.0, 2: 1.0, 4: 1.1}, 0.1, 1.1)
COMMON = list(range(30, 50))


def documents(count, tokens=COMMON):
    """Of few tokens, each beginning with another prompt."""
    return [Document([number % VOCAB_SIZE, 1, 2], tokens) for number in range(count)]


class Pair:
    """A target on disk with a head of EAGLE-1 or another."""

    def __init__(self, folder, kind):
        pair = make_pair(num_hidden_layers=2, hidden_size=32)
        self.folder, self.head = folder / "target", folder / "head"
        pair.plain_target.save_pretrained(self.folder)
        byte_tokenizer().save_pretrained(self.folder)
        self.head.mkdir()
        kind(pair, self.head)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("first"), FirstCase)


@pytest.fixture
def job(first, tmp_path, monkeypatch):
    """Makes the job of a calibration of EAGLE-1's head; ``said`` is what its reporter tells."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(draft_vocabulary, "DRAFT_VOCABULARY", MOST)
    monkeypatch.setattr("yggdrasil.calibration.pair.with_detected_layers", lambda head, target, fingerprint: head)
    (tmp_path / "work").mkdir()

    def make(texts=(), pair=first, **changes):
        source = PairSource(
            str(pair.folder), str(pair.head), "float32", 1, 1, SHAPES, model_free=(StatisticsOptions(),)
        )
        source = replace(source, **changes)
        said = []
        reporter = SimpleNamespace(phase=lambda title: said.append(title) or (lambda share: None))
        (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "the end"}\n')
        settings = SimpleNamespace(prompts=prompts, chat=False, text_budget=TextBudget(0.0))
        made = Job(
            settings, source, build_assembly(source, backend="eager"), byte_tokenizer(), texts, tmp_path / "work",
            reporter,
        )  # fmt: skip
        return made, said

    return make


@pytest.fixture
def write(first):
    """Puts documents where a target's own text lies."""

    def write(texts):
        file = text_file(Source.find(str(first.folder)).fingerprint(), "full")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f'{{"prompt": {p}, "answer": {a}}}\n' for p, a in texts))

    return write


def drafted(job):
    """Every token that the job's head can draft."""
    head = job.assembly.second
    return head.loaded.model.head.target_tokens(torch.arange(head.settings.draft_vocab_size)).tolist()


def test_what_is_frequent_is_told_by_text_that_it_was_not_chosen_by():
    """Text all of whose tokens are its own is covered by itself and by nothing else."""
    unlike = [Document([0], [50 + number]) for number in range(20)]

    assert Frequent(documents(40), VOCAB_SIZE, MOST).coverage == 1.0
    assert Frequent(documents(40), VOCAB_SIZE, MOST).is_enough
    assert Frequent(unlike, VOCAB_SIZE, MOST).vocabulary.coverage(unlike) == 1.0
    assert Frequent(unlike, VOCAB_SIZE, MOST).coverage == 0.0
    assert not Frequent(unlike, VOCAB_SIZE, MOST).is_enough
    assert not Frequent([], VOCAB_SIZE, MOST).is_enough


def test_a_head_drafts_among_the_frequent_tokens_and_decodes_as_the_target(job, write):
    write(documents(40))
    made, said = job()
    found = restrict_vocabulary(made)

    assert len(drafted(found)) == MOST == len(found.pair.vocabulary.tokens)
    assert set(COMMON) < set(drafted(found))
    assert said == [f"drafting among the {MOST} most frequent tokens, 100% of what the target writes"]
    assert found.assembly.target.loaded is made.assembly.target.loaded
    assert made.pair.vocabulary is None, "an interrupted calibration is known by what it was asked for"
    assert drafted(made) == list(range(VOCAB_SIZE))


def test_an_interrupted_calibration_goes_on_with_what_it_chose(job, write):
    """Steps were timed with it, whatever was written since; a file that was cut is chosen anew."""
    write(documents(40))
    chosen = drafted(restrict_vocabulary(job()[0]))
    write(documents(40, list(range(50, 70))))
    made, said = job()

    assert drafted(restrict_vocabulary(made)) == chosen
    assert said == []
    file = made.work / FILE_NAME
    file.write_bytes(file.read_bytes()[:-3])
    assert set(range(50, 70)) < set(drafted(restrict_vocabulary(made)))


def test_too_little_text_leaves_all_tokens_and_says_so(job, write):
    """So it stays when an interrupted calibration goes on."""
    write([Document([1], [90, 91]), Document([2], [92, 93]), Document([3], [94, 95])])
    made, said = job()

    assert restrict_vocabulary(made) is made
    assert said == ["drafting among all 96 tokens: 6 of the target's own text say too little of which are frequent"]
    write(documents(40))
    again, _ = job()
    assert restrict_vocabulary(again) is again


def test_answers_that_tell_what_the_head_is_worth_are_not_counted(job, write):
    """It would draft their tokens too, and seem to miss none."""
    known = Document([5, 6, 7], [90, 91] * 50)
    write([*documents(40), known])

    assert not {90, 91} & set(drafted(restrict_vocabulary(job([known.prompt])[0])))
    (job()[0].work / FILE_NAME).unlink()
    assert {90, 91} < set(drafted(restrict_vocabulary(job()[0])))


def test_without_a_table_no_text_is_written(job, write, monkeypatch):
    def refuse(*_):
        raise AssertionError("it wrote")

    monkeypatch.setattr("yggdrasil.calibration.statistics.model_free.OwnText", refuse)
    write(documents(40))

    assert len(drafted(restrict_vocabulary(job(model_free=(StatisticsOptions(table=False),))[0]))) == MOST


def test_decoders_without_a_head_and_small_vocabularies_are_left_alone(job, write, monkeypatch):
    write(documents(40))
    plain, said = job(drafter=None, drafter_threads=0, shapes=replace(SHAPES, draft_widths=()))

    assert restrict_vocabulary(plain) is plain
    monkeypatch.setattr(draft_vocabulary, "DRAFT_VOCABULARY", VOCAB_SIZE)
    small, _ = job()
    assert restrict_vocabulary(small) is small
    assert said == []


def test_what_was_chosen_is_written_with_the_plan(job, write, tmp_path):
    """In its folder, with the number that the plan says."""
    write(documents(40))
    found = restrict_vocabulary(job()[0])
    settings = SimpleNamespace(name="mine", root=tmp_path)
    choice = Choice.without_drafter([Expectation("mean", 1.5, 1.0, 1.2)])
    plan = pipeline._plan(found._replace(settings=settings), SHAPES, [COSTS], None, choice, None)
    path = plan_path(tmp_path, "mine", plan.machine)
    write_results(settings, plan, path, choice, None, found.pair.vocabulary, stage_samples(), found.work)

    kept = planned_vocabulary(Plan.load(path), path.parent / plan.predictor)
    assert torch.equal(kept.tokens, found.pair.vocabulary.tokens)
    assert plan.draft_vocabulary == MOST
    whole = job()[0]._replace(settings=settings)
    assert pipeline._plan(whole, SHAPES, [COSTS], None, choice, None).draft_vocabulary is None
