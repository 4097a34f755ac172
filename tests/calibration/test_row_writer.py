"""Many texts written side by side are those that the model alone would write one by one."""

import math
import random
from functools import cache

import pytest
import torch
from recurrent_models import recurrent_model
from tiny import sharpened
from transformers import LlamaConfig, LlamaForCausalLM

from yggdrasil.calibration.row_writer import RowWriter, Task, rows_that_fit
from yggdrasil.runtime.attention import own_attention
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.memory_limits import cache_bytes
from yggdrasil.runtime.side_by_side import SIDE_BY_SIDE, Rows

VOCAB = 61


@cache
def models():
    """The same random model twice: to be written with, and untouched."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(sharpened(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), 4))
    return prepare_model(made[0], "llama", num_threads=1, pack=False), made[1]


def prompts_of(lengths):
    dice = random.Random(0)
    return [[dice.randrange(VOCAB) for _ in range(length)] for length in lengths]


def written(tasks, ends, num_rows, capacity=64, seed=0, at_once=lambda token_seconds: math.inf):
    loaded = models()[0]
    with own_attention(loaded.model, SIDE_BY_SIDE):
        writer = RowWriter(loaded, ends, capacity, seed, num_rows)
        return [text for finished in writer.write(iter(tasks), at_once=at_once) for text in finished]


def test_rows_that_end_and_begin_at_any_time_say_what_generate_says():
    """Prompts of unequal length in fewer rows than there are prompts; some end by a token, some by their number."""
    prompts = prompts_of([3, 17, 1, 29, 8, 8, 2, 40, 11, 5, 23, 1, 13])
    ends, tasks = set(range(0, VOCAB, 12)), [Task(prompt, 4 + 3 * number % 20) for number, prompt in enumerate(prompts)]
    plain = models()[1]
    expected = {
        tuple(task.prompt): plain.generate(
            torch.tensor([task.prompt]), max_new_tokens=task.most, do_sample=False, eos_token_id=sorted(ends),
            pad_token_id=0,
        )[0, len(task.prompt) :].tolist()
        for task in tasks
    }  # fmt: skip
    assert len({len(tokens) for tokens in expected.values()}) > 4, "they end at different times"
    assert any(tokens[-1] in ends and len(tokens) > 1 for tokens in expected.values())
    for num_rows in (1, 3, 5, 13):
        texts = written(tasks, ends, num_rows)
        assert {tuple(text.task.prompt): text.tokens for text in texts} == expected


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "granite"])
def test_recurrent_models_write_one_text_after_the_other(family):
    """Also a prompt that takes several passes."""
    model = recurrent_model(family)
    tasks = [Task(prompt, 9) for prompt in prompts_of([80, 5, 21])]
    with own_attention(model.loaded.model, SIDE_BY_SIDE):
        finished = RowWriter(model.loaded, (), 120, 0, 4).write(iter(tasks))
        texts = [text for each in finished for text in each]

    assert [text.task for text in texts] == tasks
    assert [text.tokens for text in texts] == [model.reference(task.prompt, 9) for task in tasks]


@pytest.mark.parametrize(("allowed", "most"), [(2.9, 2), (0.1, 1), (math.inf, 5)])
def test_no_more_go_on_than_time_allows_and_the_first_goes_alone(monkeypatch, allowed, most):
    """What a token takes is known behind the first prompt."""
    tasks, estimates, numbers, read = (
        [Task(prompt, 6) for prompt in prompts_of([9, 3, 5, 7, 2, 4, 6])],
        [],
        [],
        Rows.read,
    )

    def noted(rows, tokens, places, prompts):
        numbers.append(len(tokens) + len(prompts))
        return read(rows, tokens, places, prompts)

    def at_once(token_seconds):
        estimates.append(token_seconds)
        return allowed

    monkeypatch.setattr(Rows, "read", noted)
    texts = written(tasks, (), 5, at_once=at_once)

    assert numbers[0] == 1
    assert max(numbers) == most
    assert all(0 < seconds < 60 for seconds in estimates)
    expected = {tuple(text.task.prompt): text.tokens for text in texts}
    assert expected == {tuple(text.task.prompt): text.tokens for text in written(tasks, (), 5)}


def test_a_row_ends_where_it_is_full():
    (text,) = written([Task(prompts_of([10])[0], 100)], (), 2, capacity=16)
    assert len(text.tokens) == 7, "the last one needs no place"


def test_sampled_prompts_are_those_of_the_seed_and_leave_the_others_alone():
    prompts = prompts_of([6, 9, 4])
    tasks = [Task(prompts[0], 12, 20), Task(prompts[1], 12), Task(prompts[2], 12, 20)]

    def answers_of(seed):
        return {tuple(text.task.prompt): (text.prompt, text.tokens) for text in written(tasks, (), 3, seed=seed)}

    first, again, other = answers_of(0), answers_of(0), answers_of(1)
    assert first == again
    assert first[tuple(prompts[1])] == other[tuple(prompts[1])]
    assert first[tuple(prompts[0])][0] != other[tuple(prompts[0])][0]


@pytest.mark.parametrize("suffix", [(), (7, 8, 9)])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_sampled_prompt_is_answered_in_its_row(suffix, num_rows):
    """Some of them end by an end token, which a suffix replaces, others by their number."""
    ends, given = set(range(0, VOCAB, 12)), prompts_of([6, 9, 4, 2, 3])
    texts = written([Task(prompt, 8, 5, suffix) for prompt in given], ends, num_rows)

    sampled = [text.prompt[len(text.task.prompt) : len(text.prompt) - len(suffix)] for text in texts]
    lengths = {len(each) for each in sampled}
    assert max(lengths) == 5
    assert len(lengths) > 1
    for text, tokens in zip(texts, sampled, strict=True):
        assert text.prompt[: len(text.task.prompt)] == text.task.prompt
        assert text.prompt[len(text.prompt) - len(suffix) :] == list(suffix)
        assert not set(tokens if suffix else tokens[:-1]) & ends
        expected = (
            models()[1]
            .generate(
                torch.tensor([text.prompt]),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=sorted(ends),
                pad_token_id=0,
            )[0, len(text.prompt) :]
            .tolist()
        )
        assert text.tokens == expected


def test_caches_are_bounded(monkeypatch):
    loaded, module = models()[0], "yggdrasil.calibration.row_writer"
    each = cache_bytes(loaded, 640)
    monkeypatch.setattr(f"{module}.available_bytes", lambda: None)
    assert rows_that_fit(loaded, 640) == 64
    monkeypatch.setattr(f"{module}._MOST_BYTES", 5 * each)
    assert rows_that_fit(loaded, 640) == 5
    monkeypatch.setattr(f"{module}.available_bytes", lambda: 12 * each)
    assert rows_that_fit(loaded, 640) == 3
    monkeypatch.setattr(f"{module}.available_bytes", lambda: 0)
    assert rows_that_fit(loaded, 640) == 1
    assert sum(cache.nbytes for caches in Rows(loaded, 3, 640)._caches for cache in caches) == 3 * each


def test_a_pass_reads_few_prompts(monkeypatch):
    monkeypatch.setattr("yggdrasil.calibration.row_writer._READ", 8)
    passes, read = [], Rows.read
    monkeypatch.setattr(Rows, "read", lambda *given: passes.append(len(given[3])) or read(*given))
    written([Task(prompt, 4) for prompt in prompts_of([5, 5, 5, 5, 20, 5])], (), 8)
    assert passes[:4] == [1, 2, 2, 1]


@pytest.mark.parametrize("num_rows", [0, 4])
def test_nothing_to_write(num_rows):
    assert written([], (), num_rows or None) == []
