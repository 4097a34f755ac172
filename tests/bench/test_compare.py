"""Plans beside plain decoding and each other: figures of all prompts, and of each category of a file with several."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from tiny_pair import SHAPES, TEXT

from yggdrasil.bench.compare import _STRETCH, _in_turn, compare
from yggdrasil.bench.record import drafter_names
from yggdrasil.bench.summary import summarise, summarise_beside, summarise_categories
from yggdrasil.cli.progress import show_beside, show_categories, show_comparison, show_summary
from yggdrasil.compiler.compiled import BuildClock
from yggdrasil.engine.request import Request
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.predictor.repetition import count_repeated
from yggdrasil.prompts import Place, Prompt
from yggdrasil.scheduling.plan import ModelRef
from yggdrasil.tree.shape import TreeShape


def prompt_of(pair, name, first, category):
    tokenizer = pair.decoder(FixedPolicy(TreeShape(2, 2, 4))).tokenizer
    return Prompt(name, tokenizer.decode(TEXT[first : first + 9]), category)


def test_categories_have_figures_of_their_own(pair):
    prompts = [prompt_of(pair, "a", 0, "qa"), prompt_of(pair, "b", 9, None), prompt_of(pair, "c", 20, "qa")]
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    results = compare(decoder, prompts, 8, lambda _: None, warm_up=False)
    found = summarise_categories(results)

    assert list(found) == ["qa", "none"]
    assert found["qa"] == summarise([results[0], results[2]])
    assert (found["qa"]["prompts"], found["none"]["prompts"]) == (2, 1)
    assert found["qa"]["matched"] == 2
    assert summarise_categories(results[:1]) == {}, "one category is no breakdown"


def test_a_prompt_that_cannot_be_decoded_is_named_before_any_is_timed(pair, monkeypatch):
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    prompts = [prompt_of(pair, "a", 0, "qa"), Prompt("b", "", "qa", place=Place("set.jsonl", 2))]
    monkeypatch.setattr(decoder, "start", lambda *_, **__: pytest.fail("decoded"))

    with pytest.raises(YggdrasilError, match=r"set\.jsonl.*2.* the prompt is empty"):
        compare(decoder, prompts, 8, lambda _: None)


def test_a_comparison_in_which_something_was_built_is_not_reported(pair, monkeypatch):
    """The third request is the first one that is timed."""
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    start, shown, requests = decoder.start, [], []

    def building(*args, **options):
        requests.append(args)
        if len(requests) == 3:
            monkeypatch.setattr(BuildClock, "ns", BuildClock.ns + 1)
        return start(*args, **options)

    monkeypatch.setattr(decoder, "start", building)
    with pytest.raises(YggdrasilError, match="while prompt a was timed, so the comparison is not reported"):
        compare(decoder, [prompt_of(pair, "a", 0, "qa")], 4, shown.append)

    assert shown == []


@pytest.fixture(scope="module")
def results(pair):
    """Three prompts of two categories, whose times are 4 and 8, 1 and 8, 5 and 10 ms a token, ours first."""
    prompts = [prompt_of(pair, "a", 0, "qa"), prompt_of(pair, "b", 9, None), prompt_of(pair, "c", 20, "qa")]
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    found = compare(decoder, prompts, 40, lambda _: None, warm_up=False)
    times = [(4.0, 8.0), (1.0, 8.0), (5.0, 10.0)]
    return [
        replace(result, tree=timed(result.tree, ours), plain=timed(result.plain, plain))
        for result, (ours, plain) in zip(found, times, strict=True)
    ]


def timed(generation, tpot_ms):
    return replace(generation, metrics=replace(generation.metrics, tpot_ms=tpot_ms))


def test_speed_is_shown_prompt_by_prompt_and_over_all(results):
    """Two thirds of the time are two prompts of 2 x; one prompt of 8 x is not the whole."""
    summary, categories = summarise(results), summarise_categories(results)

    assert summary["speedup"] == {"median": 2.0, "low": 2.0, "high": 8.0, "samples": [2.0, 2.0, 8.0]}
    assert summary["total_speedup"] == pytest.approx(26 / 10)
    assert categories["qa"]["total_speedup"] == 2.0
    assert categories["none"]["total_speedup"] == 8.0


def test_what_was_predicted_is_over_all_too(results):
    """A plan that promises what is then measured is right, however much prompts differ."""

    def promised(result):
        metrics = replace(result.tree.metrics, predicted_tpot_ms=result.tree.metrics.tpot_ms)
        return replace(result, tree=replace(result.tree, metrics=metrics))

    kept = [promised(result) for result in results]
    summary, categories = summarise(kept), summarise_categories(kept)

    assert summary["predicted_speedup"] == pytest.approx(summary["total_speedup"])
    assert categories["none"]["predicted_speedup"] == pytest.approx(8.0)
    assert summarise(results)["predicted_speedup"] is None, "a shape that is forced makes no promise"


def test_names_are_shown_as_they_are_and_an_answer_of_one_token_has_no_speed(pair, capsys):
    """Ids and categories come from files: brackets in them are no style. A chat's answer may end at once."""
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    prompts = [prompt_of(pair, "[/b] a", 0, "[/qa]"), prompt_of(pair, "[red] b", 9, None)]

    results = compare(decoder, prompts, 1, show_comparison, warm_up=False)
    show_summary(summarise(results))
    show_categories(summarise_categories(results))
    show_beside("first", summarise(results), {})
    printed = capsys.readouterr()

    assert "[/b] a" in printed.err
    assert "[red] b" in printed.err
    assert "[/qa]" in printed.out
    assert printed.err.count(" - x ") == 2


