"""Whatever a request asks for, speculation does not show in its output; plain decoding is what transformers means."""

import re
from collections import Counter

import pytest
import torch
from acceptance.enumeration import distance, exact_law
from tiny_pair import TEXT, VOCAB_SIZE, byte_tokenizer
from transformers import LogitsProcessorList

from yggdrasil.acceptance.sampling import Constraint, SamplingParams
from yggdrasil.acceptance.speculation import Speculation
from yggdrasil.engine import host_acceptance
from yggdrasil.engine.targets.logit_target import LogitTarget
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

PROMPT = TEXT[:20]
EGT = FixedPolicy(TreeShape(2, 3, 8))
COUNT = 24
WARM = 40.0  # the tiny models are sure of themselves: at this temperature they hesitate


class PreferLow:
    """A caller's own processor: favours small token numbers, the more the longer the text."""

    def __call__(self, input_ids, scores):
        return scores - 0.02 * input_ids.shape[1] * torch.arange(scores.shape[1])


SETTINGS = {
    "greedy": SamplingParams(logprobs=3),
    "warm": SamplingParams(temperature=WARM, seed=1),
    "top-p": SamplingParams(temperature=0.7 * WARM, top_p=0.9, seed=2),
    "top-k": SamplingParams(temperature=WARM, top_k=3, seed=2**64 - 1),
    "min-p": SamplingParams(temperature=1.5 * WARM, min_p=0.1, seed=4, logprobs=0),
    "typical": SamplingParams(temperature=WARM, typical_p=0.8, seed=5),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=9.0, frequency_penalty=4.0),
    "bias": SamplingParams(temperature=WARM, seed=6, logit_bias={7: 60.0, 9: -400.0}, bad_words=("e", (11, 12))),
    "own": SamplingParams(temperature=WARM, seed=7, logits_processors=(PreferLow(),), min_new_tokens=30),
}
DRAFTING = {
    "EGT": Speculation(),
    "k-ary": Speculation(expansion=(3, 1, 1)),
    "chain": Speculation(expansion=(1, 1, 1)),
    "fixed width": Speculation(exactness="fixed-width"),
    "strict": Speculation(exactness="strict", tolerance=30.0),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_speculation_does_not_show(pair, setting):
    decoder, sampling = pair.decoder(EGT, eos=[40]), SETTINGS[setting]
    plain = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, speculation=False)

    assert plain.metrics.aal == 1
    for speculation in DRAFTING.values():
        tree = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling, speculation=speculation)
        assert (tree.tokens, tree.text, tree.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)
        assert [entry.token for entry in tree.logprobs or ()] == [entry.token for entry in plain.logprobs or ()]
        for ours, theirs in zip(tree.logprobs or (), plain.logprobs or (), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-3)


def test_settings_and_seeds_matter(pair):
    decoder = pair.decoder(EGT)
    texts = {
        name: decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling).tokens
        for name, sampling in SETTINGS.items()
    }
    other = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=SamplingParams(temperature=WARM, seed=8)).tokens
    accepted = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=SETTINGS["top-p"]).metrics.accepted

    assert texts["greedy"] == pair.reference(PROMPT, COUNT)
    assert len({tuple(tokens) for tokens in [*texts.values(), other]}) == len(SETTINGS) + 1
    assert accepted > 0


def test_a_seed_of_the_systems_own_is_told(pair):
    decoder, warm = pair.decoder(EGT), SamplingParams(temperature=WARM)
    first, second = (decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=warm) for _ in range(2))
    again = SamplingParams(temperature=WARM, seed=first.metrics.decoding.seed)

    assert first.tokens != second.tokens
    assert decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=again).tokens == first.tokens


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"bad_words": ((12, 7), (57,))}, {"bad_words_ids": [[12, 7], [57]]}),
        ({"logit_bias": {7: 80.0, 30: -50.0}}, {"sequence_bias": [[[7], 80.0], [[30], -50.0]]}),
        ({"min_new_tokens": 12}, {"min_new_tokens": 12}),
        ({"logits_processors": (PreferLow(),)}, {"logits_processor": LogitsProcessorList([PreferLow()])}),
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_mean_what_transformers_means(pair, ours, theirs):
    eos = pair.reference(PROMPT, COUNT)[5:6] if "min_new_tokens" in ours else []
    decoder, inputs = pair.decoder(EGT, eos=eos), torch.tensor([PROMPT])
    expected = pair.plain_target.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=COUNT,
        eos_token_id=eos or None, pad_token_id=0, **theirs,
    )[0, len(PROMPT) :].tolist()  # fmt: skip

    assert expected != pair.reference(PROMPT, len(expected))
    for speculation in (False, True):
        found = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=SamplingParams(**ours), speculation=speculation)
        assert found.tokens == expected


