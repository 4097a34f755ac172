"""The report of the bundled profile: its tables by hand, its page in a real browser."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console
from tiny_pair import SHAPES, TEXT

from yggdrasil.artifacts import write_csv
from yggdrasil.calibration.schedules import PLAIN, PLAN_COLUMNS
from yggdrasil.engine.policy import FixedPolicy
from yggdrasil.reports.facts import Facts, write_tables
from yggdrasil.reports.schedules import verdict
from yggdrasil.reports.text import show
from yggdrasil.reports.trees import record_trees
from yggdrasil.scheduling.costs import COLUMNS, LOOP, schedule_code
from yggdrasil.scheduling.plan import Plan, Searched, SearchResult
from yggdrasil.scheduling.stages import NAMED_VARIANTS, STAGES, Schedule, all_variants
from yggdrasil.tree.objective import TreeShape

ROOT = Path(__file__).parents[2]
DEMO = next((ROOT / "plans" / "demo").glob("*.yaml"))
SHAPE = (1, 3, 4)


def searched(name, labels, predicted_ms, measured_ms):
    aal = 2.0
    return Searched(
        name, labels, SHAPE, "inductor", aal, predicted_ms, predicted_ms / aal, aal, measured_ms, measured_ms / aal, 1.1
    )


def stage_samples(shapes):
    """A millisecond a stage, two for a tail ahead; verification takes its width."""
    rows = [(64, 1, schedule_code(Schedule.of({})), 0, 0, 1, "iteration", 9.0)]
    for chosen in all_variants():
        schedule = Schedule.of(chosen)
        for width in shapes.draft_widths:
            for depth in (2, shapes.max_depth):
                for verify_width in shapes.verify_widths[1:]:
                    times = dict.fromkeys((*STAGES, LOOP), 1.0)
                    times |= {"verify": float(verify_width), "tail_draft": 2.0 * (chosen["tail_draft"] == "ahead")}
                    size = (width, depth, verify_width)
                    rows += [(64, 1, schedule_code(schedule), *size, stage, ms) for stage, ms in times.items()]
    return pd.DataFrame(rows, columns=list(COLUMNS))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A copy of the bundled artefacts with a search, measured plans and a roofline beside them."""
    root = tmp_path_factory.mktemp("artefacts")
    for room in ("plans", "predictors", "profiles"):
        shutil.copytree(ROOT / room / "demo", root / room / "demo")
    path = root / "plans" / "demo" / DEMO.name
    plan = Plan.load(path)
    naive, default = Schedule.of(NAMED_VARIANTS["naive"]).labels, Schedule.of({}).labels
    entries = [searched("top 1", default, 12.0, 12.5), searched("naive", naive, 13.0, 13.5)]
    replace(plan, search=SearchResult("latency", "top 1", entries, plan.costs)).save(path)
    profile = root / "profiles" / "demo" / path.stem
    write_csv(profile / "schedule_samples.csv", "schedule-samples", 1, stage_samples(plan.shapes))
    rows = [(name, 0, 0, 9, 20, ms, 9 * ms, *[ms / 11] * 11) for name, ms in
            (("top 1", 11.0), ("naive", 22.0), (PLAIN, 4.5))]  # fmt: skip
    measured = pd.DataFrame(rows, columns=list(PLAN_COLUMNS))
    write_csv(profile / "schedule_measured.csv", "schedule-measured", 1, measured)
    limits = [(model, 1 << i, 128, 0.5 * (i + 1), 0.25 * (i + 1)) for model in ("target", "drafter") for i in range(4)]
    limits = pd.DataFrame(limits, columns=["model", "width", "context", "ms", "least_ms"])
    write_csv(profile / "roofline.csv", "roofline", 1, limits)
    return path


@pytest.fixture(scope="module")
def facts(demo, pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), SHAPES)
    text = decoder.tokenizer.decode(TEXT[:20])
    return replace(Facts.load(demo), trees=record_trees(decoder, [text, text[3:]]))


def test_trees_are_recorded_on_captured_steps_too(pair):
    eager, captured = (
        record_trees(decoder, [decoder.tokenizer.decode(TEXT[:20])])
        for backend in ("eager", "cudagraph")
        for decoder in [pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), SHAPES, backend=backend)]
    )

    assert set(captured["role"]) == {"root", "accepted", "verified", "drafted"}
    pd.testing.assert_frame_equal(captured, eager)


def test_latencies_are_those_of_the_samples(facts):
    table = facts.latency()
    plan = facts.plan

    assert set(table["context"]) == {costs.context for costs in plan.costs}
    for costs in plan.costs:
        part = table[table["context"] == costs.context].set_index(["model", "width"])["ms"]
        assert part["target", 32] == pytest.approx(costs.verify_ms[32], rel=0.05)  # the envelope of the same medians
        assert part["drafter", 4] == pytest.approx(costs.draft_ms[4], rel=0.05)
    assert (table["p10_ms"] <= table["ms"]).all()
    assert (table["ms"] <= table["p90_ms"]).all()


def test_the_objective_is_equation_3(facts):
    costs = facts.plan.costs[0].steps()
    row = facts.objective().set_index(["width", "depth", "verify_width"]).loc[2, 4, 16]

    expected = (
        row["aal"] * costs.plain_ms / (costs.head_ms + 3 * costs.draft_ms[2] + costs.verify_ms[16] + costs.overhead_ms)
    )
    assert row["speedup"] == pytest.approx(expected)
    assert 1 < row["aal"] < 5


