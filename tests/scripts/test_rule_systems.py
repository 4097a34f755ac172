"""Acceptance rules and exactness modes side by side: what is equal to what, and what each row says of its rule."""

import pytest
from bench_systems import Sample, run_systems
from own_drafter import Nobody
from rule_systems import EQUAL_TO_PLAIN, MODES, RULES, mode_group, rule_group, summarise_group
from tiny_pair import TEXT

from yggdrasil.acceptance.speculation import LOSSY_RULES
from yggdrasil.drafters import NGramDrafter
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

PROMPTS = {"a": TEXT[:9], "b": TEXT[9:30]}
COUNT = 24
EGT = FixedPolicy(TreeShape(2, 3, 8))


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr("bench_systems.SETTLE_SECONDS", 0.0)


def rows_of(*groups):
    samples: list[Sample] = []
    systems = [system for group in groups for system in group.systems]
    run_systems(systems, PROMPTS, COUNT, lambda _, found: samples.extend(found), warm_up=False)
    samples = [Sample.from_dict(sample.as_dict()) for sample in samples]
    return [{row["system"]: row for row in summarise_group(group, samples)} for group in groups]


def test_every_rule_at_every_temperature(pair):
    decoder = pair.decoder(PLAIN_POLICY)
    greedy, warm = rows_of(rule_group(decoder, 0.0), rule_group(decoder, 40.0))

    assert list(greedy) == [f"{name}, T=0" for name in RULES]
    assert list(warm) == [f"{name}, T=40" for name in RULES]
    for rows, end in ((greedy, "T=0"), (warm, "T=40")):
        lossy = [name for name, row in rows.items() if not row["lossless"]]
        assert lossy == [f"{name}, {end}" for name in LOSSY_RULES]
        for name in ("off", "match, by plan", "match", "match, k-ary"):
            assert rows[f"{name}, {end}"]["same_as_plain"] == 2
        assert rows[f"off, {end}"]["ratio_to_ours"]["median"] == 1.0
        assert rows[f"off, {end}"]["aal"] == 1.0
        assert rows[f"match, by plan, {end}"]["aal"] == 1.0  # this one rests
        assert rows[f"match, {end}"]["aal"] > 1.0
    drawn = [f"{name}, T=0" for name in ("leviathan", "specinfer", "sequoia")]
    assert all(greedy[name]["same_as_plain"] == 2 for name in drawn)  # at temperature 0 there is nothing to draw
    assert warm["relaxed, T=40"]["same_as_plain"] < 2


def test_modes_keep_what_they_promise_and_say_what_they_did(pair):
    (rows,) = rows_of(mode_group(pair.decoder(EGT), tolerance=30.0))

    assert list(rows) == list(MODES)
    assert all(rows[name]["verify_decode_mismatches"] == 0 for name in EQUAL_TO_PLAIN)
    assert rows["strict"]["near_ties"] == rows["strict"]["width_one_passes"] > 0
    assert rows["fast"]["near_ties"] == 0
    assert rows["fast"]["ratio_to_ours"]["median"] == 1.0
    assert {name: row["family"] for name, row in rows.items() if "fixed" in name} == {
        "off, fixed-width": "fixed-width", "fixed-width": "fixed-width",
    }  # fmt: skip


def test_steps_that_verify_one_token_have_no_modes_to_compare(pair):
    decoder = pair.decoder(
        PLAIN_POLICY, Shapes(max_length=64, max_depth=3, draft_widths=(), verify_widths=(1,)), drafter=None
    )
    with pytest.raises(YggdrasilError, match="verify one token alone, so there is nothing to compare; give another"):
        mode_group(decoder, tolerance=0.1)


@pytest.mark.parametrize(
    ("drafter", "rules"),
    [(Nobody(), ["off", "match, by plan", "match", *LOSSY_RULES]), (None, ["off", "match, by plan"])],
    ids=["no model", "no drafter"],
)
def test_rules_that_have_nothing_to_decide_on_are_left_out(pair, drafter, rules):
    (rows,) = rows_of(rule_group(pair.decoder(PLAIN_POLICY, drafter=drafter, model_free=NGramDrafter()), 0.0))

    assert [name.removesuffix(", T=0") for name in rows] == rules