def test_repeats_stand_beside_every_speed(pair, results, capsys):
    """A tiny random model soon loops; how much of that its text so far gives away is in every table."""
    tokenizer = pair.decoder(FixedPolicy(TreeShape(2, 2, 4))).tokenizer
    for result, first in zip(results, (0, 9, 20), strict=True):
        prompt = tokenizer(tokenizer.decode(TEXT[first : first + 9]))["input_ids"]
        assert result.repeated_share == count_repeated(prompt, result.plain.tokens) / 40
        show_comparison(result)
    summary, categories = summarise(results), summarise_categories(results)
    show_summary(summary)
    show_categories(categories)
    printed = capsys.readouterr()

    assert summary["repeats"] == pytest.approx(sum(result.repeated_share for result in results) / 3)
    assert categories["none"]["repeats"] == results[1].repeated_share
    assert 0.0 < summary["repeats"] < 1.0
    assert all(f"repeats {result.repeated_share:4.0%}" in printed.err for result in results)
    assert printed.out.count("repeats") == 1
    assert re.search(rf"share of tokens that repeat their text +│ {summary['repeats']:.4g}", printed.out)
    assert f"{categories['qa']['repeats']:.0%}" in printed.out


def test_plans_beside_each_other_have_figures_of_their_own(pair, capsys):
    """One of them takes a fifth longer on one prompt and half as long on the other."""
    prompts = [prompt_of(pair, "a", 0, None), prompt_of(pair, "b", 9, None)]
    first, narrow, plain = (pair.decoder(FixedPolicy(TreeShape(*shape))) for shape in ((2, 2, 4), (1, 1, 2), (0, 0, 1)))
    found = compare(first, prompts, 12, lambda _: None, warm_up=False, beside={"narrow": narrow, "none": plain})
    times = [(5.0, 6.0), (8.0, 4.0)]
    results = [
        replace(result, tree=timed(result.tree, ours), beside={"narrow": other_in(result, "narrow", theirs)})
        for result, (ours, theirs) in zip(found, times, strict=True)
    ]
    summary = summarise_beside(results)["narrow"]
    show_beside("first", summarise(results), {"narrow": summary})

    assert [list(result.beside) for result in found] == [["narrow", "none"]] * 2
    assert summarise_beside(found)["narrow"]["aal"] == summarise([result.beside["narrow"] for result in found])["aal"]
    assert summarise_beside(found)["none"]["aal"] == 1.0, "its own decoder decodes"
    assert summarise(found)["aal"] > 1.0
    assert summary["matched"] == 2
    assert summary["time_over_first"]["samples"] == [0.5, 1.2]
    assert summary["total_time_over_first"] == pytest.approx(10 / 13)
    assert "0.769" in capsys.readouterr().out


