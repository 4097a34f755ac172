"""Figures from a tiny pair: every number comes from a sample, files are resumed, plots are drawn."""

import json
from dataclasses import replace

import made_up
import pandas as pd
import pytest
from figures.comparisons import best_of_field
from figures.context import OURS, PLAIN, Effort, Figure, FigureContext, open_context
from figures.draw import CSV_VERSION, draw, write_figure
from figures.registry import FIGURES, chosen_figures
from figures.temperatures import STATIC
from tiny_pair import SHAPES, TEXT
from transformers import PreTrainedModel

from yggdrasil.artifacts import current_machine, read_csv
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.scheduling.plan import Costs, Expectation, ModelRef, Plan
from yggdrasil.scheduling.stages import DEFAULT_ORDER
from yggdrasil.tree.shape import TreeShape

EFFORT = Effort(prompts=2, held_back=1, max_new_tokens=10, max_budgets=1, temperatures=(0.0, 30.0))
TREE = FixedPolicy(TreeShape(2, 2, 8))
TEXTS = {"one": {"a": TEXT[:9], "b": TEXT[9:20], "c": TEXT[20:40]}}


def plan_of(target="tiny", drafter="tiny"):
    costs = Costs(128, 0.1, dict.fromkeys(SHAPES.draft_widths, 0.1), dict.fromkeys(SHAPES.verify_widths, 1.0), 0.1, 1.0)
    models = ModelRef(str(target), "", 1), [ModelRef(str(drafter), "", 1)]
    return Plan(
        "tiny", current_machine(), {}, "float32", *models, "", SHAPES, DEFAULT_ORDER, "latency", "mean", "none",
        [costs], Expectation("fixed", 1.0, 1.0, 1.0),
    )  # fmt: skip


@pytest.fixture(scope="module")
def context(pair, tmp_path_factory):
    """What one test has measured others take up."""
    folder = tmp_path_factory.mktemp("figures")
    folders = folder / "target", folder / "drafter"
    for folder, model in zip(folders, (pair.plain_target, pair.plain_drafter), strict=True):
        model.save_pretrained(folder)
    decoder = pair.decoder(TREE)
    decoder.plan, decoder.learned = plan_of(*folders), made_up.learned()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench_systems.SETTLE_SECONDS", 0.0)
        # Compiling transformers' forward pass takes a minute and is not what is tested.
        patch.setattr(PreTrainedModel, "get_compiled_call", lambda model, _: model.__call__)
        yield FigureContext(decoder, TEXTS, folder, EFFORT)


@pytest.mark.parametrize("number", ["4", "5", "6", "11", "12", "13", "14", "15"])
def test_figures_are_made_and_taken_up_again(context, number, monkeypatch):
    made = FIGURES[number](context)
    for figure in made:
        table, plot = write_figure(figure, context.out, context.caption())
        frame = read_csv(table, "figure", CSV_VERSION, figure.y)
        assert {figure.x, "measured"} <= set(frame.columns)
        assert len(frame) == len(figure.frame) > 0
        assert frame[list(figure.y)].notna().any().all()
        assert plot.read_bytes().startswith(b"<?xml")

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("sample_store.run_systems", refuse)
    again = FigureContext(context.decoder, TEXTS, context.out, EFFORT)
    for figure, same in zip(made, FIGURES[number](again), strict=True):
        pd.testing.assert_frame_equal(figure.frame, same.frame)


def test_the_breakdown_names_its_steps(context):
    (figure,) = FIGURES["12"](context)
    frame = figure.frame.set_index("system")

    assert [name[:2] for name in frame.index[:6]] == ["O1", "O2", "O3", "O4", "O5", "O6"]
    assert frame.loc["O3 pruning", "gain"] == pytest.approx(
        frame.loc["O2 compilation", "tpot_ms"] / frame.loc["O3 pruning", "tpot_ms"]
    )
    assert frame.loc["O2 compilation", "gain_in_paper"] == 2.78
    assert frame["aal"].between(1.0, 5.0).all()
    assert frame.loc[PLAIN, "aal"] == 1.0


