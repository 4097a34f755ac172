"""Systems side by side: turns, ratios, and what counts as equal."""

import pytest
from bench_systems import Continuation, EngineSystem, Sample, equality, judge_by_replay, run_systems, summarise_systems
from tiny_pair import TEXT

from yggdrasil.bench.compare import encode_prompts
from yggdrasil.compiler.compiled import BuildClock
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.prompts import Prompt
from yggdrasil.tree.shape import TreeShape

PROMPTS = {"a": TEXT[:9], "b": TEXT[9:30], "c": TEXT[30:50]}
COUNT = 24


class Scripted:
    """A system whose tokens and times are given; it records its calls."""

    def __init__(self, name, family, is_plain, tpot_ms, tokens=(1, 2, 3), calls=None):
        self.name, self.family, self.is_plain = name, family, is_plain
        self._answer = Continuation(list(tokens), 1.0, tpot_ms, 6, 3)
        self._calls = calls if calls is not None else []

    def decode(self, prompt, max_new_tokens):
        self._calls.append((self.name, tuple(prompt), max_new_tokens))
        return self._answer


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr("bench_systems.SETTLE_SECONDS", 0.0)


def test_every_system_sees_every_prompt_behind_a_short_run_of_its_own():
    calls, seen = [], []
    systems = [Scripted(name, "one", False, 1.0, calls=calls) for name in "xyz"]

    run_systems(systems, PROMPTS, COUNT, lambda prompt, samples: seen.append((prompt, [s.system for s in samples])))

    backwards = tuple(reversed(PROMPTS["a"]))  # later calls must not find it cached
    assert calls[:3] == [(name, backwards, COUNT) for name in "xyz"]  # warm-up, uncounted
    assert [(prompt, sorted(names)) for prompt, names in seen] == [(prompt, ["x", "y", "z"]) for prompt in PROMPTS]
    timed = [(name, PROMPTS[prompt], count) for prompt, names in seen for name in names for count in (8, COUNT)]
    assert calls[3:] == [(name, tuple(prompt), count) for name, prompt, count in timed]


def test_no_system_has_a_place_of_its_own():
    """Else one is always decoded behind the heaviest. The order is the same in every run, also of one that goes on."""
    systems = [Scripted(str(i), "one", False, 1.0, calls=[]) for i in range(12)]
    prompts = {str(i): TEXT[i : i + 5] for i in range(30)}

    def orders(some):
        found = {}
        run_systems(systems, some, 3, lambda prompt, samples: found.update({prompt: [s.system for s in samples]}))
        return found

    whole = orders(prompts)
    places = [order.index("0") for order in whole.values()]
    behind = {order[place - 1] for order, place in zip(whole.values(), places, strict=True) if place}
    assert len(set(places)) > 6
    assert len(behind) > 6
    assert orders({prompt: prompts[prompt] for prompt in list(prompts)[20:]}) == dict(list(whole.items())[20:])


def test_untimed_runs_are_not_warmed_up(monkeypatch):
    monkeypatch.setattr("bench_systems.sleep", lambda _: pytest.fail("there is nothing to settle for"))
    calls = []
    run_systems([Scripted("x", "one", False, 1.0, calls=calls)], PROMPTS, 3, lambda *_: None, is_timed=False)

    assert [prompt for _, prompt, _ in calls] == list(PROMPTS.values())


def test_figures_of_a_comparison():
    systems = [
        Scripted("ours", "one", False, 2.0),
        Scripted("plain", "one", True, 5.0),
        Scripted("rival", "two", False, 3.0, tokens=(1, 2, 4)),
        Scripted("rival, plain", "two", True, 4.0, tokens=(1, 2, 4)),
        Scripted("rival, wrong", "two", False, 4.0, tokens=(1, 2, 5)),
        Scripted("lonely", "three", False, 1.0),
    ]
    samples: list[Sample] = []
    run_systems(systems, PROMPTS, 3, lambda _, found: samples.extend(found))
    rows = {row["system"]: row for row in summarise_systems(systems, samples, "ours")}

    assert [(row["same_as_plain"], row["same_as_ours"]) for row in rows.values()] == [
        (3, 3), (3, 3), (3, 0), (3, 0), (0, 0), (None, 3),
    ]  # fmt: skip
    assert {name: row["ratio_to_ours"]["median"] for name, row in rows.items()} == {
        "ours": 1.0, "plain": 2.5, "rival": 1.5, "rival, plain": 2.0, "rival, wrong": 2.0, "lonely": 0.5,
    }  # fmt: skip
    assert all(row["aal"] == 2.0 and row["prompts"] == 3 for row in rows.values())


