"""What counting drafters learn from: the target's own text, and the simulation that decodes with them."""

import json

import made_up
import numpy as np
import pytest
import torch
from tiny_pair import SHAPES, TEXT
from transformers import AutoModelForCausalLM

from yggdrasil.calibration.counted import fit_belief, learn_counts, play
from yggdrasil.calibration.own_text import Document, OwnText, read_documents
from yggdrasil.calibration.settings import Budget
from yggdrasil.cli.drafters import Named, named_drafters
from yggdrasil.drafters.belief import Belief
from yggdrasil.drafters.counts import CountsDrafter
from yggdrasil.drafters.options import CountsOptions, NGramOptions
from yggdrasil.engine.objective_policy import ObjectivePolicy
from yggdrasil.engine.planned import planned_free
from yggdrasil.engine.policy import FixedPolicy
from yggdrasil.errors import YggdrasilError
from yggdrasil.models.facts import load_tokenizer
from yggdrasil.models.loading import load_model
from yggdrasil.scheduling.plan import resolve_source
from yggdrasil.tree.objective import StepCosts, TreeShape, least_useful

TARGET = resolve_source("yggdrasil:assets/tiny/target")
WORDS = ("The first of", "def add(a, b):", "In winter the old town by the sea is quiet, and", "1 2 3 4")
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


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "", "x", "\0"])
def test_time_that_nothing_took_is_forgotten(tmp_path, loaded, tokenizer, text):
    """NaN would never be enough: a calibration without end."""
    file, spent = tmp_path / "own.jsonl", tmp_path / "spent.json"
    file.write_text('{"prompt": [1, 2], "answer": [5')
    spent.write_text(text)
    prompts = [list(tokenizer(words)["input_ids"]) for words in WORDS]

    written = OwnText(loaded, tokenizer, prompts, file).write(Budget(1e-6), spent, silent)

    assert 0 < float(spent.read_text()) < 60
    assert read_documents(file, loaded.vocab_size) == written
    assert len(written) == len(WORDS)


def test_own_text_is_what_the_target_alone_would_say(tmp_path, loaded, tokenizer):
    """Batched and padded, in the middle of a calibration; and what is written once is not written again."""
    prompts = [list(tokenizer(words)["input_ids"]) for words in WORDS]
    file, spent = tmp_path / "texts" / "own.jsonl", tmp_path / "spent.json"
    writer = OwnText(loaded, tokenizer, prompts, file)
    documents = writer.write(Budget(60.0, 1), spent, silent)
    assert sorted(document.prompt for document in documents) == sorted(prompts)

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    for document in documents:
        told = model.generate(torch.tensor([document.prompt]), max_new_tokens=128, do_sample=False)[0].tolist()
        assert document.answer == told[len(document.prompt) :]

    longer = writer.write(Budget(60.0, sum(len(each.answer) for each in documents) + 1), spent, silent)
    assert longer[: len(documents)] == documents
    assert not {tuple(prompt) for prompt in prompts} & {tuple(each.prompt) for each in longer[len(documents) :]}
    documents = longer
    assert writer.write(Budget(60.0, 1), spent, lambda title: pytest.fail(title)) == documents
    assert writer.write(Budget(0.0), spent, lambda title: pytest.fail(title)) == documents
    with file.open("a") as lines:
        lines.write('{"prompt": [1, 2], "answer": [3')  # cut by an interruption
    assert read_documents(file, loaded.vocab_size) == documents


def test_without_prompts_the_target_finds_its_own(tmp_path, loaded, tokenizer):
    documents = OwnText(loaded, tokenizer, [], tmp_path / "own.jsonl").write(
        Budget(60.0, 1), tmp_path / "spent", silent
    )
    assert len({tuple(document.prompt) for document in documents}) > 8
    assert all(document.answer for document in documents)
    lines = (tmp_path / "own.jsonl").read_text().splitlines()
    assert [Document(**json.loads(line)) for line in lines] == documents


