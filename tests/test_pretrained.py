"""A model in the place of a plan: its plan is found by content, for this machine and with the requested drafter."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from yggdrasil.artifacts import current_machine, list_plans, plan_names, plan_path
from yggdrasil.calibration.calibration_settings import PairSource
from yggdrasil.calibration.pair import build_assembly, default_drafter_weights
from yggdrasil.calibration.pipeline import _drafters_of
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.model_free_options import NGramOptions, StatisticsOptions
from yggdrasil.engine import plan_lookup
from yggdrasil.engine.plan_lookup import automatic_name
from yggdrasil.engine.plan_parts import planned_drafter
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.pretrained import Decoder, find_plan, is_plan, plan_name
from yggdrasil.prompts import default_prompts
from yggdrasil.scheduling.plan import Costs, Expectation, LeftOut, ModelRef, Plan, Shapes, resolve_source
from yggdrasil.scheduling.stages import DEFAULT_ORDER

TINY = Path(resolve_source("yggdrasil:assets/tiny"))
TARGET, DRAFTER = Source.find(TINY / "target"), Source.find(TINY / "drafter")


def target(weights="full"):
    return ModelRef("elsewhere", TARGET.fingerprint(), 1, weights)


def plan(**changes):
    machine = current_machine()
    costs = Costs(128, 1.0, {1: 1.0}, {1: 1.0, 4: 1.5}, 0.1, 1.1)
    made = Plan(
        name="mine", machine=machine, versions={}, dtype="bfloat16",
        target=target(),
        drafters=[NGramOptions()], tokenizer=TARGET.tokenizer_fingerprint(),
        shapes=Shapes(draft_widths=(1,), verify_widths=(1, 4)), stages=DEFAULT_ORDER, objective="latency",
        depth_from="mean", predictor="../../predictors/mine/x", costs=[costs],
        predicted=Expectation("mean", 1.5, 1.0, 1.2),
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Write a plan where plans are looked for, each newer than the one before; nothing else is found."""
    monkeypatch.setattr(plan_lookup, "list_plans", lambda name=None: list_plans(name, [tmp_path]))
    times = iter(range(1, 100))

    def write(made, name="mine"):
        path = plan_path(tmp_path, name, made.machine)
        made.save(path)
        os.utime(path, (next(times),) * 2)
        return path

    return write


def test_the_newest_plan_of_this_model_on_this_machine_is_found(save):
    assert find_plan(TARGET, None, None) is None
    first = save(plan())
    assert find_plan(TARGET, None, None) == first
    second = save(plan(), "later")
    assert find_plan(TARGET, None, None) == second
    save(plan(target=ModelRef("x", "0" * 16, 1)), "another-model")
    save(plan(machine=replace(current_machine(), cores=99)), "another-machine")
    save(plan(target=target("q4_0")), "rounded")
    save(plan(drafters=[ModelRef("x", DRAFTER.fingerprint(), 1, "q8_0")]), "rounded-drafter")
    assert find_plan(TARGET, None, None) == second
    as_it_is = save(plan(target=target("file")), "blocks")
    save(plan(), "dequantised")
    assert find_plan(TARGET, None, None) == as_it_is
    assert find_plan(DRAFTER, None, None) is None


def test_a_plan_says_which_weights_it_is_for():
    assert [plan(target=target("file")).weights_in(dtype) for dtype in ("bfloat16", "float32")] == ["file", "full"]
    assert plan(target=target("q8_0")).weights_in("float32") == "q8_0"
    assert plan().describe().endswith("; bfloat16")
    assert plan(target=target("file")).describe().endswith("; bfloat16; weights as the GGUF file has them")
    assert plan(target=target("q8_0")).describe().endswith("; bfloat16; weights rounded to Q8_0")