def test_timelines_are_laid_end_to_end_and_measured_at_the_profiles_speed(facts):
    table = facts.timelines()
    lanes = table.groupby(["plan", "kind"])["end_ms"].max()

    # Eleven stages and gaps of a millisecond; four of verification; no tail of its own, and two plain steps' speed.
    assert lanes["chosen", "predicted"] == pytest.approx(9 + 4)
    assert lanes["chosen", "measured"] == pytest.approx(11.0 * 9.0 / 4.5)
    assert lanes["naive", "measured"] == pytest.approx(22.0 * 9.0 / 4.5)
    for _, lane in table.groupby(["plan", "kind"]):
        assert lane["start_ms"].iloc[1:].tolist() == pytest.approx(lane["end_ms"].iloc[:-1].tolist())


def test_variants_are_held_against_the_chosen_plan(facts):
    table = facts.variants().set_index(["stage", "variant"])

    assert table.loc[("tail_draft", "ahead"), "against_chosen_ms"] == pytest.approx(2.0)
    assert table.loc[("tail_draft", "superset"), "against_chosen_ms"] == 0
    assert table[table["chosen"]]["against_chosen_ms"].abs().max() == 0


def test_the_verdict_is_arithmetic(facts):
    lines = verdict(facts.plan.search)

    assert lines[0] == "predicted iteration time: off by 4.0% in the median, 4.0% at most"
    assert lines[1] == "regret of the best prediction against the best measured: 0.0%; chosen: top 1"
    assert lines[2] == "the chosen plan is 1.080 x as fast as naive"


def test_trees_say_what_became_of_each_node(facts):
    assert set(facts.trees["role"]) == {"root", "accepted", "verified", "drafted"}
    for _, tree in facts.trees.groupby(["prompt", "iteration"]):
        roles = tree["role"].value_counts()
        assert len(tree) == 1 + 4 * 3
        assert roles["drafted"] == len(tree) - 8  # verified width 8, root included
        path = tree[tree["role"] == "accepted"].sort_values("depth")
        assert path["depth"].tolist() == list(range(1, len(path) + 1))
        assert path["parent"].tolist() == [0, *path["node"]][:-1][: len(path)]
        assert tree["probability"].between(0, 1).all()


def test_text_and_tables_hold_the_same_facts(facts, tmp_path):
    console = Console(record=True, width=200, file=(tmp_path / "text").open("w"))
    show(facts, console)
    text = console.export_text()
    write_tables(facts.tables(), tmp_path / "csv")

    for figure in ("0.5876", "top 1", "naive", "1.080 x as fast", "accepted"):
        assert figure in text
    assert {path.stem for path in (tmp_path / "csv").iterdir()} == set(facts.tables())
    assert len(pd.read_csv(tmp_path / "csv" / "objective.csv")) == len(facts.objective())


def test_a_name_without_profile_still_has_a_report(demo, tmp_path):
    from yggdrasil.reports.page import build_page

    for room in ("plans", "predictors"):
        shutil.copytree(ROOT / room / "demo", tmp_path / room / "demo")
    page = build_page(Facts.load(tmp_path / "plans" / "demo" / demo.name))

    assert "No schedule search yet" in page
    assert "No example trees yet" in page


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    paths = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    binary, driver = next(filter(None, paths), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver on this machine (Debian: chromium, chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,2000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    opened.set_network_conditions(offline=True, latency=0, throughput=0)
    yield opened
    opened.quit()


@pytest.mark.browser
def test_the_page_in_a_real_browser(facts, browser, tmp_path):
    """No errors, no requests, every chart drawn: each has marks of a visible size."""
    from yggdrasil.reports.page import build_page

    page = tmp_path / "report.html"
    page.write_text(build_page(facts), encoding="utf-8")
    browser.get(page.as_uri())

    assert browser.get_log("browser") == []
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in fetched if not name.startswith("data:")] == []
    charts = browser.execute_script(
        """return [...document.querySelectorAll('.js-plotly-plot')].map(chart => ({
             section: chart.closest('section').id,
             height: chart.getBoundingClientRect().height,
             marks: [...chart.querySelectorAll('.plot path, .plot image, .plot rect')]
               .filter(mark => mark.getBoundingClientRect().width > 1 || mark.getBoundingClientRect().height > 1).length
           }))"""
    )
    assert {chart["section"] for chart in charts} == {
        "latency", "prediction", "objective", "predictor", "timelines", "ranking", "trees",
    }  # fmt: skip
    for chart in charts:
        assert chart["height"] > 100, chart
        assert chart["marks"] >= 3, json.dumps(chart)
    picture = tmp_path / "page.png"
    browser.save_screenshot(str(picture))
    assert picture.stat().st_size > 30_000  # a blank page of this size compresses to less


@pytest.mark.browser
def test_a_broken_chart_would_be_seen(browser, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><section id=a></section><script>Plotly.newPlot('x', [])</script>")
    browser.get(page.as_uri())

    assert any("Plotly is not defined" in entry["message"] for entry in browser.get_log("browser"))