def test_temperatures_compare_the_same_draws(context):
    """Ours and the static tree write the text that plain sampling writes; the mean ratio is of all temperatures."""
    (figure,) = FIGURES["15"](context)
    frame = figure.frame
    ours, static = (frame[frame["system"] == name].reset_index() for name in (OURS, STATIC))

    assert frame["temperature"].tolist() == [0.0, 0.0, 30.0, 30.0]
    assert (frame["same_as_ours"] == frame["prompts"]).all()
    assert ours["over_static"].tolist() == pytest.approx((static["tpot_ms"] / ours["tpot_ms"]).tolist())
    assert frame["mean_over_static"].eq(ours["over_static"].mean()).all()
    texts = {}
    for value in ("0", "30"):
        samples = json.loads((context.out / "data" / f"temperature-{value}-one.json").read_text())["samples"]
        (texts[value],) = {tuple(s["continuation"]["tokens"]) for s in samples if s["prompt"] == "a"}
    assert texts["0"] != texts["30"], "nothing was drawn"


def test_costs_of_widths_are_the_plans(context):
    latency, speedup = FIGURES["5"](context)

    assert latency.frame["over_width_1"].eq(1.0).all()
    assert set(latency.frame["width"]) == set(SHAPES.verify_widths)
    assert set(speedup.frame["speedup in"]) == {"tokens a pass", "time"}
    assert speedup.frame["speedup"].gt(0).all()


def test_each_baseline_gets_its_own_best_tree():
    rows = [("a", OURS, None, 1.0, 3.0), ("a", PLAIN, None, 9.0, 1.0), ("b", OURS, None, 2.0, 3.0)]
    rows += [
        ("a", "k-ary 8", "k-ary", 5.0, 2.0),
        ("a", "merged 8", "merged", 4.0, 1.5),
        ("b", "k-ary 8", "k-ary", 3.0, 2.0),
    ]
    rows += [(s, f"{t} 8", t, 6.0, 2.0) for s in "ab" for t in ("sequence", "sequoia", "opt-tree", "eagle-2")]
    best = best_of_field(pd.DataFrame(rows, columns=["set", "system", "tree", "tpot_ms", "aal"]))
    specinfer = best[best["name"] == "SpecInfer"].set_index("set")

    assert specinfer["tpot_ms"].to_dict() == {"a": 4.0, "b": 3.0}
    assert specinfer["step_ms"].to_dict() == {"a": 6.0, "b": 6.0}
    assert best[best["name"] == OURS]["step_ms"].tolist() == [3.0, 6.0]


def test_the_same_numbers_draw_the_same_plot():
    frame = pd.DataFrame({"set": ["x", "x", "y", "y"], "name": ["s", "t"] * 2, "value": [1.0, 2.0, 3.0, 4.0]})
    figure = Figure("figure-00", "Title", frame, "set", ("value",), series="name")

    assert draw(figure, "caption") == draw(figure, "caption") != draw(figure, "another")


def test_a_plan_without_a_draft_model_is_refused_before_it_is_opened(tmp_path):
    path = tmp_path / "plan.yaml"
    replace(plan_of(), drafters=[StatisticsOptions()]).save(path)
    with pytest.raises(YggdrasilError, match="the plan tiny drafts without a draft model; rivals need a plan with one"):
        open_context(str(path), [], tmp_path, EFFORT, force_machine=False)


def test_faults_are_named(context):
    assert chosen_figures([]) == list(FIGURES)
    assert chosen_figures(["11b", "4"]) == ["4", "11"]
    with pytest.raises(YggdrasilError, match="no figure 7 here; choose from 4, 5, 6"):
        chosen_figures(["7"])
    with pytest.raises(YggdrasilError, match="the set one has 3 prompts, 9 are needed; give more, or --quick"):
        FigureContext(context.decoder, TEXTS, context.out, Effort(prompts=8, held_back=1))