@pytest.mark.skipif(not is_native(), reason="quantised weights need the native kernels")
def test_a_draft_model_has_weights_of_its_own():
    drafter = ModelRef(str(TINY / "drafter"), DRAFTER.fingerprint(), 1, "q8_0")
    made = plan(target=ModelRef(str(TINY / "target"), TARGET.fingerprint(), 1), drafters=[drafter])
    assert (made.weights_in("float32", drafter), made.weights_in("float32")) == ("q8_0", "full")
    source = PairSource.of_plan(made, TINY)
    assert (source.weights, source.drafter_weights) == ("full", "q8_0")

    assembly = build_assembly(source, backend="eager")
    opened = planned_drafter(made, TINY, load_tokenizer(TARGET), assembly.target.loaded, "bfloat16")

    assert not assembly.target.loaded.formats
    assert set(assembly.second.formats.values()) == set(opened.formats.values()) == {GGMLQuantizationType.Q8_0}


def test_a_calibration_notes_the_weights_of_its_draft_model(monkeypatch):
    requested = []
    monkeypatch.setattr("yggdrasil.calibration.pair.usual_weights", lambda *what: requested.append(what) or "file")
    chosen = default_drafter_weights(str(TINY / "drafter"), "bfloat16", "cpu")
    source = PairSource(str(TINY / "target"), str(TINY / "drafter"), "bfloat16", 1, 1, Shapes(), "q4_0", chosen)

    assert requested == [(str(TINY / "drafter"), "bfloat16", "cpu")]  # as for a target: a quantised file's own blocks
    assert [drafter.weights for drafter in _drafters_of(source, None)] == ["file"]
    assert default_drafter_weights(None, "bfloat16", "cpu") == "full"


def test_drafter_and_dtype_decide_which(save):
    ngram, pair = save(plan()), save(plan(drafters=[ModelRef("x", DRAFTER.fingerprint(), 1)]), "pair")
    exact = save(plan(dtype="float32"), "exact")
    counted = save(plan(drafters=[StatisticsOptions()]), "counted")

    assert find_plan(TARGET, ["ngram"], "bfloat16") == ngram
    assert find_plan(TARGET, ["text"], None) == counted
    assert find_plan(TARGET, [str(DRAFTER.folder)], None) == pair
    assert find_plan(TARGET, None, "float32") == exact
    assert find_plan(TARGET, [str(TARGET.folder)], None) is None
    assert find_plan(TARGET, [str(DRAFTER.folder), "table"], None) is None
    together = save(plan(drafters=[ModelRef("x", DRAFTER.fingerprint(), 1), StatisticsOptions()]), "together")
    assert find_plan(TARGET, [str(DRAFTER.folder), "table"], None) == together
    assert find_plan(TARGET, ["table"], None) == counted


def test_the_device_decides_which(save):
    here = save(plan())
    assert find_plan(TARGET, None, None, "cpu") == find_plan(TARGET, None, None) == here
    assert find_plan(TARGET, None, None, "cuda") is None
    there = save(plan(device="cuda"), "there")
    assert find_plan(TARGET, None, None, "cuda") == there
    assert find_plan(TARGET, None, None, "cpu") == here


def test_a_provisional_plan_serves_its_own_drafters_until_there_is_a_calibrated_one(save):
    usual = automatic_name(TARGET, None, "bfloat16", "cpu")
    tried = save(plan(is_provisional=True), f"{usual}-ngram")
    assert find_plan(TARGET, None, None) is None
    assert find_plan(TARGET, ["ngram"], None) == tried
    calibrated = save(plan(drafters=[ModelRef("x", DRAFTER.fingerprint(), 1)]))
    first = save(plan(drafters=[StatisticsOptions()], is_provisional=True), usual)
    assert find_plan(TARGET, None, None) == calibrated, "whatever drafters it has"
    calibrated.unlink()
    assert find_plan(TARGET, None, None) == first