def test_logprobs_are_the_bare_models(pair):
    sampling = SamplingParams(temperature=WARM, seed=3, logprobs=2, repetition_penalty=1.5)
    result = pair.decoder(EGT).generate(PROMPT, max_new_tokens=12, sampling=sampling)
    with torch.no_grad():
        logits = pair.plain_target(torch.tensor([[*PROMPT, *result.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)

    assert len(result.logprobs) == 12
    for entry, token, row in zip(result.logprobs, result.tokens, expected, strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=2e-3)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=2e-3)


@pytest.mark.parametrize(("rule", "expansion"), [("leviathan", (1,)), ("specinfer", (2,)), ("sequoia", (2,))])
def test_the_joint_law_through_the_engine(pair, monkeypatch, rule, expansion):
    """The real drafter and the real steps, with every outcome of every coin."""
    params = SamplingParams(temperature=4 * WARM, top_k=2, seed=0)
    decoder, prompt = pair.decoder(EGT), list(TEXT[:5])
    speculation = Speculation(rule=rule, expansion=expansion)
    accepted = Counter()

    def run(coins):
        monkeypatch.setattr(host_acceptance, "SeededCoins", lambda seed: coins)
        result = decoder.generate(prompt, max_new_tokens=3, sampling=params, speculation=speculation)
        accepted[result.metrics.accepted] += 1
        return tuple(result.tokens)

    def law_after(tokens):
        with torch.no_grad():
            best = (pair.plain_target(torch.tensor([[*prompt, *tokens]])).logits[0, -1] / (4 * WARM)).topk(2)
        return zip(best.indices.tolist(), best.values.double().softmax(-1).tolist(), strict=True)

    expected = Counter({(): 1.0})
    for _ in range(3):
        expected = Counter(
            {(*text, t): p * q for text, p in expected.items() for t, q in law_after(text)}
        )  # fmt: skip
    found = exact_law(run)

    assert distance(found, expected) < 1e-4
    assert set(accepted) > {0}


@pytest.fixture
def coarse(monkeypatch):
    """Wide passes round their logits: what kernels that depend on the width do, a thousand times stronger."""
    run_tree = LogitTarget.run_tree

    def rounded(self, width):
        layout, logits, *rest = run_tree(self, width)
        return [layout, (logits / 60).round() * 60, *rest]

    monkeypatch.setattr(LogitTarget, "run_tree", rounded)


def test_strict_decides_near_ties_by_a_width_one_pass(pair, coarse):
    decoder, seen = pair.decoder(EGT), SamplingParams(logprobs=0)
    options = {"max_new_tokens": 40, "sampling": seen}
    plain = decoder.generate(PROMPT, speculation=False, **options)
    fast = decoder.generate(PROMPT, **options)
    strict = decoder.generate(PROMPT, speculation=Speculation(exactness="strict", tolerance=61.0), **options)
    audit = decoder.generate(PROMPT, speculation=Speculation(audit=True, tolerance=61.0), **options)

    assert plain.tokens == strict.tokens == pair.reference(PROMPT, 40)
    assert fast.tokens != plain.tokens
    assert audit.tokens == fast.tokens
    assert strict.logprobs is not None
    for report in (strict.metrics.decoding, audit.metrics.decoding):
        assert report.near_ties >= report.flips > 0
    assert strict.metrics.aal > 1
    assert fast.metrics.decoding.flips is None


def test_fixed_width_makes_plain_decoding_like_verification(pair, coarse):
    decoder, seen = pair.decoder(EGT), SamplingParams(logprobs=0)
    results = [
        decoder.generate(
            PROMPT, max_new_tokens=40, sampling=seen, speculation=Speculation(rule=rule, exactness="fixed-width")
        )
        for rule in ("off", "match")
    ]

    assert results[0].tokens == results[1].tokens != pair.reference(PROMPT, 40)
    assert results[1].metrics.aal > results[0].metrics.aal == 1


def test_strict_needs_a_tolerance(pair):
    with pytest.raises(YggdrasilError, match="measure it with `yggdrasil parity`"):
        pair.decoder(EGT).start(PROMPT, speculation=Speculation(exactness="strict"))


@pytest.mark.parametrize("rule", ["typical", "relaxed"])
def test_lossy_rules_say_so(pair, rule):
    decoder = pair.decoder(EGT)
    warm = SamplingParams(temperature=WARM, seed=1)
    lossy = decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=warm, speculation=Speculation(rule=rule))
    report = lossy.metrics.as_dict()["decoding"]

    assert (report["rule"], report["lossless"]) == (rule, False)
    assert lossy.metrics.aal > decoder.generate(PROMPT, max_new_tokens=COUNT, sampling=warm).metrics.aal
    assert decoder.generate(PROMPT, max_new_tokens=2).metrics.decoding.lossless


def test_relaxed_acceptance_waits_for_the_thinking_phase(pair):
    with pytest.raises(YggdrasilError, match="<think> and </think>, which this tokenizer lacks"):
        pair.decoder(EGT).start(PROMPT, speculation=Speculation(rule="relaxed", thinking_only=True))


@pytest.mark.parametrize("pattern", ["(ab|on|é)+[0-9]{3}\\.", "[a-e ]{4,9}", "Then on, (it|is)!*"])
def test_a_constraint_is_kept_exactly(pair, pattern):
    pytest.importorskip("llguidance")
    decoder = pair.decoder(EGT, eos=[0])
    for sampling in (
        SamplingParams(constraint=Constraint("regex", pattern), logprobs=0),
        SamplingParams(constraint=Constraint("regex", pattern), temperature=4 * WARM, seed=5),
    ):
        plain = decoder.generate(PROMPT, max_new_tokens=60, sampling=sampling, speculation=False)
        for speculation in (Speculation(), Speculation(expansion=(2, 2)), Speculation(rule="sequoia")):
            tree = decoder.generate(PROMPT, max_new_tokens=60, sampling=sampling, speculation=speculation)
            if speculation.rule == "match":
                assert tree.tokens == plain.tokens
            assert tree.finish_reason == "length" or re.fullmatch(pattern, tree.text)
            assert byte_tokenizer().decode(tree.tokens, skip_special_tokens=True) == tree.text


@pytest.mark.parametrize(
    ("usual", "depth", "widths", "passes", "fitting"),
    [
        ((1, 1, 1, 1), 4, (1, 8), None, (1, 1, 1, 1)),
        ((1, 1, 1, 1), 2, (1, 8), None, (1, 1)),
        ((2, 1, 1), 4, (1, 2, 4), None, (2,)),
        ((2, 1, 1), 4, (1, 6), None, (2, 1)),
        ((2, 1, 1), 4, (1, 2), None, (2,)),
        ((2, 1, 1), 4, (1, 4, 8), 4, (2,)),
    ],
)
def test_what_a_rule_draws_by_itself_fits_the_plan(usual, depth, widths, passes, fitting):
    shapes = Shapes(draft_widths=(1,), verify_widths=widths, max_depth=depth)

    assert host_acceptance.fitting_expansion(usual, shapes, passes) == fitting


def test_what_a_rule_draws_by_itself_fits_a_fixed_width(pair):
    way = Speculation(rule="specinfer", exactness="fixed-width", fixed_width=4)
    sampling = SamplingParams(temperature=1.0, seed=3)

    assert len(pair.decoder(EGT).generate(PROMPT, max_new_tokens=6, sampling=sampling, speculation=way).tokens) == 6


@pytest.mark.parametrize(
    ("sampling", "speculation", "sentence"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, {}, "logit_bias has token 96, but the vocabulary ends at 95"),
        ({"bad_words": ((99,),)}, {}, r"bad_words holds \(99,\)"),
        ({}, {"rule": "leviathan", "expansion": (2,)}, "leviathan takes a chain"),
        ({}, {"rule": "sequoia", "exactness": "strict"}, "exactness strict is for the rule match"),
        ({}, {"expansion": (4, 4, 4)}, "gives 85 nodes in 3 levels; the shapes hold 16 nodes and 4 levels"),
        ({}, {"exactness": "fixed-width", "fixed_width": 5}, "fixed_width is 5; the plan's verify widths are"),
        ({"constraint": Constraint("regex", "(a")}, {}, "the regex is not valid"),
    ],
)
def test_bad_settings_are_refused(pair, sampling, speculation, sentence):
    with pytest.raises(YggdrasilError, match=sentence):
        pair.decoder(EGT, eos=[0]).start(
            PROMPT, sampling=SamplingParams(**sampling), speculation=Speculation(**speculation)
        )
