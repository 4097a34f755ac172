"""The documents say what the committed results say, and nothing else."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPREAD = {"median": 2.0, "low": 1.5, "high": 2.5}
MADE = {"machine": "a box, 2 cores", "commit": "0123456789abcdef", "versions": {"torch": "9.1", "transformers": "8.0"}}
BENCH = {
    **MADE, "matched": 3, "prompts": 4, "aal": 2.5, "baseline_tpot_ms": 4.0, "tpot_ms": 2.0, "speedup": SPREAD,
    "total_speedup": 1.9, "repeats": 0.314, "predicted_speedup": None, "overhead_share": 0.031, "dtype": "bfloat16",
    "max_new_tokens": 128,
}  # fmt: skip
CAPTION = (
    "_a box, 2 cores; torch 9.1, transformers 8.0; commit 0123456789; bfloat16, 128 tokens a prompt; one run each._"
)
FIGURES = "3 of 4 | 31% | 2.50 | 4.00 | 2.00 | **2.00** (1.50 to 2.50) | 1.90 | - | 3.1% |"


@pytest.fixture
def tables():
    return importlib.import_module("results_tables")


@pytest.fixture
def write(tmp_path):
    def write(folder, name, **values):
        path = tmp_path / "profiles" / folder / "box" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    return write


def rendered(tables, root, name):
    """The rows of a block, and the line below them."""
    text = tables.render(f"before\n<!-- results: {name} -->\nstale\n<!-- end of results -->\nafter", root)
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of results -->\nafter")
    assert "stale" not in text
    assert tables.render(text, root) == text
    lines = text.splitlines()
    return [line for line in lines if line.startswith("| ")][1:], [line for line in lines if line.startswith("_")]


def test_the_documents_are_what_the_results_say(tables):
    marked = 0
    for page in tables.pages(ROOT):
        text = page.read_text(encoding="utf-8")
        marked += len(tables.MARKED.findall(text))
        assert tables.render(text, ROOT) == text, f"run scripts/results_tables.py: {page.name} differs"
    assert marked >= len(tables.TABLES)


def test_plans_in_turns_stand_below_each_other(tables, write, tmp_path):
    text = {**BENCH, "guesses": "text", "total_speedup": 1.5, "time_over_first": SPREAD, "total_time_over_first": 1.267}
    write("smollm2", "bench-c4.json", **BENCH, guesses="text + table", beside={"alone": text})
    write("tiny", "bench-c4.json", **BENCH)

    rows, captions = rendered(tables, tmp_path, "beside")

    assert rows == [
        "| SmolLM2-135M | C4 | text + table | 3 of 4 | 2.50 | 2.00 | 1.90 | - |",
        "| SmolLM2-135M | C4 | text | 3 of 4 | 2.50 | 2.00 | 1.50 | **1.27** |",
    ]
    assert captions == [CAPTION]


def test_a_changed_result_is_noticed(tables, write, tmp_path):
    write("smollm2", "bench-c4.json", **BENCH)
    made = tables.render("<!-- results: bench -->\n<!-- end of results -->", tmp_path)
    write("smollm2", "bench-c4.json", **{**BENCH, "aal": 2.51})

    assert tables.render(made, tmp_path) != made


def test_bench_rows_in_their_order(tables, write, tmp_path):
    for folder in ("tiny", "smollm2-1B", "smollm2-342M", "smollm2"):
        for name in ("qa", "c4", "specbench"):
            write(folder, f"bench-{name}.json", **BENCH)

    rows, captions = rendered(tables, tmp_path, "bench")

    assert [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in rows] == [
        (target, name)
        for target in ("SmolLM2-135M", "widened to 342M", "widened to 1.04B", "bundled pair, 11M")
        for name in ("Spec-Bench, chat", "C4", "qa")
    ]
    assert rows[1] == f"| SmolLM2-135M | C4 | {FIGURES}"
    assert captions == [CAPTION]


def test_few_samples_are_shown_themselves(tables, write, tmp_path):
    write("tiny", "bench-c4.json", **{**BENCH, "speedup": {**SPREAD, "samples": [1.5, 2.5]}, "predicted_speedup": 1.95})

    rows, _ = rendered(tables, tmp_path, "bench")

    assert "| **2.00** (1.50, 2.50) | 1.90 | 1.95 |" in rows[0]


def test_categories_are_rows_of_the_files_that_name_them(tables, write, tmp_path):
    write("smollm2", "bench-specbench.json", **BENCH, categories={"qa": BENCH, "summarization": BENCH})
    write("smollm2", "bench-c4.json", **BENCH)

    rows, _ = rendered(tables, tmp_path, "categories")

    assert rows == [f"| SmolLM2-135M | {name} | {FIGURES}" for name in ("qa", "summarization")]


def test_the_readme_has_a_column_for_each_set(tables, write, tmp_path):
    write("smollm2", "bench-specbench.json", **BENCH)
    write("smollm2", "bench-c4.json", **BENCH)
    write("tiny", "bench-c4.json", **{**BENCH, "matched": 4, "total_speedup": 1.5, "repeats": 0.6})

    assert rendered(tables, tmp_path, "headline")[0] == [
        "| a box | SmolLM2-135M | 6 of 8 | **1.90** (31%) | **1.90** (31%) |",
        "| a box | bundled pair, 11M | 4 of 4 | - | **1.50** (60%) |",
    ]


def test_the_readmes_columns_come_in_the_shown_order_whoever_has_them(tables, write, tmp_path):
    write("smollm2", "bench-c4.json", **BENCH)
    write("tiny", "bench-specbench.json", **BENCH)

    assert rendered(tables, tmp_path, "headline")[0] == [
        "| a box | SmolLM2-135M | 3 of 4 | - | **1.90** (31%) |",
        "| a box | bundled pair, 11M | 3 of 4 | **1.90** (31%) | - |",
    ]


def test_the_figure_shows_the_machine_with_most_prompts_and_tables_all(tables, tmp_path):
    other = {**BENCH, "machine": "a den, 4 cores", "prompts": 3}
    for name, values in (
        ("a den", other),
        ("box", BENCH),
        ("cot", {**other, "machine": "A(R) Cot Processor (family 6), 1 core"}),
    ):
        path = tmp_path / "profiles" / "smollm2" / name / "bench-specbench.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))

    assert rendered(tables, tmp_path, "figure")[1] == [CAPTION]
    assert "3 of 4" in tables.render("<!-- results: figure -->\n<!-- end of results -->", tmp_path)
    assert len(rendered(tables, tmp_path, "bench")[1]) == 3
    rows, captions = rendered(tables, tmp_path, "headline")
    assert [row.split("|")[1].strip() for row in rows] == ["a den", "a box", "A Cot (family 6)"]
    assert len(captions) == 1


def test_the_figure_draws_chat_prompts(tables, write, tmp_path):
    write("smollm2", "bench-specbench.json", **BENCH)
    write("smollm2", "bench-c4.json", **BENCH)

    text = tables.render("<!-- results: figure -->\n<!-- end of results -->", tmp_path)

    assert "same tokens on 3 of 4" in text
    assert f"  SmolLM2-135M  plain, compiled    4.0  {'█' * 40}\n" in text
    assert f"                Yggdrasil          2.0  {'█' * 20}  1.90 x\n" in text


def test_rows_of_systems_are_means_over_the_sets(tables, write, tmp_path):
    row = {"prompts": 4, "aal": 2.0, "same_as_plain": 4, "tpot_ms": SPREAD, "total_ratio_to_ours": 2.0}
    partings = [{"verdict": "tie"}]
    rivals = [
        {**row, "system": "llama.cpp, plain", "aal": None},
        {**row, "system": "assisted", "same_as_plain": 3, "partings": partings},
        {**row, "system": "broken", "same_as_plain": 2, "partings": [*partings, {"verdict": "fault"}]},
        {**row, "system": "without a plain one", "same_as_plain": None},
    ]
    for name, ratio in (("specbench", 2.0), ("c4", 3.0)):
        summary = [{**rival, "total_ratio_to_ours": ratio} for rival in rivals]
        write("smollm2", f"systems-{name}.json", **MADE, settings={"dtype": "bfloat16"}, summary=summary)

    assert rendered(tables, tmp_path, "systems")[0] == [
        f"| SmolLM2-135M, bfloat16 | {cells} | 2.00 | **2.50** | Spec-Bench, chat 2.00, C4 3.00 |"
        for cells in (
            "llama.cpp, plain | 8 of 8 | -",
            "assisted | 6 of 8, a tie in 2 | 2.00",
            "broken | 4 of 8, faults in 2 | 2.00",
            "without a plain one | - | 2.00",
        )
    ]


def test_passes_are_a_row_for_each_file_and_context(tables, write, tmp_path):
    def one(context, width, ours, theirs, least=1.0):
        times = {"ours_ms": {"median": ours}, "theirs_ms": {"median": theirs}}
        return {"context": context, "width": width, "least_ms": least, **times}

    partings = [{"verdict": "tie"}, {"verdict": "fault"}]
    passes = [one(64, 1, 2.0, 4.0, 1.5), one(64, 8, 3.0, 30.0), one(1024, 8, 5.0, 5.0), one(0, 512, 200.0, 400.0)]
    q8 = {"format": "q8_0", "file_megabytes": 144.8, "passes": passes, "text": {"prompts": 12, "partings": partings}}
    plain = {"format": "q4_k_m", "file_megabytes": 99.0, "passes": [one(0, 512, 30.0, 20.0)], "text": None}
    write("smollm2-1B", "steps.json", **MADE, files=[q8, plain])

    assert rendered(tables, tmp_path, "steps")[0] == [
        "| widened to 1.04B | Q8_0 | 64 | 2.00, 4.00: **0.50** | 3.0, 30.0: **0.10** | 1.50 | 75% |",
        "| widened to 1.04B | Q8_0 | 1024 | - | 5.00, 5.00: **1.00** | - | - |",
    ]
    assert rendered(tables, tmp_path, "reading")[0] == [
        "| widened to 1.04B | Q8_0 | 145 | 512 | 200, 400: **0.50** | 10 of 12, a tie in 1 of the rest |",
        "| widened to 1.04B | Q4_K_M | 99 | 512 | 30.0, 20.0: **1.50** | - |",
    ]


def test_equality_has_a_column_for_each_way_of_drafting(tables, write, tmp_path):
    matched = {"T=0": {"plan": 4, "chain": 3}}
    write("smollm2", "equality-chat.json", **MADE, prompts=4, max_new_tokens=8, matched=matched)

    assert rendered(tables, tmp_path, "equality")[0] == [
        "| SmolLM2-135M, 4 x 8 tokens | T=0 | 4 of 4 | - | 3 of 4 | - | - |"
    ]


def test_rows_of_what_a_person_waits_for(tables, write, tmp_path):
    case = {"history_tokens": 2000, "prompt_tokens": 2050, "reused_tokens": 1999, "first_turn_ms": 900.4}
    turn = {**case, "second_turn_ms": 60.0}
    write("smollm2", "turns.json", **MADE, short_prompt_tokens=50, short_prompt_ms=50.0, cases=[turn])
    cold = {"name": "cold", "first_token_s": 80.04, "whole_s": 82.0, "peak_mb": 700.4}
    write("smollm2", "first-contact.json", **MADE, cases=[cold])

    assert rendered(tables, tmp_path, "turns")[0] == [
        "| SmolLM2-135M | 2000 | 1999 of 2050 | 900 | 60 | 50 (50 tokens) | **1.20** |"
    ]
    assert rendered(tables, tmp_path, "first-contact")[0] == ["| SmolLM2-135M | cold | 80.0 | 82.0 | 700 |"]


def test_policies_come_from_plans_and_scores_from_reports(tables, tmp_path):
    plan, report = tmp_path / "plans/smollm2/box.yaml", tmp_path / "predictors/smollm2/box/report.csv"
    for path in (plan, report):
        path.parent.mkdir(parents=True)
    plan.write_text(
        "predicted: {policy: depth from mean, speedup: 1.5}\nrejected:\n"
        "- {policy: depth from predictor, speedup: 1.25}\n- {policy: fixed width 1 depth 7, speedup: 1.0}\n"
    )
    report.write_text(
        "# head\nreads,depth,scorer,auc,brier,positions,positives,note\n"
        "predictor,1,predictor,0.5,0.125,9,4,\npredictor,1,constant,0.5,0.25,9,4,\nhead,2,predictor,,,9,0,too few\n"
    )

    assert rendered(tables, tmp_path, "policies")[0] == ["| SmolLM2-135M | box | **1.500** | 1.250 | - | 1.000 | - |"]
    assert rendered(tables, tmp_path, "predictors")[0] == [
        "| SmolLM2-135M | box | before drafting | 0.2500 / - / 0.1250 | - | - | - |",
        "| SmolLM2-135M | box | with first guesses | - | - | - | - |",
    ]


def test_what_was_not_measured_says_so(tables, tmp_path):
    for name in [*tables.TABLES, *tables.FROM_PLANS]:
        rows, lines = rendered(tables, tmp_path, name)
        assert rows == []
        assert lines == [tables.NOTHING]


def test_unknown_blocks_and_damaged_files_are_refused(tables, write, tmp_path):
    with pytest.raises(ValueError, match=r"no block 'figures'; choose from bench, beside"):
        tables.render("<!-- results: figures -->\n<!-- end of results -->", tmp_path)
    write("smollm2", "bench-c4.json", **BENCH)
    (tmp_path / "profiles/smollm2/box/bench-c4.json").write_text("{")
    with pytest.raises(ValueError, match=r"bench-c4.json is not JSON"):
        tables.render("<!-- results: bench -->\n<!-- end of results -->", tmp_path)


def test_what_who_works_here_has_calibrated_and_measured_is_shown_nowhere(tables, write, tmp_path):
    write("smollm2", "bench-c4.json", **BENCH)
    own = [tables.render(page.read_text(encoding="utf-8"), tmp_path) for page in tables.pages(ROOT)]
    write("mine", "bench-c4.json", **{**BENCH, "aal": 7.77})
    for place in ("plans/mine/box.yaml", "predictors/mine/box/report.csv"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("no result")

    assert [tables.render(page.read_text(encoding="utf-8"), tmp_path) for page in tables.pages(ROOT)] == own