def test_a_plan_whose_answer_is_one_token_has_no_time_to_compare_with(pair):
    """A near tie may be an end token to one plan and none to another."""
    first, narrow = (pair.decoder(FixedPolicy(TreeShape(*shape))) for shape in ((2, 2, 4), (1, 1, 2)))
    prompts = [prompt_of(pair, "a", 0, None), prompt_of(pair, "b", 9, None)]
    whole, other = compare(first, prompts, 12, lambda _: None, warm_up=False, beside={"narrow": narrow})
    (ended,) = compare(first, prompts[1:], 1, lambda _: None, warm_up=False)
    summary = summarise_beside([whole, replace(ended, beside=other.beside)])["narrow"]

    assert summary == {
        **summarise([whole.beside["narrow"], other.beside["narrow"]]),
        **{name: summarise_beside([whole])["narrow"][name] for name in ("time_over_first", "total_time_over_first")},
    }


def other_in(result, name, tpot_ms):
    other = result.beside[name]
    return replace(other, tree=timed(other.tree, tpot_ms))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_plan_is_always_behind_the_same_other(count):
    names = list("abcd"[:count])
    orders = [_in_turn(names, number) for number in range(2 * count)]

    assert all(sorted(order) == names for order in orders)
    for name in names:
        assert sum(order[0] == name for order in orders) == 2
        for other in set(names) - {name}:
            assert sum(order.index(name) < order.index(other) for order in orders) == count


def test_plans_decode_a_few_iterations_each_in_turn(pair, monkeypatch):
    """Each reads its whole prompt first; plain decoding is the first plan's, now before all of them and now behind."""
    decoders = {
        name: pair.decoder(FixedPolicy(TreeShape(*shape))) for name, shape in (("A", (2, 2, 4)), ("B", (0, 0, 1)))
    }
    prompts = [prompt_of(pair, str(number), number, None) for number in range(8)]
    work = Work(monkeypatch, decoders)
    found = compare(decoders["A"], prompts, 40, lambda _: None, warm_up=False, beside={"B": decoders["B"]})
    stretches = re.findall("a+|b+", work.done)

    assert [work.starts[at : at + 3] for at in range(0, 24, 3)] == [
        "pAB", "ABp", "pBA", "BAp", "pBA", "BAp", "pAB", "ABp",
    ]  # fmt: skip
    assert work.done.startswith("pAB" + "a" * _STRETCH + "b" * _STRETCH)
    assert len(stretches) > 4 * 8, "they go on side by side"
    assert work.done.count("b") == 39 * 8
    assert all(each.metrics.reused_tokens == 0 for result in found for each in (result.tree, result.beside["B"].tree))
    assert all(ahead <= other for ahead, other in work.changes), "whoever has come least far goes on"


class Work:
    """``done``: a letter for each request, a plain one's is p, and a small one for each iteration by a plan.

    ``changes``: tokens of the plan that goes on and of the one before, where another goes on.
    """

    def __init__(self, monkeypatch, decoders):
        self.done, self.changes, self._tokens, self._is_plain = "", [], {}, False
        for name, decoder in decoders.items():
            monkeypatch.setattr(decoder, "start", partial(self._start, decoder.start, name))
            loop = decoder.assembly.engine.loop
            monkeypatch.setattr(loop, "iterate", partial(self._iterate, loop, loop.iterate, name.lower()))

    @property
    def starts(self):
        return re.sub("[ab]", "", self.done)

    def _start(self, start, name, *arguments, **options):
        self._is_plain = not options.get("speculation", True)
        self.done += "p" if self._is_plain else name
        return start(*arguments, **options)

    def _iterate(self, loop, iterate, letter, state, executor):
        if not self._is_plain:
            if self.done[-1] in set("ab") - {letter} and len(self._tokens[self.done[-1]]) < 40:
                self.changes.append((len(loop._stream.tokens), len(self._tokens[self.done[-1]])))
            self.done += letter
            self._tokens[letter] = loop._stream.tokens
        return iterate(state, executor)