def test_the_simulation_decodes_as_the_engine_does(pair):
    """The same policy over the same drafter: as many iterations for the same tokens."""
    reference = pair.reference(TEXT[:20], 80)
    drafter = CountsDrafter(Belief.usual(with_table=False))
    expected = play(drafter, [Document(list(TEXT[:20]), reference)], COSTS, SHAPES)

    class Costly(ObjectivePolicy):
        """Told what the costs say, not what this machine took."""

        def settle(self, decision, tokens, milliseconds, *, rested):
            super().settle(decision, tokens, COSTS.iteration_ms(*decision.shape), rested=rested)

    policy = Costly({0: COSTS}, {}, np.empty(0, dtype=np.float32), None)
    decoder = pair.decoder(policy, drafter=None, free=drafter)
    generation = decoder.generate(TEXT[:20], max_new_tokens=80)
    assert generation.tokens == reference
    # The prefill makes the first token, which the simulation counts as an iteration's.
    assert expected.aal == pytest.approx(generation.metrics.aal, rel=0.05)
    assert expected.speedup > 1.0


def test_what_is_learned_from_a_text_that_repeats_itself_pays():
    generator = np.random.default_rng(0)
    phrases = generator.integers(0, 60, (12, 9)).tolist()
    documents = [
        Document([1, 2], [token for phrase in generator.choice(12, 8) for token in phrases[phrase]]) for _ in range(60)
    ]
    learned = learn_counts(documents, COSTS, SHAPES, with_table=True)
    assert learned.options() == CountsOptions(table=True)
    assert learned.expected.speedup > 2.0
    alone = learn_counts(documents, COSTS, SHAPES, with_table=False)
    assert alone.options() == CountsOptions(table=False)
    assert learned.expected.aal > alone.expected.aal > 1.2
    nothing = learn_counts([], COSTS, SHAPES, with_table=True)
    assert (nothing.table, nothing.expected) == (None, None)
    few = fit_belief(documents[:3], with_table=True)
    assert np.array_equal(few.text, Belief.usual(with_table=True).text)


def test_no_path_is_looked_for_that_no_row_is_worth(monkeypatch, tmp_path):
    """Neither where a plan's counts guess nor where it is predicted what they give."""
    least, own = [], CountsDrafter.leave_out_below
    monkeypatch.setattr(
        CountsDrafter, "leave_out_below", lambda drafter, likely: least.append(likely) or own(drafter, likely)
    )
    learned = learn_counts([Document([1, 2], [1, 2, 3] * 20)] * 12, COSTS, SHAPES, with_table=True)
    assert least == [least_useful([COSTS])]
    learned.save(tmp_path)

    plan = made_up.plan(drafters=(learned.options(),))
    planned_free(plan, tmp_path, None)
    alone = made_up.plan().drafters[:1]
    planned_free(made_up.plan(drafters=alone), tmp_path, object())  # beside a drafter of one's own

    assert least[1:] == [least_useful(entry.steps() for entry in plan.costs)] * 2
    assert min(least) > 0.0


def test_what_is_predicted_was_not_learned():
    """Of texts that have nothing in common a table says nothing of another one."""
    texts = np.random.default_rng(0).integers(0, 5000, (60, 80)).tolist()
    learned = learn_counts([Document([1, 2], text) for text in texts], COSTS, SHAPES, with_table=True)
    assert learned.expected.aal < 1.1


def test_drafters_by_name():
    text = CountsOptions(table=False)
    assert named_drafters(["text", "table"]) == Named(CountsOptions(table=True))
    assert named_drafters(["text"]) == Named(text)
    assert named_drafters(["ngram"], "max_draft_len=3") == Named(NGramOptions(max_draft_len=3))
    assert named_drafters(["some/model"]) == named_drafters(["some/model", "text"]) == Named("some/model", text)
    assert named_drafters(["table", "some/model"]) == Named("some/model", CountsOptions(table=True))
    for names in (["some/model", "another"], ["ngram", "text"], ["ngram", "some/model"]):
        with pytest.raises(YggdrasilError, match=f"{names[0]} and {names[1]} do not draft together"):
            named_drafters(names)
    with pytest.raises(YggdrasilError, match="table needs text beside it"):
        named_drafters(["table"])
    with pytest.raises(YggdrasilError, match="--ngram is for --drafter ngram"):
        named_drafters(["text"], "max_draft_len=3")


def test_a_fixed_tree_of_counts_is_exact_too(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 4, 16)), drafter=CountsDrafter(Belief.usual(with_table=False)))
    assert decoder.generate(TEXT[:30], max_new_tokens=60).tokens == pair.reference(TEXT[:30], 60)
