"""The README says what the committed results say, and nothing else."""

import importlib.util
import json
from pathlib import Path

import pytest

from yggdrasil.bench.rules import MODES, RULES

ROOT = Path(__file__).parents[2]
SPREAD = {"median": 2.0, "low": 1.5, "high": 2.5}


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_what_the_results_say(tables):
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert tables.MARKED.search(text), "the README has no generated table"
    assert tables.render(text, ROOT / "profiles") == text, "run scripts/readme_tables.py"


@pytest.fixture
def results(tmp_path):
    def write(folder, name, **values):
        path = tmp_path / folder / "box" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    bench = {
        "matched": 3, "prompts": 4, "aal": 2.5, "baseline_tpot_ms": 4.0, "tpot_ms": 2.0, "speedup": SPREAD,
        "predicted_speedup": None, "overhead_share": 0.031,
    }  # fmt: skip
    for folder, plan in (("tiny", "tiny"), ("wide-1B", "wide-1B"), ("wide-350M", "wide-350M")):
        for name in ("humaneval", "c4", "qa"):
            write(folder, f"bench-{name}.json", plan=plan, **bench)
    row = {"prompts": 4, "aal": 2.0, "same_as_plain": 4, "same_as_ours": 3, "tpot_ms": SPREAD, "ratio_to_ours": SPREAD}
    settings = {"plan": "tiny", "dtype": "bfloat16"}
    partings = [{"verdict": "tie"}]
    rivals = [
        {**row, "system": "llama.cpp, plain"},
        {**row, "system": "assisted", "same_as_plain": 3, "partings": partings},
        {**row, "system": "broken", "same_as_plain": 2, "partings": [*partings, {"verdict": "fault"}]},
    ]
    for name, ratio in (("c4", 2.0), ("qa", 3.0)):
        summary = [{**row, "ratio_to_ours": {**SPREAD, "median": ratio}} for row in rivals]
        write("tiny", f"systems-{name}.json", settings=settings, summary=summary)
    for folder, backend in (("tiny", "inductor"), ("wide-1B", "eager")):
        for name, more in (("c4", 0.0), ("qa", 1.0)):
            trees = ("yggdrasil, by plan", 3.0, 1.0), ("egt 8", 2.25, 1.5), ("egt 16", 2.5, 1.25), ("k-ary 8", 2.0, 3.0)
            summary = [
                {**row, "system": tree, "aal": aal + more, "ratio_to_ours": {**SPREAD, "median": ratio + more}}
                for tree, aal, ratio in trees
            ]
            chosen = {**settings, "plan": folder, "backend": backend}
            write(folder, f"trees-{name}.json", settings=chosen, summary=summary)
    modes = [{**row, "system": name} for name in ("fast", "strict")]
    write("tiny", "exactness-c4.json", settings=settings, summary=modes)
    ways = {"plan": 4, "EGT": 4, "chain": 3, "k-ary": 4, "off": 4}
    write("tiny", "equality-c4.json", plan="tiny", prompts=4, max_new_tokens=8, matched={"T=0": ways})
    found = {"matched": 3, "prompts": 4, "aal": {"latency": 2.0, "aal": 3.0}, "latency_over_aal": SPREAD}
    objectives = {name: {**found, "latency_over_plain": 1.25} for name in ("c4", "qa")}
    write("tiny", "objectives-mixed.json", plan="tiny", summary=objectives)
    rules = [
        {**row, "system": f"{name}, T={temperature:g}", "temperature": temperature, "aal": 1 + temperature}
        for temperature in (0.0, 1.0)
        for name in RULES
    ]
    texts = {"prompts": 4, "valid": 4, "same": 3, "tokens": 40.4, "aal": 2.0, "plain_tpot_ms": 2.0, "tpot_ms": 1.0}
    write("tiny", "constraints-c4.json", plan="tiny", summary={**texts, "speedup": SPREAD})
    write("tiny", "rules-c4.json", settings=settings, summary=rules)
    return tmp_path


def rendered(tables, results, kind):
    text = tables.render(f"before\n<!-- table: {kind} box -->\nold\n<!-- end of table -->\nafter", results)
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of table -->\nafter")
    assert "old" not in text
    return [line for line in text.splitlines() if line.startswith("|")][2:]


def test_bench_rows_in_their_order(tables, results):
    rows = rendered(tables, results, "bench")

    assert [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in rows] == [
        (target, name)
        for target in ("widened to 1B", "widened to 350M", "as shipped (11M)")
        for name in ("c4", "humaneval", "qa")
    ]
    assert rows[0] == "| widened to 1B | c4 | 3 of 4 | 2.50 | 4.00 | 2.00 | **2.00** (1.50 to 2.50) | - | 3.1% |"


def test_rows_of_systems_and_trees(tables, results):
    assert rendered(tables, results, "systems") == [
        f"| as shipped (11M), bfloat16: c4, qa | {cells} |"
        for cells in (
            "llama.cpp, plain | 8 of 8 | 2.00 | 2.00 | **2.50** (2.00, 3.00)",
            "assisted | 6 of 8, a tie in 2 | 2.00 | 2.00 | **2.50** (2.00, 3.00)",
            "broken | 4 of 8, faults in 2 | 2.00 | 2.00 | **2.50** (2.00, 3.00)",
        )
    ]