def test_one_that_fails_leaves_no_decoder_in_the_middle_of_its_request(pair, monkeypatch):
    first, other = (pair.decoder(FixedPolicy(TreeShape(2, 2, 4))) for _ in range(2))
    work = Work(monkeypatch, {"A": first, "B": other})
    loop = other.assembly.engine.loop
    iterate = loop.iterate

    def failing(*arguments):
        if work.done.count("b") == 3:
            raise YggdrasilError("its weights are damaged")
        return iterate(*arguments)

    monkeypatch.setattr(loop, "iterate", failing)
    with pytest.raises(YggdrasilError, match="weights are damaged"):
        compare(first, [prompt_of(pair, "a", 0, None)], 40, lambda _: None, warm_up=False, beside={"b": other})

    for decoder in (first, other):
        assert decoder.generate(TEXT[:5], max_new_tokens=2).finish_reason == "length", "its turn is free"
        work.done = ""


def test_a_plan_of_a_shorter_context_ends_no_text_before_the_others(pair):
    """Else the end of its context is taken for a token that it has wrong."""
    first = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    short = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)), replace(SHAPES, max_length=40))
    (found,) = compare(first, [prompt_of(pair, "a", 0, None)], 60, lambda _: None, warm_up=False, beside={"b": short})
    longest = 40 - found.plain.prompt_tokens

    assert len(found.plain.tokens) == len(found.tree.tokens) == len(found.beside["b"].tree.tokens) == longest
    assert found.beside["b"].matched


def test_a_prompt_too_long_for_a_plan_beside_is_named_before_any_is_timed(pair, monkeypatch):
    first = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    short = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)), replace(SHAPES, max_length=20))
    text = first.tokenizer.decode(TEXT[:30])
    prompts = [prompt_of(pair, "a", 0, None), Prompt("b", text, None, place=Place("set.jsonl", 2))]
    monkeypatch.setattr(first, "start", lambda *_, **__: pytest.fail("decoded"))

    with pytest.raises(YggdrasilError, match=r"set\.jsonl.*2.*the context holds 20; keep fewer with --max-prompt-tok"):
        compare(first, prompts, 8, lambda _: None, beside={"b": short})


def test_a_decoder_is_not_beside_itself(pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    with pytest.raises(YggdrasilError, match="share a decoder; open it once for each"):
        compare(decoder, [], 4, lambda _: None, beside={"again": decoder})


def test_whoever_leaves_plain_decoding_is_named(pair, monkeypatch):
    first, other = (pair.decoder(FixedPolicy(TreeShape(2, 2, 4))) for _ in range(2))
    own = Request.result

    def wrong(request):
        found = own(request)
        if request._turns is not other._turns:
            return found
        return replace(found, tokens=[*found.tokens[:-1], (found.tokens[-1] + 1) % 90])

    monkeypatch.setattr(Request, "result", wrong)
    (found,) = compare(first, [prompt_of(pair, "a", 0, None)], 6, lambda _: None, warm_up=False, beside={"b": other})

    assert found.matched
    assert found.divergence is None
    assert not found.beside["b"].matched
    assert found.beside["b"].divergence.verdict == "fault"


MODEL = ModelRef("here", "print", 1)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (replace(MODEL, fingerprint="other"), "bfloat16"),
        (replace(MODEL, weights="q8_0"), "bfloat16"),
        (MODEL, "float32"),
    ],
)
def test_plans_of_different_targets_are_not_compared(model, dtype):
    first, other = (
        SimpleNamespace(
            plan=SimpleNamespace(target=model),
            assembly=SimpleNamespace(target=SimpleNamespace(loaded=SimpleNamespace(dtype=dtype))),
        )
        for model, dtype in ((MODEL, "bfloat16"), (model, dtype))
    )

    with pytest.raises(
        YggdrasilError, match="the plan b decodes another target, or the same with other weights or dty"
    ):
        compare(first, [], 4, lambda _: None, beside={"b": other})


@pytest.mark.parametrize(
    ("drafter", "free", "shown"),
    [
        ("head /of/somebody/mine", "text + table", "head mine + text + table"),
        ("model tiny, level by level", None, "model tiny, level by level"),
        (None, "text", "text"),
        (None, None, "nobody"),
    ],
)
def test_results_name_no_place_of_a_drafter(drafter, free, shown):
    named = (None if name is None else SimpleNamespace(name=name) for name in (drafter, free))

    assert drafter_names(SimpleNamespace(**dict(zip(("drafter", "model_free"), named, strict=True)))) == shown
