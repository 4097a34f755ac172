"""The search end to end on a made-up profile, and what it measures on a tiny pair."""

import sys
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pandas as pd
import pytest
from head_files import eagle_config, write_head
from made_up import PLAIN_MS, schedule_samples, write_artifacts
from tiny_pair import SHAPES, TEXT, byte_tokenizer

import yggdrasil.calibration.measurement.schedules as schedules
from yggdrasil.artifacts import write_csv
from yggdrasil.calibration.documents import open_ended_stream
from yggdrasil.calibration.measurement.schedules import (
    MEASURED,
    PLAIN,
    MeasuredPlan,
    at_one_speed,
    measure_plans,
    measured_schedules,
    summarise_plans,
)
from yggdrasil.cli import main
from yggdrasil.drafters.model_free_options import NGramOptions, StatisticsOptions
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY
from yggdrasil.scheduling.costs import COLUMNS, LOOP, StageCosts, schedule_code
from yggdrasil.scheduling.plan import ModelRef, Plan
from yggdrasil.scheduling.search import AcceptedLengths, Space, search
from yggdrasil.scheduling.stages import NAMED_VARIANTS, NAMED_WITH_STATES, STAGES, Schedule, named_variants
from yggdrasil.tree.shape import TreeShape

FEW = replace(SHAPES, draft_widths=(1, 2), max_depth=3, verify_widths=(1, 2, 4))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("YGGDRASIL_CACHE", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["yggdrasil", *map(str, arguments)])
        try:
            main()
        except SystemExit as ended:
            return ended.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_without_prompts_the_best_prediction_is_written(run, tmp_path):
    path = write_artifacts(tmp_path)
    before = Plan.load(path)
    code, out, _ = run("search", "made-up", "--top", 4)
    plan = Plan.load(path)

    assert code == 0
    assert "nothing was measured" in out
    assert plan.search.chosen == "top 1"
    names = [entry.name for entry in plan.search.entries]
    assert names[:4] == ["top 1", "top 2", "top 3", "top 4"]
    assert set(NAMED_VARIANTS) <= set(names)
    # Every stage takes a millisecond and verification its width, so the plainest schedule wins.
    best = plan.search.entries[0]
    assert best.predicted_iteration_ms == pytest.approx(9 + best.shape[2])
    assert plan.stages == Schedule.of({}).labels
    assert plan.costs == before.costs


def test_prompts_without_room_are_refused_before_anything_is_compiled(run, tmp_path, monkeypatch):
    """Which takes minutes."""
    path = write_artifacts(tmp_path)
    monkeypatch.setattr("yggdrasil.calibration.search.load_tokenizer", lambda _: byte_tokenizer())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": ""}\n')
    words = ("search", "made-up", "--prompts", "prompts.jsonl")

    for more, fault in (
        (("--max-new-tokens", Plan.load(path).shapes.max_length), "leaves no room for a prompt in the context"),
        ((), "prompts.jsonl has no usable prompts"),
    ):
        code, _, err = run(*words, *more)
        assert code == 2
        assert fault in err


def test_a_search_gives_the_same_plan_again(run, tmp_path):
    path = write_artifacts(tmp_path)
    texts = []
    for _ in range(2):
        assert run("search", "made-up")[0] == 0
        texts.append(path.read_text())

    assert texts[0] == texts[1]


def test_aal_is_saved_beside_and_is_longer_and_slower(run, tmp_path):
    path = write_artifacts(tmp_path)
    run("search", "made-up")
    code, _, _ = run("search", "made-up", "--objective", "aal", "--save-as", "made-up-aal")
    latency = Plan.load(path)
    aal = Plan.load(tmp_path / "plans" / "made-up-aal" / path.name)

    assert code == 0
    assert aal.objective == "aal"
    first, second = latency.search.entries[0], aal.search.entries[0]
    assert second.predicted_aal > first.predicted_aal
    assert second.predicted_ms_per_token > first.predicted_ms_per_token


def test_a_plan_saved_beside_is_searched_again_by_the_same_profile(run, tmp_path):
    write_artifacts(tmp_path)
    run("search", "made-up", "--objective", "aal", "--save-as", "beside")
    code, _, err = run("search", "beside")

    assert (code, err) == (0, "")
    assert [folder.name for folder in (tmp_path / "profiles").iterdir()] == ["made-up"]