def test_trees_are_means_over_the_sets(tables, results):
    """At each budget, the best marked; the ratio is of each set's fastest budget, and of timed runs only."""
    assert rendered(tables, results, "trees") == [
        "| widened to 1B, c4, qa | egt | **2.75** | **3.00** | - | - |",
        "| widened to 1B, c4, qa | k-ary | 2.50 | - | - | - |",
        "| widened to 1B, c4, qa | by plan | - | - | 3.50 | - |",
        "| as shipped (11M), c4, qa | egt | **2.75** | **3.00** | - | 1.75 |",
        "| as shipped (11M), c4, qa | k-ary | 2.50 | - | - | 3.50 |",
        "| as shipped (11M), c4, qa | by plan | - | - | 3.50 | 1.50 |",
    ]


def test_rows_of_rules_and_modes(tables, results):
    rows = rendered(tables, results, "rules")

    assert len(rows) == len(tables.RULES)
    assert rows[-1] == "| `off` | yes | none | the baseline | 1.00 / 2.00 | 2.00 / 2.00 | 2.00 / 2.00 |"
    assert rendered(tables, results, "exactness")[1].endswith(" a width-1 pass decides | 4 of 4 | 2.00 | 0.50 |")


def test_equality_has_a_column_for_each_way_of_drafting(tables, results):
    line = "| as shipped (11M), 4 x 8 tokens | T=0 | 4 of 4 | 4 of 4 | 3 of 4 | 4 of 4 | 4 of 4 |"
    assert rendered(tables, results, "equality") == [line]


def test_rows_of_objectives(tables, results):
    assert rendered(tables, results, "objectives") == [
        f"| as shipped (11M) | {name} | 3 of 4 | 2.00 / 3.00 | **2.00** (1.50 to 2.50) | 1.25 |"
        for name in ("c4", "qa")
    ]


def test_rows_of_searches(tables, results):
    titles = "name,chosen,predicted_iteration_ms,measured_iteration_ms,measured_ms_per_token"
    named = [f"{name},False,5.0,5.0,2.0" for name in tables.NAMED_PLANS]
    lines = [
        "# head",
        titles,
        "top 1,False,4.4,4.0,1.1",
        "top 2,True,4.0,5.0,1.0",
        *named,
        "plain decoding,False,3,1,3",
    ]
    for folder, text in (("tiny", "\n".join(lines)), ("wide-1B", f"{titles}\ntop 1,True,4.0,,")):
        (results / folder / "box" / "schedule_ranking.csv").write_text(text)

    assert rendered(tables, results, "search") == [
        "| as shipped (11M) | 0.0% in the median, 20.0% at most | 10.0% | 2.00 | 2.00 | 2.00 | 2.00 |"
    ]


def test_rows_of_constrained_texts(tables, results):
    assert rendered(tables, results, "constraints") == [
        "| as shipped (11M) | 4 of 4 | 3 of 4 | 40 | 2.00 | 2.00 | 1.00 | **2.00** (1.50 to 2.50) |"
    ]


def test_every_rule_and_mode_is_in_its_table(tables):
    assert set(tables.RULES) == set(RULES)
    assert set(tables.MODES) == set(MODES)


def test_rows_of_figures(tables, results):
    breakdown = "system,tpot_ms,aal,gain,gain_in_paper\nO1 tree,8.0,4.0,,\nO2 compilation,4.0,4.0,2.0,2.78\n"
    titles = "temperature,system,speedup,aal,over_static,prompts,same_as_ours,mean_over_static"
    rows = "0.0,ours,3.0,4.0,1.5,4,4,1.25\n0.0,Sequoia,2.0,3.5,,4,3,1.25\n"
    rows += "1.0,ours,2.0,2.0,1.0,4,4,1.25\n1.0,Sequoia,2.0,2.0,,4,4,1.25\n"
    (results / "tiny" / "box" / "figure-12.csv").write_text(f"# head\n{breakdown}")
    (results / "tiny" / "box" / "figure-15.csv").write_text(f"# head\n{titles}\n{rows}")

    assert rendered(tables, results, "breakdown") == [
        "| as shipped (11M) | O1 tree | 8.00 | 4.00 | - | - |",
        "| as shipped (11M) | O2 compilation | 4.00 | 4.00 | 2.00 | 2.78 |",
    ]
    assert rendered(tables, results, "temperatures") == [
        "| as shipped (11M) | 0 | 3 of 4 | 4.00 / 3.50 | 3.00 / 2.00 | **1.50** |",
        "| as shipped (11M) | 1 | 4 of 4 | 2.00 / 2.00 | 2.00 / 2.00 | **1.00** |",
        "| as shipped (11M) | mean |  |  |  | **1.25** |",
    ]


def test_tables_without_results_are_refused(tables, results):
    with pytest.raises(ValueError, match="no results bench-"):
        tables.render("<!-- table: bench other -->\n<!-- end of table -->", results)
    with pytest.raises(ValueError, match=f"no table 'figures'; choose from {', '.join(sorted(tables.TABLES))}"):
        tables.render("<!-- table: figures box -->\n<!-- end of table -->", results)