def test_a_first_use_in_float32_decides_nothing_for_those_without_a_dtype(save):
    """Whether it is newer or older than the first use in bfloat16."""
    usual = save(plan(is_provisional=True), automatic_name(TARGET, None, "bfloat16", "cpu"))
    exact = save(plan(is_provisional=True, dtype="float32"), automatic_name(TARGET, None, "float32", "cpu"))
    assert find_plan(TARGET, None, None) == usual
    assert find_plan(TARGET, None, "float32") == exact
    usual.unlink()
    assert find_plan(TARGET, None, None) is None


def test_a_first_use_without_the_native_library_leaves_no_plan_for_later(save, monkeypatch):
    """Its weights and step costs are those of PyTorch's operators."""
    with monkeypatch.context() as patch:
        patch.setattr(plan_lookup, "is_native", lambda: False)
        without = save(plan(is_provisional=True), automatic_name(TARGET, None, "bfloat16", "cpu"))
        assert find_plan(TARGET, None, None) == without
    monkeypatch.setattr(plan_lookup, "is_native", lambda: True)
    assert find_plan(TARGET, None, None) is None


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((5,), {}, "the model is 5"),
        ((str(TINY / "target"),), {"drafter": [5]}, r"drafter is \[5\]"),
        ((str(TINY / "target"),), {"drafter": b"ngram"}, "drafter is b'ngram'"),
        ((str(TINY / "target"),), {"drafter": 5}, "drafter is 5"),
        ((str(TINY / "target"),), {"dtype": "float16"}, "dtype must be one of"),
        ((str(TINY / "target"),), {"backend": "fast"}, "backend must be one of"),
    ],
)
def test_what_names_no_model_or_drafter_is_refused(arguments, options, said):
    with pytest.raises(YggdrasilError, match=said):
        Decoder.from_pretrained(*arguments, **options)


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        (None, {}, "the plan is None"),
        ("tiny", {"target": 5}, "target is 5"),
        ("tiny", {"dtype": torch.float32}, "dtype must be one of"),
        ("tiny", {"drafter": "ngram"}, "drafter is 'ngram', which lacks name, capabilities, begin"),
        ("tiny", {"drafter": object()}, "which lacks name, capabilities, begin, extend, propose, cost"),
    ],
)
def test_what_opens_no_plan_is_refused(plan, options, said):
    with pytest.raises(YggdrasilError, match=said):
        Decoder.from_plan(plan, force_machine=True, **options)