def test_a_plan_that_reads_the_head_draft_keeps_doing_so(run, tmp_path):
    stages = Schedule.of({"depth_prediction": "informed"}).labels
    path = write_artifacts(tmp_path, depth_from="head", stages=stages)

    assert run("search", "made-up")[0] == 0
    assert Plan.load(path).stages == stages


def test_with_a_head_nothing_is_searched_that_would_read_ahead_of_the_target(run, tmp_path):
    head = write_head(tmp_path / "head", eagle_config(), {})
    path = write_artifacts(tmp_path, drafters=[ModelRef(str(head), "1", 1), StatisticsOptions(table=False)])
    measured = {schedule_code(schedule) for schedule in measured_schedules(NAMED_WITH_STATES)}
    samples = schedule_samples()
    file = tmp_path / "profiles" / "made-up" / path.stem / "schedule_samples.csv"
    write_csv(file, "schedule-samples", 2, samples[samples["schedule"].isin(measured)])
    code, _, _ = run("search", "made-up", "--top", 6)
    plan = Plan.load(path)
    variants = [Schedule.parse(entry.stages).variants for entry in plan.search.entries]

    assert code == 0
    assert [entry.name for entry in plan.search.entries if not entry.name.startswith("top")] == ["naive"]
    assert {each["head_draft"] for each in variants} == {"after"}
    assert {each["tail_draft"] for each in variants} == {"superset"}
    assert variants[-1]["accept"] == "host"
    best = plan.search.entries[0]
    assert best.predicted_iteration_ms == pytest.approx(9 + best.shape[2])


def test_on_a_gpu_only_schedules_that_accept_there_are_searched(run, tmp_path):
    path = write_artifacts(tmp_path, device="cuda")
    code, _, err = run("search", "made-up", "--top", 4)
    plan = Plan.load(path)

    assert (code, err) == (0, "")
    assert set(NAMED_VARIANTS) <= {entry.name for entry in plan.search.entries}
    assert {Schedule.parse(entry.stages).variants["accept"] for entry in plan.search.entries} == {"device"}
    assert {entry.backend for entry in plan.search.entries} == {"cudagraph"}
    # The host's bookkeeping takes a millisecond, which the device's pass hides.
    assert Schedule.parse(plan.stages).variants["bookkeeping"] == "overlapped"


def test_what_cannot_be_searched_is_said(run, tmp_path):
    write_artifacts(tmp_path, "lookup", drafters=[NGramOptions()])
    path = write_artifacts(tmp_path)
    (tmp_path / "profiles" / "made-up" / path.stem / "schedule_samples.csv").unlink()

    code, _, err = run("search", "lookup")
    assert (code, err.strip().count("\n")) == (2, 0)
    assert "without a model" in err
    code, _, err = run("search", "made-up")
    assert (code, err.strip().count("\n")) == (2, 0)
    assert "give --prompts to measure" in err


def test_report_on_the_command_line(run, tmp_path):
    write_artifacts(tmp_path)
    run("search", "made-up")

    assert run("report", "made-up", "--out", "r.html", "--csv", "tables")[0] == 0
    assert "Yggdrasil report: made-up" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "tables" / "ranking.csv").exists()
    code, out, _ = run("report", "made-up", "--text")
    assert (code, "top 1" in out) == (0, True)
    code, _, err = run("report", "made-up")
    assert (code, "--out FILE" in err) == (2, True)


def test_a_plan_is_found_with_its_profile_from_its_own_folder(run, tmp_path, monkeypatch):
    path = write_artifacts(tmp_path)
    monkeypatch.chdir(path.parent)

    assert run("search", path.name)[0] == 0
    code, out, _ = run("report", path.name, "--text")
    assert (code, "top 1" in out) == (0, True)
    assert [each for each in tmp_path.rglob("*.yaml") if each.parent.parent.name == "plans"] == [path]


@pytest.fixture(scope="module")
def decoder(pair):
    return pair.decoder(PLAIN_POLICY, FEW, other_stages=[schedule.labels for schedule in MEASURED])


