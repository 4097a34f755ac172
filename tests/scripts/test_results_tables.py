"""The documents say what the committed rows say, and rows say what the benchmarks' files say."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = {
    "machine": "A(R) Box Processor (family 6), 2 cores, no accelerator, Linux 9", "commit": "0123456789abcdef",
    "versions": {"torch": "9.1", "transformers": "8.0"}, "dtype": "bfloat16", "max_new_tokens": 128,
}  # fmt: skip
VERSIONS = "With torch 9.1, transformers 8.0; 128 tokens per prompt; each system decoded each prompt once._"
CAPTION = f"_Commits: A Box (family 6) 0123456789. {VERSIONS}"


@pytest.fixture
def tables():
    return importlib.import_module("results_tables")


@pytest.fixture
def collected(tables, tmp_path):
    """Puts records into the rows below ``tmp_path``."""

    def collect(folder, name, place="box", **values):
        path = tmp_path / "profiles" / folder / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**MADE, **values}))
        tables.collect([path], tmp_path / "docs" / "results")

    return collect


def sample(name, plain, ours, *, matched=True, repeats=0.5, beside=None):
    return {
        "id": name, "category": "qa", "matched": matched, "repeats": repeats,
        "plain": {"iterations": 100, "tpot_ms": plain}, "tree": {"aal": 2.0, "tpot_ms": ours}, "beside": beside,
    }  # fmt: skip


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
    shown = set()
    for page in tables.pages(ROOT):
        text = page.read_text(encoding="utf-8")
        shown |= {name for _, name, _ in tables.MARKED.findall(text)}
        assert tables.render(text, ROOT) == text, f"run scripts/results_tables.py: {page.name} differs"
    assert shown == set(tables.QUESTIONS)


def test_plain_decoding_over_ours_is_a_cell_for_each_set(tables, collected, tmp_path):
    collected("smollm2", "bench-c4.json", samples=[sample("a", 4.0, 2.0, repeats=0.2), sample("b", 2.0, 2.0)])
    collected("smollm2-bf16", "bench-spec_bench.json", samples=[sample("a", 3.0, 2.0, matched=False)])
    collected("somebodys", "bench-c4.json", samples=[sample("a", 9.0, 2.0)])

    rows, captions = rendered(tables, tmp_path, "faster-than-plain")

    assert rows == [
        "| SmolLM2-135M, Q4_1 file | C4 | **1.50** (35%) |",
        "| SmolLM2-135M, bf16 | Spec-Bench, chat | **1.50** (50%) |",
    ]
    assert captions == [CAPTION]
    text = tables.render("<!-- results: how-sure -->\n<!-- end of results -->", tmp_path)
    assert (
        "| SmolLM2-135M, Q4_1 file | 1.50 (0.75 to 2.25), 0 |\n| SmolLM2-135M, bf16 | 1.50 (1.50 to 1.50), 0 |" in text
    )
    assert "Prompts with the tokens of plain decoding: 2 of 3." in text


def test_processors_are_columns_with_a_dash_where_nothing_was_measured(tables, collected, tmp_path):
    zen = "AMD EPYC (family 25.17), 2 cores, avx2 avx512f, 24 GiB, no accelerator, Linux 9"
    collected("smollm2", "bench-c4.json", samples=[sample("a", 4.0, 2.0)])
    collected("smollm2", "bench-c4.json", "den", machine=zen, samples=[sample("a", 6.0, 2.0)])
    collected("smollm2-bf16", "bench-c4.json", samples=[sample("a", 4.0, 1.0)])
    text = tables.render("<!-- results: faster-than-plain -->\n<!-- end of results -->", tmp_path)

    assert "| target | prompts | EPYC Zen 4 | A Box (family 6) |" in text
    assert rendered(tables, tmp_path, "faster-than-plain")[0] == [
        "| SmolLM2-135M, Q4_1 file | C4 | **3.00** (50%) | **2.00** (50%) |",
        "| SmolLM2-135M, bf16 | C4 | - | **4.00** (50%) |",
    ]
    assert rendered(tables, tmp_path, "machines")[0] == [
        "| EPYC Zen 4 | AMD EPYC (family 25.17) | 2 cores, 24 GiB | avx2 avx512f |",
        "| A Box (family 6) | A(R) Box Processor (family 6) | 2 cores | - |",
    ]


def test_a_new_run_replaces_the_rows_of_its_own(tables, collected, tmp_path):
    den = "A Den (family 7), 4 cores, no accelerator, Linux 9"
    collected("smollm2", "bench-c4.json", samples=[sample("a", 4.0, 2.0)])
    collected("smollm2", "bench-c4.json", "den", machine=den, samples=[sample("a", 8.0, 2.0)])
    collected("smollm2", "bench-c4.json", samples=[sample("a", 6.0, 2.0)])

    (row,) = rendered(tables, tmp_path, "faster-than-plain")[0]
    assert row.split("**")[1::2] == ["3.00", "4.00"]


def test_the_caption_gives_each_processor_its_own_commits(tables, collected, tmp_path):
    other = {"machine": "A Den (family 7), 4 cores, avx2, no accelerator, Linux 9", "samples": [sample("a", 4.0, 2.0)]}
    collected("smollm2", "bench-c4.json", samples=[sample("a", 4.0, 2.0)])
    collected("smollm2", "bench-c4.json", "den", **other, commit="1" * 16)
    collected("smollm2-bf16", "bench-c4.json", "den", **other, commit="2" * 16)

    assert rendered(tables, tmp_path, "faster-than-plain")[1] == [
        f"_Commits: A Box (family 6) 0123456789; A Den (family 7) 1111111111, 2222222222. {VERSIONS}"
    ]


def test_the_readme_shows_one_processor(tables, collected, tmp_path):
    questions = importlib.import_module("results.questions")
    collected("smollm2", "bench-c4.json", place=questions.HEADLINE_MACHINE, samples=[sample("a", 4.0, 2.0)])
    collected("smollm2", "bench-c4.json", samples=[sample("a", 9.0, 2.0)])

    shown = ["| SmolLM2-135M, Q4_1 file | **2.00** (50%) |"]
    assert rendered(tables, tmp_path, "headline") == (
        shown, [f"_A(R) Box Processor (family 6): 2 cores, commit 0123456789. {VERSIONS}"],
    )  # fmt: skip


def test_llama_cpps_plain_decoding_and_the_best_of_its_settings(tables, collected, tmp_path):
    def of(system, ms, tokens=(1, 2)):
        continuation = {"tokens": tokens, "decoded": 100, "passes": 50, "tpot_ms": ms}
        return {"prompt": "a", "system": system, "continuation": continuation}

    samples = [
        of("yggdrasil, by plan", 2.0), of("yggdrasil, plain compiled", 3.0), of("llama.cpp on x, plain", 4.0),
        of("llama.cpp on x, n-gram map", 3.5, tokens=(1, 3)), of("llama.cpp on x, n-gram hash", 5.0),
    ]  # fmt: skip
    collected("smollm2", "systems-c4.json", samples=samples)
    collected("smollm2-bf16", "systems-c4.json", samples=samples[:2])

    assert rendered(tables, tmp_path, "faster-than-llama-cpp")[0] == [
        "| SmolLM2-135M, Q4_1 file | C4 | 2.00, **1.75** |"
    ]
    rows = importlib.import_module("results.rows").read_rows(tmp_path / "docs" / "results", "systems")
    assert [row["same"] for row in rows if row["target"] == "smollm2"] == ["1", "1", "1", "0", "1"]


def test_python_engines_have_a_column_each_and_a_dash_without_rows(tables, collected, tmp_path):
    def of(system, ms, decoded):
        continuation = {"tokens": [1], "decoded": decoded, "passes": 0, "tpot_ms": ms}
        return {"prompt": str(decoded), "system": system, "continuation": continuation}

    samples = [
        of("yggdrasil, by plan", 2.0, 100), of("yggdrasil, by plan", 4.0, 300),
        of("OpenVINO GenAI, plain", 5.0, 100), of("OpenVINO GenAI, plain", 8.0, 300),
        of("ik_llama.cpp, plain", 7.0, 100), of("ik_llama.cpp, plain", 7.0, 300),
    ]  # fmt: skip
    collected("smollm2", "systems-c4.json", samples=samples)
    collected("smollm2-bf16", "systems-c4.json", samples=samples[:2])

    assert rendered(tables, tmp_path, "faster-than-python-engines")[0] == [
        "| A Box (family 6) | SmolLM2-135M, Q4_1 file | **2.07** | - | **2.00** |"  # 7.25 / 3.5 and 7 / 3.5
    ]


def test_passes_of_one_and_eight_tokens(tables, collected, tmp_path):
    def one(context, width, ours, theirs):
        times = {"ours_ms": {"median": ours}, "theirs_ms": {"median": theirs}}
        return {"context": context, "width": width, "least_ms": 1.0, **times}

    passes = [one(64, 1, 2.0, 4.0), one(64, 8, 3.0, 30.0), one(1024, 8, 5.0, 5.0), one(0, 512, 200.0, 400.0)]
    collected("smollm2-1B", "steps.json", files=[{"format": "q8_0", "passes": passes}])

    assert rendered(tables, tmp_path, "passes")[0] == [
        "| A Box (family 6) | widened to 1.04B | q8_0 | 64 | 2.0, 4.0: **0.50** | 3.0, 30.0: **0.10** |"
    ]


def test_turns_and_equality_are_kept_as_rows(tables, collected, tmp_path):
    case = {"history_tokens": 538, "prompt_tokens": 571, "reused_tokens": 553, "first_turn_ms": 196.2}
    collected("smollm2", "turns.json", short_prompt_ms=21.0, cases=[{**case, "second_turn_ms": 14.0}])
    collected("smollm2", "equality-spec_bench.json", prompts=4, matched={"T=0": {"plan": 4, "chain": 3}})
    read = importlib.import_module("results.rows").read_rows

    (turn,) = read(tmp_path / "docs" / "results", "turns")
    assert (turn["history_tokens"], turn["second_turn_ms"], turn["short_ms"]) == ("538", "14", "21")
    assert [(row["drafting"], row["same"]) for row in read(tmp_path / "docs" / "results", "equality")] == [
        ("plan", "4"), ("chain", "3"),
    ]  # fmt: skip


def test_what_was_not_measured_says_so(tables, tmp_path):
    for name in tables.QUESTIONS:
        assert rendered(tables, tmp_path, name) == ([], [tables.NOTHING])


def test_unknown_blocks_and_damaged_files_are_refused(tables, collected, tmp_path):
    with pytest.raises(ValueError, match=r"no block 'figures'; choose from faster-than-llama-cpp, "):
        tables.render("<!-- results: figures -->\n<!-- end of results -->", tmp_path)
    with pytest.raises(ValueError, match=r"bench-c4.json is not the JSON of a benchmark \('samples'\)"):
        collected("smollm2", "bench-c4.json")
    (tmp_path / "docs" / "results").mkdir(parents=True, exist_ok=True)
    (tmp_path / "docs" / "results" / "plain.csv").write_text("target,machine\n")
    with pytest.raises(ValueError, match=r"plain.csv has the columns"):
        rendered(tables, tmp_path, "how-sure")