def test_a_file_of_a_model_is_no_plan(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(YggdrasilError, match=r"model\.gguf is a model and no plan; open it with Decoder"):
        Decoder.from_plan(tmp_path / "model.gguf")


def test_a_plan_that_left_a_drafter_out_is_found_for_it(save):
    """It would be left out again."""
    model, gave = ModelRef("x", DRAFTER.fingerprint(), 1), Expectation("mean", 1.5, 1.0, 1.2)
    without = save(plan(drafters=[StatisticsOptions()], left_out=LeftOut(model, gave, gave)))

    for requested in ([str(DRAFTER.folder)], [str(DRAFTER.folder), "table"], ["table"], None):
        assert find_plan(TARGET, requested, None) == without
    assert find_plan(TARGET, [str(DRAFTER.folder), "ngram"], None) is None
    assert find_plan(TARGET, [str(TARGET.folder), "table"], None) is None


def test_a_damaged_plan_is_passed_over(save):
    first, second = save(plan()), save(plan(), "later")
    second.write_text(second.read_text()[:-40])

    assert find_plan(TARGET, None, None) == first


def test_what_names_a_plan_and_what_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.yaml").write_text("a plan")
    (tmp_path / "copy").write_text("kind: plan\n")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(plan_names, "list_plans", lambda name=None: ["a plan"] if name == "some-name" else [])

    for given in ("some-name", "file.yaml", "copy"):
        assert is_plan(given), given
    for model in ("folder", "./folder", "owner/name", "model.gguf", str(tmp_path)):
        assert not is_plan(model), model


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nothere.gguf", r"there is no file nothere.gguf; .*model files there: model.gguf"),
        ("modle.gguf", r"did you mean model.gguf\?"),
        ("sub/nothere.gguf", "there is no file sub/nothere.gguf"),
        ("llama3", "there is no plan, folder or file llama3; .*plans: mine; a model is a folder"),
        ("mein", r"did you mean mine\? model files there: "),
        ("absent/plan.yaml", "there is no plan file absent/plan.yaml"),
        ("./nowhere", "there is no folder or file ./nowhere"),
        ("/nowhere/at/all", "there is no folder or file /nowhere/at/all"),
        ("folder/model.safetensors", "one file of a checkpoint; give its folder: `folder`"),
        ("weights.bin", "one file of a checkpoint; give its folder: `.`"),
        ("notes.txt", "notes.txt is neither a model nor a plan; give a checkpoint folder, a .gguf file"),
        ("notes", "notes is neither a model nor a plan"),
    ],
)
def test_what_names_nothing_is_told_what_there_is(tmp_path, monkeypatch, given, said):
    """Of plans their names alone: what processors they are for is no help here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("folder/model.safetensors", "weights.bin", "notes.txt", "notes"):
        (tmp_path / name).write_text("text")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    plan_path(tmp_path, "mine", current_machine()).parent.mkdir(parents=True)
    plan_path(tmp_path, "mine", current_machine()).write_text("")
    monkeypatch.setattr(plan_names, "list_plans", lambda name=None: list_plans(name, [tmp_path]))

    with pytest.raises(YggdrasilError, match=said) as caught:
        is_plan(given)
    assert current_machine().cpu not in str(caught.value)


def test_a_plan_is_called_after_its_model(tmp_path):
    (tmp_path / "My Model.Q4_1.gguf").write_bytes(b"GGUF")
    (tmp_path / "SmolLM2").mkdir()

    assert plan_name(tmp_path / "My Model.Q4_1.gguf") == "My-Model.Q4_1"
    assert plan_name(tmp_path / "SmolLM2") == plan_name("owner/SmolLM2") == "SmolLM2"


def test_prompts_that_are_shipped_are_chats_where_there_is_a_template():
    path, is_chat = default_prompts(load_tokenizer(TARGET))

    assert path.exists()
    assert not is_chat, "the bundled target has no template"


def test_a_plan_keeps_its_drafter_and_a_model_must_be_there(tmp_path):
    (tmp_path / "plan.yaml").write_text("kind: plan")
    with pytest.raises(YggdrasilError, match="has other drafters; calibrate for other/model, or give ngram or module"):
        Decoder.from_pretrained(tmp_path / "plan.yaml", drafter="other/model")
    with pytest.raises(YggdrasilError, match="calibrate for text and table, or give ngram"):
        Decoder.from_pretrained(tmp_path / "plan.yaml", drafter=["text", "table"])
    with pytest.raises(YggdrasilError, match=r"holds no config\.json"):
        Decoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(YggdrasilError, match="weights"):
        Decoder.from_pretrained(tmp_path, chat=True)
    with pytest.raises(YggdrasilError, match="dtype must be one of bfloat16, float32"):
        Decoder.from_pretrained(tmp_path, dtype="int3")


def test_a_chat_needs_a_template_before_anything_is_opened(save, monkeypatch):
    for opening in ("yggdrasil.pretrained._first_use", "yggdrasil.pretrained.Decoder.from_plan"):
        monkeypatch.setattr(opening, lambda *_, **__: pytest.fail("it was opened first"))
    target = ModelRef(str(TINY / "target"), TARGET.fingerprint(), 1)
    for source in (TINY / "target", save(plan(target=target))):
        with pytest.raises(YggdrasilError, match="has no chat template"):
            Decoder.from_pretrained(source, chat=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named_before_anything_is_timed(save, monkeypatch):
    monkeypatch.setattr("yggdrasil.pretrained._first_use", lambda *_, **__: pytest.fail("a first use began"))
    with pytest.raises(YggdrasilError, match="no CUDA device can be used here; leave out --device"):
        Decoder.from_pretrained(TINY / "target", device="cuda")