@pytest.mark.parametrize("executor", ["in-order", pytest.param("captured", marks=pytest.mark.slow)])
def test_measured_stages_are_enough_to_search_with(pair, decoder, executor):
    measured = MEASURED
    if executor == "captured":
        measured = measured_schedules(named_variants(reads_states=False, is_captured=True))
        orders = [schedule.labels for schedule in measured]
        decoder = pair.decoder(PLAIN_POLICY, FEW, other_stages=orders, backend="cudagraph")
    frame = schedules.measure_stage_costs(
        decoder.assembly, lambda: open_ended_stream(byte_tokenizer(), 16), [TEXT[:10], TEXT[20:35]], lambda _: None,
        measured,
    )  # fmt: skip
    costs = StageCosts.from_samples(frame)
    tables = {width: np.full((3, 3, 3), 0.5) for width in FEW.draft_widths}
    lengths = AcceptedLengths(np.full(3, 0.9), tables, FEW.verify_widths)

    best = search(Space.of(lengths, executor), costs, lengths)[0]
    assert best.iteration_ms > 0
    decoder.assembly.engine.use_schedule(best.stages)  # raises if captured steps do not support it
    # What lies between stages is what an iteration takes beyond them.
    drafted = frame[frame["depth"] > 0]
    assert drafted[[*STAGES, LOOP]].sum(axis=1).to_numpy() == pytest.approx(drafted["iteration"].to_numpy(), abs=1e-4)
    # Every cycle is one shape on one text, by every schedule; its plain steps tell its speed.
    usual = frame[frame["depth"] == 0].groupby("cycle")["iteration"].median().iloc[0]
    assert set(frame["context"]) == {10, 15}
    for _, cycle in frame.groupby("cycle"):
        assert cycle["context"].nunique() == 1
        assert set(cycle[cycle["depth"] > 0]["schedule"]) == {schedule_code(schedule) for schedule in measured}
        assert len(cycle[["width", "depth", "verify_width"]].drop_duplicates()) == 2
        assert cycle.loc[cycle["depth"] == 0, "iteration"].median() == pytest.approx(usual, abs=1e-4)


def test_texts_too_short_to_measure_anything_are_said_to_be(decoder):
    """And nothing is kept that a later search would take for its costs."""
    few, texts = partial(open_ended_stream, byte_tokenizer(), 3), [TEXT[:10]]
    message = r"^--max-new-tokens ends texts before anything is measured: .* give 13 or more$"

    with pytest.raises(YggdrasilError, match=message):
        schedules.measure_stage_costs(decoder.assembly, few, texts, lambda _: None)
    plans = [MeasuredPlan("one", Schedule.of({}).labels, TreeShape(2, 3, 4))]
    with pytest.raises(YggdrasilError, match=message):
        measure_plans(decoder.assembly, few, texts, plans, 1, lambda _: None)
    enough = partial(open_ended_stream, byte_tokenizer(), 13)
    assert len(schedules.measure_stage_costs(decoder.assembly, enough, texts, lambda _: None))


def test_plans_are_measured_in_turns_on_the_same_texts(decoder):
    plans = [
        MeasuredPlan("one", Schedule.of({}).labels, TreeShape(2, 3, 4)),
        MeasuredPlan("two", Schedule.of(NAMED_VARIANTS["AoT head"]).labels, TreeShape(2, 3, 4)),
    ]
    frame = measure_plans(
        decoder.assembly,
        lambda: open_ended_stream(byte_tokenizer(), 24),
        [TEXT[:9], TEXT[5:20]],
        plans,
        2,
        lambda _: None,
    )

    assert frame.groupby("plan").size().to_dict() == {"one": 4, "two": 4, PLAIN: 4}
    assert set(frame["tokens"]) == {23}
    counts = frame.groupby(["plan", "prompt"])["iterations"].unique().map(list)
    assert counts["one"].tolist() == counts["two"].tolist()  # a schedule changes no token
    spent = frame[[*STAGES, LOOP]].sum(axis=1)
    assert spent.to_numpy() == pytest.approx(frame["iteration_ms"].to_numpy())


def test_measuring_ends_in_time_with_every_shape_and_plan_measured(decoder):
    """Without any time: the first text alone, by every schedule and plan; the progress ends at one."""
    stream, texts, fractions = partial(open_ended_stream, byte_tokenizer(), 16), [TEXT[:10], TEXT[20:35]], list[float]()
    frame = schedules.measure_stage_costs(decoder.assembly, stream, texts, fractions.append, seconds=0.0)
    shapes = {(row.width, row.depth, row.verify_width) for row in frame[frame["depth"] > 0].itertuples()}

    assert set(frame["context"]) == {10}
    assert shapes == set(map(tuple, schedules.measured_shapes(FEW)))
    assert set(frame["schedule"]) == {schedule_code(schedule) for schedule in MEASURED}
    assert (fractions, fractions[-1]) == (sorted(fractions), 1.0)

    plans, fractions = [MeasuredPlan("one", Schedule.of({}).labels, TreeShape(2, 3, 4))], list[float]()
    frame = measure_plans(decoder.assembly, stream, texts, plans, 3, fractions.append, seconds=0.0)
    assert frame.groupby("plan")["prompt"].unique().map(list).to_dict() == {"one": [0], PLAIN: [0]}
    assert fractions == [0.5, 1.0]


