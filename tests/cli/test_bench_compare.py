"""A comparison that is interrupted shows and keeps what it has, marked."""

import json
from types import SimpleNamespace

import pytest

from yggdrasil import SamplingParams
from yggdrasil.bench import compare as bench
from yggdrasil.bench.divergence import judge_divergence
from yggdrasil.cli import bench_output as compare
from yggdrasil.errors import Interrupted, YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.prompts import Prompt
from yggdrasil.tree.shape import TreeShape

PROMPTS = [Prompt(str(i), text) for i, text in enumerate(("hello there", "tons of tin", "a red hat", "one more"))]
SETTINGS = {"max_new_tokens": 6, "max_prompt_tokens": None, "ignore_eos": True}


@pytest.fixture
def decoder(pair):
    return pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))


def interrupt_at(monkeypatch, number):
    """Ctrl-C while prompt ``number`` is judged, which follows its two runs."""
    judge = bench.judge_divergence
    left = iter(range(number))

    def judge_or_interrupt(*arguments, **named):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return judge(*arguments, **named)

    monkeypatch.setattr(bench, "judge_divergence", judge_or_interrupt)


def compared(decoder, out):
    compare.compare_with_plain(decoder, PROMPTS, SETTINGS, out, imports_mb=0.0)


def test_an_interrupted_comparison_keeps_the_prompts_that_were_done(decoder, monkeypatch, tmp_path):
    interrupt_at(monkeypatch, 2)

    with pytest.raises(Interrupted, match=r"2 of 4 prompts.*results\.json.*not complete"):
        compared(decoder, tmp_path / "results.json")

    record = json.loads((tmp_path / "results.json").read_text())
    assert record["complete"] is False
    assert [sample["id"] for sample in record["samples"]] == ["0", "1"]


def test_interrupted_without_a_file_it_says_how_to_keep(decoder, monkeypatch):
    interrupt_at(monkeypatch, 2)

    with pytest.raises(Interrupted, match="--json FILE"):
        compared(decoder, None)


def test_interrupted_before_the_first_prompt_nothing_is_kept(decoder, monkeypatch, tmp_path):
    interrupt_at(monkeypatch, 0)

    with pytest.raises(Interrupted, match="nothing to keep"):
        compared(decoder, tmp_path / "results.json")

    assert not (tmp_path / "results.json").exists()


def test_a_whole_comparison_says_so(decoder, tmp_path):
    compared(decoder, tmp_path / "results.json")

    assert json.loads((tmp_path / "results.json").read_text())["complete"] is True


def test_both_ways_of_decoding_sample_the_same_tokens(pair, tmp_path, program, monkeypatch):
    """Without a seed too: bench gives one. The record has what differs from greedy decoding."""
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    monkeypatch.setattr("yggdrasil.cli.bench.open_decoder", lambda *_, **__: decoder)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each.prompt}) + "\n" for each in PROMPTS))
    out = tmp_path / "results.json"
    arguments = ["bench", "any", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "12"]
    assert program(*arguments, "--temperature", "1.5", "--top-k", "50", "--json", str(out))[0] == 0

    record = json.loads(out.read_text())
    assert record["sampling"] == {"temperature": 1.5, "top_k": 50, "seed": 0}
    assert record["matched"] == len(PROMPTS)
    greedy = decoder.generate(PROMPTS[0].prompt, max_new_tokens=12, ignore_eos=True).tokens
    drawn = SamplingParams(temperature=1.5, top_k=50, seed=0)
    assert decoder.generate(PROMPTS[0].prompt, max_new_tokens=12, ignore_eos=True, sampling=drawn).tokens != greedy


def test_a_difference_of_sampled_tokens_is_a_fault(pair, decoder):
    """Near ties of the logits say nothing about tokens between which random numbers decide."""
    drawn = SamplingParams(temperature=5.0, seed=1)
    prompt = decoder.encode("hello there")
    plain = decoder.generate(prompt, max_new_tokens=4, sampling=drawn).tokens
    found = judge_divergence(decoder, prompt, plain, [*plain[:3], (plain[3] + 1) % 90], sampling=drawn)
    assert (found.position, found.verdict, found.replayed_token) == (3, "fault", plain[3])


def test_plans_beside_it_are_kept_with_every_sample(pair, decoder, tmp_path):
    """Without a line on memory: the process holds more than the first plan's."""
    beside = {"other": pair.decoder(FixedPolicy(TreeShape(1, 1, 2)))}
    compare.compare_with_plain(decoder, PROMPTS, SETTINGS, tmp_path / "two.json", imports_mb=0.0, beside=beside)
    compared(decoder, tmp_path / "one.json")
    two, one = (json.loads((tmp_path / name).read_text()) for name in ("two.json", "one.json"))

    assert two["beside"]["other"]["matched"] == 4
    assert two["beside"]["other"]["guesses"] == two["guesses"] == f"model {decoder.assembly.drafter.loaded.name}"
    assert {sample["beside"]["other"]["tree"]["iterations"] > 0 for sample in two["samples"]} == {True}
    assert "memory_mb" not in two
    assert "beside" not in one
    assert "memory_mb" in one


def test_the_command_opens_a_plan_with_its_drafter_and_the_plans_beside_it(program, monkeypatch, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}')
    opened, compared = [], {}

    def open_decoder(source, dtype, drafter="plan", *, force_machine, **_):
        opened.append((source, dtype, drafter, force_machine))
        return SimpleNamespace(plan=SimpleNamespace(name=f"plan {source}", dtype="bfloat16"))

    monkeypatch.setattr("yggdrasil.cli.bench.open_decoder", open_decoder)
    monkeypatch.setattr(compare, "open_decoder", open_decoder)
    monkeypatch.setattr(compare, "compare_with_plain", lambda *_, **options: compared.update(options))
    words = [
        "bench",
        "a",
        "--beside",
        "b",
        "--beside",
        "c",
        "--dtype",
        "float32",
        "--force-machine",
        "--drafter",
        "ngram",
    ]

    assert program(*words, "--prompts", tmp_path / "prompts.jsonl")[0] == 0
    assert opened == [(name, "float32", "ngram" if name == "a" else "plan", True) for name in "abc"]
    assert list(compared["beside"]) == ["plan b", "plan c"]


def test_two_plans_of_one_name_are_refused(decoder, monkeypatch):
    monkeypatch.setattr(decoder, "plan", SimpleNamespace(name="twice"))
    monkeypatch.setattr(compare, "open_decoder", lambda *_, **__: decoder)

    with pytest.raises(YggdrasilError, match="two plans named twice are given with --beside"):
        compare.open_decoders_by_name(["twice", "plans/twice/here.yaml"], None, force_machine=False)


def test_both_ways_end_where_the_model_ends_a_chat(pair):
    """Unless told to go on."""
    policy = FixedPolicy(TreeShape(2, 2, 4))
    answer = pair.decoder(policy).generate(PROMPTS[0].prompt, max_new_tokens=6, ignore_eos=True).tokens
    decoder = pair.decoder(policy, eos=[answer[2]])

    for ignore_eos, length in ((False, answer.index(answer[2]) + 1), (True, 6)):
        (found,) = compare._measure(decoder, PROMPTS[:1], {**SETTINGS, "ignore_eos": ignore_eos})
        assert found.plain.tokens == found.tree.tokens == answer[:length]