def test_a_run_that_leaves_its_plain_one_is_replayed(pair):
    """A token the target nearly chose is a tie; another is a fault. A family without a plain run is not judged."""
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 3, 8)))
    text = pair.reference(PROMPTS["a"], 6)
    wrong = [*text[:3], (text[3] + 1) % 96, *text[4:]]
    systems = [
        Scripted("plain", "other", True, 1.0, tokens=text),
        Scripted("same", "other", False, 1.0, tokens=text),
        Scripted("wrong", "other", False, 1.0, tokens=wrong),
        Scripted("lonely", "third", False, 1.0, tokens=wrong),
    ]
    samples: list[Sample] = []
    prompts = {"a": PROMPTS["a"]}
    run_systems(systems, prompts, 6, lambda _, found: samples.extend(found))
    rows = {
        row["system"]: row for row in summarise_systems(systems, samples, "plain", judge_by_replay(decoder, prompts))
    }

    assert [len(row["partings"]) for row in rows.values()] == [0, 0, 1, 0]
    (parting,) = rows["wrong"]["partings"]
    assert (parting["prompt"], parting["position"], parting["verdict"]) == ("a", 3, "fault")
    assert parting["replayed_token"] == parting["plain_token"] == text[3]
    assert [equality(row) for row in rows.values()] == ["1 of 1", "1 of 1", "0 of 1, faults in 1", "-"]
    tied = {**rows["wrong"], "partings": [{**parting, "verdict": "tie"}]}
    assert equality(tied) == "0 of 1, a tie in 1"


def test_ratios_are_taken_prompt_by_prompt():
    def sample(prompt, system, tpot_ms):
        return Sample(prompt, system, Continuation([1], 1.0, tpot_ms, 6, 3), 0)

    systems = [Scripted("ours", "one", False, 0.0), Scripted("rival", "two", True, 0.0)]
    samples = [
        sample("a", "ours", 1.0),
        sample("a", "rival", 2.0),
        sample("b", "rival", 80.0),
        sample("b", "ours", 10.0),
    ]
    row = summarise_systems(systems, samples, "ours")[1]

    assert row["ratio_to_ours"]["median"] == pytest.approx((2 + 8) / 2)
    assert row["total_ratio_to_ours"] == pytest.approx((2 + 80) / (1 + 10))


def test_a_text_that_ends_with_the_prefills_token_has_no_ratio():
    systems = [Scripted("ours", "one", False, 0.0), Scripted("rival", "two", True, 0.0)]
    samples = [Sample("a", name, Continuation([1], 1.0, 0.0, 0, 0), 0) for name in ("ours", "rival")]
    for row in summarise_systems(systems, samples, "ours"):
        assert row["ratio_to_ours"]["samples"] == []
        assert row["total_ratio_to_ours"] is None


def test_prompts_are_told_apart_and_leave_room(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 3, 8)))
    limit = decoder.assembly.engine.max_length
    with pytest.raises(YggdrasilError, match="two prompts have the id a; ids tell samples apart"):
        encode_prompts(decoder, [Prompt("a", "x"), Prompt("a", "y")], None)
    long = Prompt("a", decoder.tokenizer.decode(TEXT[:20]) * limit)
    with pytest.raises(YggdrasilError, match=f"and the context holds {limit}; keep fewer with --max-prompt-tokens"):
        encode_prompts(decoder, [long], limit - 1)
    assert len(encode_prompts(decoder, [long], limit - 2)["a"]) == limit - 2


def test_repeats_are_counted_over_prompt_and_tokens():
    systems = [Scripted("ours", "one", False, 1.0, tokens=(1, 2, 3, 4)), Scripted("loop", "two", True, 1.0, (7,) * 8)]
    samples: list[Sample] = []
    run_systems(systems, {"a": [1, 2, 3, 4], "b": [5]}, 4, lambda _, found: samples.extend(found), is_timed=False)

    assert [row["repeats"] for row in summarise_systems(systems, samples, "ours")] == [1 / 8, 8 / 16]


def test_samples_survive_a_file():
    sample = Sample("a", "ours", Continuation([1, 2], 1.5, 2.5, 1, 1), 1)

    assert Sample.from_dict(sample.as_dict()) == sample


def test_our_engine_as_a_system(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 3, 8)))
    tree, plain = EngineSystem("tree", decoder), EngineSystem("plain", decoder, is_plain=True)
    by_tree, one_by_one = (system.decode(TEXT[:20], COUNT) for system in (tree, plain))

    assert by_tree.tokens == one_by_one.tokens == pair.reference(TEXT[:20], COUNT)
    assert one_by_one.passes == by_tree.decoded == COUNT - 1
    assert by_tree.passes < COUNT - 1


@pytest.mark.parametrize(("num_built", "num_asked"), [(0, 3), (1, 4), (2, None)])
def test_a_time_in_which_a_step_was_built_does_not_count(monkeypatch, num_built, num_asked):
    """The first prompt is decoded to warm up, then shortly, then for its time; built twice, there is no comparison."""
    system, samples = Scripted("lazy", "one", True, 2.0), []
    decode, counts = system.decode, iter(range(100))

    def building(prompt, count):
        if 2 <= next(counts) < 2 + num_built:
            monkeypatch.setattr(BuildClock, "ns", BuildClock.ns + 1)
        return decode(prompt, count)

    monkeypatch.setattr(system, "decode", building)
    if num_asked is None:
        with pytest.raises(YggdrasilError, match="while lazy on prompt a was timed, so the comparison is not reported"):
            run_systems([system], {"a": [1]}, 4, lambda _, found: samples.extend(found))
        assert samples == []
        return
    run_systems([system], {"a": [1]}, 4, lambda _, found: samples.extend(found))

    assert len(samples) == 1
    assert len(system._calls) == num_asked