def test_progress_is_that_of_the_work_or_of_the_time(monkeypatch):
    """Ten turns, of which two are due, within an hour and within five seconds of a clock that each look advances."""
    now = count(0.0, 0.5)
    monkeypatch.setattr(schedules, "perf_counter", lambda: next(now))
    for seconds, expected in ((3600.0, 10), (5.0, 6)):
        fractions = list[float]()
        numbers = [number for number, _ in schedules.turns_in_time(range(10), 2, seconds, fractions.append)]
        assert numbers == list(range(expected))
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0


def test_figures_are_at_the_profiles_speed():
    """The machine is half as fast in the second round; the plan takes twice a plain step and gives three tokens."""
    rows = [
        (name, 0, number, iterations, 12, speed * ms, speed * ms * iterations, *[0.0] * 11)
        for number, speed in enumerate((1.0, 2.0))
        for name, iterations, ms in (("tree", 4, 6.0), (PLAIN, 12, 3.0))
    ]
    frame = pd.DataFrame(rows, columns=list(schedules.PLAN_COLUMNS))
    tree = summarise_plans(frame, plain_ms=PLAIN_MS).set_index("plan").loc["tree"]

    assert tree["iteration_ms"] == pytest.approx(2 * PLAIN_MS)
    assert tree["ms_per_token"] == pytest.approx(2 * PLAIN_MS / 3)
    assert tree["speedup"] == pytest.approx(1.5)
    assert tree["aal"] == 3.0


def test_a_pause_in_plain_decoding_changes_no_plan():
    """Four ways in three turns; in the second turn the machine is half as fast, in the third plain decoding stalls."""
    turns = {0: (1.0, 1.0), 1: (2.0, 2.0), 2: (1.0, 9.0)}  # the machine's pace, and what it was while decoding plainly
    rows = [
        (name, 0, number, 4, 12, pace * ms, pace * ms * 4, *[0.0] * 11)
        for number, (usual, while_plain) in turns.items()
        for name, ms in (("a", 6.0), ("b", 7.0), ("c", 8.0), (PLAIN, 3.0))
        for pace in [while_plain if name == PLAIN else usual]
    ]
    summary = summarise_plans(pd.DataFrame(rows, columns=list(schedules.PLAN_COLUMNS)), plain_ms=3.0)

    assert summary.set_index("plan")["iteration_ms"].to_dict() == pytest.approx(
        {"a": 6.0, "b": 7.0, "c": 8.0, PLAIN: 3.0}
    )


def test_plans_that_go_on_alone_stay_comparable():
    """Two plans and plain decoding are measured further, while the machine is half as fast; the third is not."""
    rows = [
        (name, 0, number, 4, 12, pace * ms, pace * ms * 4, *[0.0] * 11)
        for number, pace in enumerate((1.0, 1.0, 2.0, 2.0, 2.0))
        for name, ms in (("a", 6.0), ("b", 7.0), ("c", 8.0), (PLAIN, 3.0))
        if name != "c" or number < 2
    ]
    summary = summarise_plans(pd.DataFrame(rows, columns=list(schedules.PLAN_COLUMNS)), plain_ms=3.0)

    assert summary.set_index("plan")["ms_per_token"].to_dict() == pytest.approx(
        {"a": 2.0, "b": 7 / 3, "c": 8 / 3, PLAIN: 1.0}
    )


def test_samples_are_brought_to_one_speed():
    rows = [
        dict.fromkeys(COLUMNS) | {"cycle": cycle, "depth": depth, stage: speed * ms}
        for cycle, speed in zip(count(1), (1.0, 3.0, 1.0), strict=False)
        for depth, stage, ms in ((0, "iteration", 2.0), (1, "verify", 5.0))
    ]
    frame = at_one_speed(pd.DataFrame(rows).astype({"iteration": float, "verify": float}))

    assert frame.loc[frame["depth"] == 1, "verify"].tolist() == pytest.approx([5.0] * 3)
