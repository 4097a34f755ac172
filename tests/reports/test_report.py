"""The report of a made-up profile: its tables by hand, its page in a real browser."""

import base64
import contextlib
import errno
import json
import re
import shutil
import zlib
from dataclasses import replace

import pandas as pd
import pytest
from browsers import open_browser
from made_up import PLAIN_MS, stage_samples, write_artifacts
from rich.console import Console
from tiny_pair import SHAPES, TEXT

from yggdrasil.artifacts import write_csv
from yggdrasil.calibration.measurement.schedules import PLAIN, PLAN_COLUMNS
from yggdrasil.cli.report import _with_trees
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.reports.charts import _library
from yggdrasil.reports.facts import Facts
from yggdrasil.reports.folder import write_tables
from yggdrasil.reports.page import _cards, _prose, _table
from yggdrasil.reports.reasons import considered, reasons
from yggdrasil.reports.schedules import verdict
from yggdrasil.reports.text import show
from yggdrasil.reports.trees import record_trees
from yggdrasil.scheduling.plan import Expectation, LeftOut, ModelRef, Plan, Searched, SearchResult
from yggdrasil.scheduling.stages import NAMED_VARIANTS, Schedule
from yggdrasil.tree.shape import TreeShape

SHAPE = (1, 3, 4)


