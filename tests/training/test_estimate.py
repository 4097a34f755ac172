"""What a drafter in training would save: by the costs of a plan of its target on this machine."""

import os
from dataclasses import replace

import pytest
from head_files import eagle_config, published_tensors, write_head

from yggdrasil.artifacts import current_machine
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.scheduling.plan import Costs, Expectation, ModelRef, Plan, Shapes
from yggdrasil.scheduling.stages import DEFAULT_ORDER
from yggdrasil.training.estimate import estimate_from_plans

COSTS = Costs(128, 2.0, {1: 1.0}, {1: 10.0, 2: 10.0, 4: 12.0, 8: 20.0}, 1.0, 10.5, model_free_overhead_ms=0.5)


@pytest.fixture
def head(tmp_path):
    config = eagle_config()
    return write_head(tmp_path / "head", config, published_tensors(config))


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Saves plans of a target, each a second after the one before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("YGGDRASIL_CACHE", raising=False)
    times = iter(range(1000, 2000))

    def save(name, drafter=None, **changes):
        drafters = (
            [StatisticsOptions()] if drafter is None else [ModelRef(str(drafter), "1" * 16, 1), StatisticsOptions()]
        )
        costs = replace(COSTS, head_ms=0.0, draft_ms={}, model_free_overhead_ms=None) if drafter is None else COSTS
        widths = () if drafter is None else (1,)
        shapes = Shapes(draft_widths=widths, max_depth=4, candidates=4, verify_widths=(1, 2, 4, 8))
        fields = {
            "name": name, "machine": current_machine(), "versions": {}, "dtype": "bfloat16",
            "target": ModelRef("a/target", "f" * 16, 1), "drafters": drafters, "tokenizer": "0" * 16, "shapes": shapes,
            "stages": DEFAULT_ORDER, "objective": "latency", "depth_from": "mean", "predictor": "../p",
            "costs": [costs], "predicted": Expectation("plain", 1.0, 1.0, 1.0),
        } | changes  # fmt: skip
        plan = Plan(**fields)
        path = tmp_path / "yggdrasil" / "artifacts" / "plans" / name / f"{plan.machine.slug}.yaml"
        path.parent.mkdir(parents=True)
        plan.save(path)
        at = next(times)
        os.utime(path, (at, at))
        return path

    return save


def estimated(device="cpu", weights="full", kind="eagle3"):
    return estimate_from_plans("f" * 16, weights, device, 0.1, kind)


def test_chains_of_every_length_cost_what_was_measured(save, head):
    save("drafted", head)
    found = estimated()

    # One guess: 10 ms a plain step; 2 for the first pass, 10 for two rows, 1 between.
    assert found.speedups([0.5, 0.5, 0.2]) == pytest.approx([1.0, 10.5 / 13 * 1.5, 10.5 / 16 * 1.75, 10.5 / 17 * 1.8])
    assert found.describe([0.5, 0.5, 0.2]) == (
        "this head alone would decode 1.21 times as fast as plain decoding, with a chain of 1 drafted token (by the "
        "step costs of plan drafted)"
    )
    assert found.describe([0.9, 0.9, 0.9]).startswith(
        "this head alone would decode 2.12 times as fast as plain decoding, with a chain of 3 drafted tokens (by"
    )
    assert found.describe([0.1, 0.1]).startswith("this head alone would not speed up decoding (by")
    assert len(found.speedups([0.5] * 20)) == 8, "no chain is longer than the widest pass"


def test_what_no_plan_has_measured_is_reckoned_by_weights(save, head):
    """A pass of 1 ms, a tenth of the target's."""
    save("counts")

    assert estimated().speedups([0.5, 0.5]) == pytest.approx([1.0, 10.5 / 12 * 1.5, 10.5 / 15 * 1.75])
    of_a_block = estimated(kind="dflash").speedups([0.5, 0.5])
    assert of_a_block == pytest.approx([1.0, 10.5 / 12 * 1.5, 10.5 / 14.01 * 1.75]), "one pass drafts both"
    assert "by the step costs of plan counts and a draft pass estimated from its size" in estimated().describe([0.5])
    save("drafted", head)
    assert estimated().plan == "drafted"
    save("later")
    assert estimated().plan == "drafted", "one that has measured such a drafter comes first"


def test_a_plan_on_the_usual_weights_comes_first(save, head):
    save("rounded", head, target=ModelRef("a/target", "f" * 16, 1, "q8_0"))
    assert estimated().plan == "rounded", "better than none"
    save("usual")
    save("rounded-later", head, target=ModelRef("a/target", "f" * 16, 1, "q8_0"))
    assert estimated().plan == "usual"
    assert estimated(weights="q8_0").plan == "rounded-later"


def test_plans_of_other_targets_machines_and_devices_tell_nothing(save, head):
    save("other-target", target=ModelRef("a/target", "e" * 16, 1))
    save("other-device", device="cuda")
    elsewhere = replace(current_machine(), cpu="another")
    save("elsewhere", machine=elsewhere)
    damaged = save("damaged")
    damaged.write_text(damaged.read_text().replace("10.0", "1.0"))

    assert estimated() is None
    assert estimated(device="cuda").plan == "other-device"