def searched(name, labels, predicted_ms, measured_ms):
    aal = 2.0
    return Searched(
        name, labels, SHAPE, "inductor", aal, predicted_ms, predicted_ms / aal, aal, measured_ms, measured_ms / aal, 1.1
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A plan with a search and measured plans."""
    root = tmp_path_factory.mktemp("artefacts")
    path = write_artifacts(root)
    naive, default = Schedule.of(NAMED_VARIANTS["naive"]).labels, Schedule.of({}).labels
    entries = [searched("top 1", default, 12.0, 12.5), searched("naive", naive, 13.0, 13.5)]
    plan = Plan.load(path)
    replace(plan, search=SearchResult("latency", "top 1", entries, plan.costs)).save(path)
    profile = root / "profiles" / "made-up" / path.stem
    rows = [(name, 0, 0, 9, 20, ms, 9 * ms, *[ms / 11] * 11) for name, ms in
            (("top 1", 11.0), ("naive", 22.0), (PLAIN, 4.5))]  # fmt: skip
    measured = pd.DataFrame(rows, columns=list(PLAN_COLUMNS))
    write_csv(profile / "schedule_measured.csv", "schedule-measured", 1, measured)
    return path


@pytest.fixture(scope="module")
def facts(demo, pair):
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), SHAPES)
    text = decoder.tokenizer.decode(TEXT[:20])
    return replace(Facts.load(demo), trees=record_trees(decoder, [text, text[3:]]))


def test_prompts_for_trees_are_cut_to_their_end_and_named_where_they_are_empty(demo, pair, tmp_path, monkeypatch):
    """A long one was refused by the context, with an option that a report lacks; an empty one without its place."""
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), SHAPES)
    monkeypatch.setattr("yggdrasil.engine.decoder.Decoder.from_plan", lambda *_, **__: decoder)
    monkeypatch.setattr("yggdrasil.cli.report.PROMPT_TOKENS", 20)
    prompts, text = tmp_path / "prompts.jsonl", decoder.tokenizer.decode(TEXT[:20])

    prompts.write_text(json.dumps({"prompt": "x" * SHAPES.max_length + text}) + "\n")
    trees = _with_trees(Facts.load(demo), demo, prompts, 3, chat=False, force_machine=True).trees
    assert trees is not None
    assert len(trees)

    prompts.write_text(json.dumps({"prompt": text}) + '\n{"prompt": ""}\n')
    with pytest.raises(YggdrasilError, match=r"prompts\.jsonl, line 2 the prompt is empty"):
        _with_trees(Facts.load(demo), demo, prompts, 3, chat=False, force_machine=True)


def test_trees_are_recorded_on_captured_steps_too(pair):
    eager, captured = (
        record_trees(decoder, [decoder.tokenizer.decode(TEXT[:20])])
        for backend in ("eager", "cudagraph")
        for decoder in [pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), SHAPES, backend=backend)]
    )

    assert set(captured["role"]) == {"root", "accepted", "verified", "drafted"}
    pd.testing.assert_frame_equal(captured, eager)


def test_latencies_are_medians_with_their_tenths(facts):
    table = facts.latency().set_index(["model", "context", "width"])

    # A pass over W rows takes W + context / 64 ms, 10 % up and down.
    assert table.loc[("target", 128, 8), "ms"] == pytest.approx(10.0)
    assert table.loc[("target", 128, 8), "p10_ms"] == pytest.approx(9.0, rel=0.03)
    assert table.loc[("target", 64, 8), "p90_ms"] == pytest.approx(9.9, rel=0.03)
    assert table.loc[("target", 64, 1), "ms"] == PLAIN_MS
    assert table.loc[("drafter", 64, 4), "ms"] == pytest.approx(0.4)


def test_iterations_are_those_of_drafted_trees_where_none_were_searched_for(tmp_path):
    stages = Facts.load(write_artifacts(tmp_path)).iterations().set_index("stage")["ms_an_iteration"]
    frame = stage_samples()
    drafted = frame[(frame["context"] == 64) & (frame["width"] > 0) & (frame["depth"] > 0)]

    assert stages.to_dict() == pytest.approx(drafted.groupby("stage")["ms"].median().to_dict())


def test_the_objective_is_equation_3(facts):
    row = facts.objective().set_index(["width", "depth", "verify_width"]).loc[2, 4, 16]

    aal = 1 + 0.8 * sum(0.9**level for level in (1, 2, 3, 4))
    iteration_ms = 1.0 + 3 * 0.2 + 17.0 + 0.5
    assert row["aal"] == pytest.approx(aal)
    assert row["speedup"] == pytest.approx(aal * PLAIN_MS / iteration_ms)


def test_timelines_are_laid_end_to_end_and_measured_at_the_profiles_speed(facts):
    table = facts.search.timelines()
    lanes = table.groupby(["plan", "kind"])["end_ms"].max()

    # Eleven stages and gaps of a millisecond; four of verification; no tail of its own, and two plain steps' speed.
    assert lanes["chosen", "predicted"] == pytest.approx(9 + 4)
    assert lanes["chosen", "measured"] == pytest.approx(11.0 * 9.0 / 4.5)
    assert lanes["naive", "measured"] == pytest.approx(22.0 * 9.0 / 4.5)
    for _, lane in table.groupby(["plan", "kind"]):
        assert lane["start_ms"].iloc[1:].tolist() == pytest.approx(lane["end_ms"].iloc[:-1].tolist())


def test_the_verdict_is_arithmetic(facts):
    lines = verdict(facts.plan.search)

    assert lines[0] == "predicted iteration time: off by 4.0% in the median, 4.0% at most"
    assert lines[1] == "regret of the best prediction against the best measured: 0.0%; chosen: top 1"
    assert lines[2] == "the chosen plan is 1.080 x as fast as naive"


def test_the_verdict_says_that_plain_decoding_is_faster(facts):
    """Plain steps have no tree, so they count in no error and no regret."""
    found = facts.plan.search
    plain = replace(searched(PLAIN, Schedule.of({}).labels, 5.0, 5.0), shape=(0, 0, 1), measured_ms_per_token=5.0)

    lines = verdict(replace(found, entries=[*found.entries, plain]))

    assert lines == [*verdict(found), "the chosen plan is 0.800 x as fast as plain decoding"]


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

    for figure in ("top 1", "naive", "1.080 x as fast", "accepted"):
        assert figure in text
    assert {path.stem for path in (tmp_path / "csv").iterdir()} == set(facts.tables())
    assert len(pd.read_csv(tmp_path / "csv" / "objective.csv")) == len(facts.objective())


def test_a_drafter_that_was_left_out_is_named(facts, tmp_path):
    from yggdrasil.reports.page import build_page

    gave = Expectation("mean", 2.0, 4.5, 1.5)
    left_out = LeftOut(ModelRef("owner/head", "1", 1), gave, replace(gave, tpot_ms=4.25))
    without = replace(facts, plan=replace(facts.plan, left_out=left_out))
    console = Console(record=True, width=200, file=(tmp_path / "text").open("w"))
    show(without, console)

    for text in (console.export_text(), build_page(without)):
        assert "Left out: owner/head, which does not reliably pay: 4.5 ms per token with it, 4.25 without" in text
        assert "with owner/head, left out" in text


def test_what_is_predicted_says_how_much_of_its_text_repeats_itself(facts, tmp_path, capsys):
    """In reports and behind a calibration, from the plan's file; of plans that do not know nothing is said."""
    from yggdrasil.cli.calibrate import _print_plan
    from yggdrasil.reports.page import build_page

    repeated = replace(facts, plan=replace(facts.plan, predicted=replace(facts.plan.predicted, repeats=0.625)))
    repeated.plan.save(tmp_path / "plan.yaml")
    _print_plan(tmp_path / "plan.yaml")
    for given, is_repeated in ((repeated, True), (facts, False)):
        console = Console(record=True, width=200, file=(tmp_path / "text").open("w"))
        show(given, console)
        texts = [console.export_text(), build_page(given), *([capsys.readouterr().out] if is_repeated else [])]
        for text in texts:
            assert ("62% repeats itself" in text or "62% of whose text repeats itself" in text) == is_repeated


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_name_without_profile_still_has_a_report_which_says_so(tmp_path, is_gone):
    from yggdrasil.reports.page import build_page

    path = write_artifacts(tmp_path)
    profile = tmp_path / "profiles" / "made-up" / path.stem
    if is_gone:
        shutil.rmtree(tmp_path / "profiles")
    facts = Facts.load(path)
    page = build_page(facts)
    console = Console(record=True, width=500, file=(tmp_path / "text").open("w"))
    show(facts, console)

    for absent in ("ranking", "timelines", "trees", "prediction"):
        assert f'id="{absent}"' not in page
        assert f'href="#{absent}"' not in page
    assert page.index('id="why"') < page.index('id="objective"'), "why this plan comes first"
    assert len(page) < 2_000_000
    for text in (page, console.export_text()):
        assert (f"here is no profile {profile}" in text) == is_gone
        assert ("run `yggdrasil calibrate` with this name again" in text) == is_gone


def test_why_a_plan_is_as_it_is(facts):
    """What was tried and what each would have given; of a first use nothing was."""
    other = Expectation("plain decoding", 1.0, 2 * facts.plan.predicted.tpot_ms, 1.0)
    plan = replace(facts.plan, rejected=[other])
    table = considered(plan)

    assert list(table["policy"]) == [plan.predicted.policy, "plain decoding"]
    assert list(table["time_over_chosen"]) == [1.0, 2.0]
    assert any("plain decoding, would change the time per token by +100.0%" in line for line in reasons(plan))
    faster = replace(other, policy="text alone", tpot_ms=0.9 * plan.predicted.tpot_ms)
    sentences = reasons(replace(plan, rejected=[other, faster]))
    assert any(
        "text alone, would change the time per token by -10.0%; the drafter was kept as" in line for line in sentences
    )
    almost = replace(faster, policy="depth from head", tpot_ms=0.99 * plan.predicted.tpot_ms)
    assert "-1.0%; that is too little for a predictor." in " ".join(reasons(replace(plan, rejected=[almost])))
    plain = replace(faster, policy="plain decoding")
    assert "plain decoding, would change the time per token by -10.0%." in " ".join(
        reasons(replace(plan, rejected=[plain]))
    )
    first = replace(plan, rejected=[], is_provisional=True)
    assert considered(first).empty
    assert "made at the first use of the model" in reasons(first)[0]
    cards = _cards(replace(facts, plan=first))
    assert "predicted" not in cards  # the placeholders of a plan that was not simulated
    assert "per plain step" in cards
    assert "<code>yggdrasil calibrate</code> compares" in _prose(reasons(first)[0])


def test_numbers_of_a_column_have_equally_many_digits():
    page = _table(
        pd.DataFrame({"ms": [1.0, 1.5391, 86.01, 12345.6, float("nan")], "rows": [1, 2, 4, 8, 16]}), "", opened=True
    )
    shown = re.findall(r"<td>([^<]*)</td><td>", page)
    assert shown == ["1.000", "1.539", "86.01", "12,346", "–"]


def test_the_chart_library_comes_out_of_the_page_as_it_was():
    """What the browser does: 85 characters to bytes, then unpacked."""
    from plotly.offline import get_plotlyjs

    text = _library()
    assert "<" not in text
    assert len(text) < 1_900_000
    assert zlib.decompress(base64.b85decode(text.replace(",", "<"))).decode() == get_plotlyjs()


def test_many_trees_leave_the_page_below_two_megabytes(facts):
    from yggdrasil.reports.page import build_page

    one = facts.trees[facts.trees["iteration"] == facts.trees["iteration"].iloc[0]]
    trees = pd.concat([one.assign(prompt=number) for number in range(24)])
    page = build_page(replace(facts, trees=trees))

    assert page.count('<div class="chart"') > 24
    assert len(page) < 2_000_000


@pytest.fixture(scope="module")
def browser():
    with open_browser("1300,2000") as opened:
        opened.set_network_conditions(offline=True, latency=0, throughput=0)
        yield opened


# Every chart with the marks in it that have a size.
CHARTS = """return [...document.querySelectorAll('.js-plotly-plot')].map(chart => ({
    section: chart.closest('section').id,
    height: chart.getBoundingClientRect().height,
    marks: [...chart.querySelectorAll('.cartesianlayer path, .cartesianlayer image, .cartesianlayer rect')]
      .filter(mark => mark.getBoundingClientRect().width > 1 || mark.getBoundingClientRect().height > 1).length
  }))"""


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
    support = pytest.importorskip("selenium.webdriver.support.ui")
    timeout = pytest.importorskip("selenium.common").TimeoutException
    with contextlib.suppress(timeout):  # charts are drawn one after the other; what is missing then is named below
        support.WebDriverWait(browser, 60).until(
            lambda opened: min((chart["marks"] for chart in opened.execute_script(CHARTS)), default=0) >= 3
        )
    charts = browser.execute_script(CHARTS)
    assert {chart["section"] for chart in charts} == {
        "latency", "prediction", "objective", "timelines", "trees",
    }  # fmt: skip
    for chart in charts:
        assert chart["height"] > 100, chart
        assert chart["marks"] >= 3, json.dumps(chart)
    picture = tmp_path / "page.png"
    browser.save_screenshot(str(picture))
    assert picture.stat().st_size > 30_000  # a blank page of this size compresses to less


# Labels of charts that lie on one another: pairs of their texts.
OVERLAPS = """return [...document.querySelectorAll('.js-plotly-plot')].flatMap(chart => {
    const labels = [...chart.querySelectorAll('.xtitle, .ytitle, .annotation-text, .legendtext, .cbtitle text')]
      .map(label => ({text: label.textContent, box: label.getBoundingClientRect()}));
    return labels.flatMap((one, i) => labels.slice(i + 1)
      .filter(other => one.box.left < other.box.right && other.box.left < one.box.right
        && one.box.top < other.box.bottom && other.box.top < one.box.bottom)
      .map(other => one.text + " | " + other.text));
  })"""


@pytest.mark.browser
def test_charts_follow_the_width_of_the_window_and_not_its_height(facts, browser, tmp_path):
    from yggdrasil.reports.page import build_page

    page = tmp_path / "report.html"
    page.write_text(build_page(facts), encoding="utf-8")
    support = pytest.importorskip("selenium.webdriver.support.ui")
    drawn = "return document.querySelector('#chart-1 .main-svg')?.getBoundingClientRect().width"
    seen = []
    try:
        for width, height in ((1200, 800), (1200, 700), (800, 700), (1150, 700)):
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            if not seen:
                browser.get(page.as_uri())
                support.WebDriverWait(browser, 60).until(lambda opened: opened.execute_script(drawn))
                browser.execute_script("window.count = 0; const usual = draw; draw = () => { count++; usual(); }")
            support.WebDriverWait(browser, 60).until(
                lambda opened, width=width: abs(opened.execute_script(drawn) - (width - 98)) <= 20
            )
            seen.append(browser.execute_script("return count"))
            support.WebDriverWait(browser, 60).until(lambda opened: opened.execute_script(OVERLAPS) == [])
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    assert seen == [0, 0, 1, 2]


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_on_a_phone_and_in_the_dark(facts, browser, tmp_path, scheme):
    """The page does not scroll sideways, no label of a chart lies on another, and marks stand out from their paper."""
    from yggdrasil.reports.page import build_page

    page = tmp_path / "report.html"
    page.write_text(build_page(facts), encoding="utf-8")
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get(page.as_uri())
        support = pytest.importorskip("selenium.webdriver.support.ui")
        support.WebDriverWait(browser, 60).until(
            lambda opened: min((chart["marks"] for chart in opened.execute_script(CHARTS)), default=0) >= 3
        )
        width = browser.execute_script("return document.documentElement.scrollWidth")
        overlaps = browser.execute_script(OVERLAPS)
        paper = browser.execute_script("return getComputedStyle(document.querySelector('section')).backgroundColor")
        root = browser.execute_script("return getComputedStyle(document.querySelector('#trees .point')).fill")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    brightness = [sum(map(int, re.findall(r"\d+", each)[:3])) for each in (paper, root)]
    assert width == 390
    assert overlaps == []
    assert (brightness[0] < 200) == (scheme == "dark")
    assert abs(brightness[1] - brightness[0]) > 300, f"{root} on {paper}"


@pytest.mark.browser
def test_a_broken_chart_would_be_seen(browser, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><section id=a></section><script>Plotly.newPlot('x', [])</script>")
    browser.get(page.as_uri())

    assert any("Plotly is not defined" in entry["message"] for entry in browser.get_log("browser"))


def test_tables_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_tables({"a": pd.DataFrame({"x": [1]})}, tmp_path)
    before = (tmp_path / "a.csv").read_text()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(YggdrasilError, match="No space left on device"):
        write_tables({"a": pd.DataFrame({"x": [1, 2]})}, tmp_path)
    assert (tmp_path / "a.csv").read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]
