"""A model that nobody calibrated: timed within seconds, it decodes what it alone would, and what it shows is kept."""

import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from calibrated_pair import write_pair
from gguf_files import Kind, tiny_model, write_gguf
from tiny import new_model

from yggdrasil.artifacts import current_machine, gguf, list_plans, names, parse_yaml, store
from yggdrasil.calibration import first_use, pair
from yggdrasil.calibration.own_text import Document
from yggdrasil.checkpoints import kept_tokenizer
from yggdrasil.checkpoints.model_sizes import ModelSizes
from yggdrasil.checkpoints.source import Source
from yggdrasil.drafters.model_free_options import StatisticsOptions
from yggdrasil.drafters.statistics.scorer import NGramScorer
from yggdrasil.drafters.statistics.table import Table
from yggdrasil.drafters.statistics.table_files import SCORER_FILE, TABLE_FILE
from yggdrasil.engine.online_estimates import (
    BUSY,
    LEAST_PASSES,
    OnlineEstimates,
    refined_costs,
    state_file,
    was_busy,
)
from yggdrasil.engine.recommended_sampling import recommended_sampling_of
from yggdrasil.engine.trace import Trace
from yggdrasil.errors import YggdrasilError
from yggdrasil.pretrained import Decoder
from yggdrasil.runtime.loading import load_model
from yggdrasil.runtime.runner import ModelRunner, _eager
from yggdrasil.scheduling.plan import Costs, Plan
from yggdrasil.tree.shape import PLAIN_STEP, TreeShape

PROMPT = "the only way, on an inner tour. the only way"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def user_cache(tmp_path, monkeypatch):
    """An empty cache of plans; nothing is found elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("YGGDRASIL_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(model, **options):
    return Decoder.from_pretrained(model, dtype="float32", backend="eager", **options)


def kept_plan():
    (entry,) = [entry for entry in list_plans() if entry.fits(current_machine()) and "target" in entry.name]
    return entry.path


@pytest.mark.parametrize("drafter", [None, "draft model"])
def test_a_first_use_times_the_steps_and_decodes_what_the_model_alone_would(
    models, user_cache, capsys, monkeypatch, drafter
):
    target, draft_model = models
    monkeypatch.setattr("yggdrasil.drafters.heads.kinds.module_note", "about {}".format)
    decoder = opened(target, drafter=None if drafter is None else [str(draft_model), "text"])
    said = capsys.readouterr().err

    assert f"first use of {target}" in said
    assert f"`yggdrasil calibrate {target}`" in said
    assert (f"about {target}" in said) == (drafter is None)
    plan = Plan.load(kept_plan())
    assert plan.is_provisional
    assert (plan.drafter is not None) == (drafter is not None)
    (costs,) = plan.costs
    assert costs.plain_ms != first_use._ASSUMED_MS
    assert set(costs.verify_ms) == set(plan.shapes.verify_widths)
    assert set(costs.draft_ms) == set(plan.shapes.draft_widths)
    answer = decoder.generate(PROMPT, max_new_tokens=40)
    assert answer.tokens == decoder.generate(PROMPT, max_new_tokens=40, speculation=False).tokens
    assert answer.metrics.iterations < 39 or answer.metrics.accepted == 0


def test_a_first_use_compiles_nothing(models, user_cache, capsys, monkeypatch):
    """Nor does a later one: of an architecture without native steps PyTorch runs the passes."""
    monkeypatch.setattr(ModelRunner, "_build", lambda runner, *step: _uncompiled(runner, *step))
    folder = user_cache / "target"
    new_model("gpt_neox", torch.float32, vocab_size=256).save_pretrained(folder)
    for file in models[0].glob("tokenizer*"):
        shutil.copy(file, folder)
    for is_first in (True, False):
        decoder = Decoder.from_pretrained(folder, dtype="float32")
        assert decoder.assembly.target.backend == "eager"
        assert ("passes uncompiled; `--backend inductor`" in capsys.readouterr().err) == is_first
    answer = decoder.generate([5, 6, 7, 5, 6], max_new_tokens=8)
    assert answer.tokens == decoder.generate([5, 6, 7, 5, 6], max_new_tokens=8, speculation=False).tokens


def _uncompiled(runner, name, width):
    assert runner.backend != "inductor", f"{name} of width {width} is compiled"
    return partial(_eager, *runner._defined[name, width])


@pytest.mark.parametrize(
    ("gib", "contexts", "expected"),
    [
        (24, (32768,), 32768),  # 28 KiB a position: 1.5 GiB hold 57,344
        (12, (32768,), 16384),  # 28,672, down to a power of two
        (0.5, (32768,), 2048),  # never less
        (24, (512,), 512),  # but by the model
        (12, (32768, 32768), 8192),  # two caches
        (24, (32768, 4096), 4096),
    ],
)
def test_the_usual_context_is_the_models_own_within_a_sixteenth_of_the_memory(monkeypatch, gib, contexts, expected):
    models = [ModelSizes(context, 151936, 1536, 12, ((2, 128),) * 28, None) for context in contexts]
    monkeypatch.setattr(pair, "Source", SimpleNamespace(find=int))
    monkeypatch.setattr(pair, "sizes_of", models.__getitem__)
    monkeypatch.setattr(pair, "is_head", lambda _: False)
    monkeypatch.setattr(pair, "current_machine", lambda: SimpleNamespace(memory_gib=gib))

    drafter = "1" if len(contexts) > 1 else None
    assert pair.default_max_length("0", drafter) == expected
    monkeypatch.setattr(pair, "current_machine", lambda: SimpleNamespace(memory_gib=1024))
    monkeypatch.setattr(pair, "total_card_bytes", lambda: int(gib * 2**30))
    assert pair.default_max_length("0", drafter, "cuda") == expected  # the card's memory counts, not the host's


def test_the_next_use_times_nothing(models, user_cache, capsys, monkeypatch):
    opened(models[0])
    monkeypatch.setattr(first_use, "with_measured_costs", lambda *_: pytest.fail("it was timed again"))
    capsys.readouterr()

    assert opened(models[0]).plan.is_provisional
    assert "first use" not in capsys.readouterr().err


def test_the_next_use_parses_the_models_own_plan_alone(models, user_cache, monkeypatch):
    """Twice, to choose it and to open it, however many plans of other models there are."""
    opened(models[0])
    own = kept_plan().read_bytes()
    fingerprint = Source.find(models[0]).fingerprint()
    for number in range(10):
        other = kept_plan().parent.with_name(f"other-{number}") / kept_plan().name
        other.parent.mkdir()
        other.write_bytes(own.replace(fingerprint.encode(), b"0" * len(fingerprint)))
    parsed = []
    for module in (store, names):
        monkeypatch.setattr(module, "parse_yaml", lambda text: parsed.append(text) or parse_yaml(text))

    opened(models[0])

    assert parsed == [own] * 2


class BusyMachine:
    """A timer by which a pass over W rows takes 10 + W ms, and every run of ``paused`` widths before ``ends`` 3,840."""

    def __init__(self, paused, ends):
        self.paused, self.ends, self.runs = paused, ends, 0

    def __call__(self, run):
        run()
        self.runs += 1
        width = run.args[0] if isinstance(run.args[0], int) else run.args[1]
        return 3840.0 if width in self.paused and self.runs <= self.ends else 10.0 + width


@pytest.mark.parametrize(
    ("paused", "ends"), [((8,), 60), ((16,), 1000), ((1,), 1000), ((6, 8, 12, 16), 60)],
    ids=["once", "always, the widest", "always, the plain step", "once, all wide"],
)  # fmt: skip
def test_a_busy_machine_leaves_no_false_costs(models, user_cache, monkeypatch, paused, ends):
    monkeypatch.setattr(first_use, "timer_for", lambda _: BusyMachine(paused, ends))
    monkeypatch.setattr(first_use, "SECONDS", 1e9)
    opened(models[0])

    (costs,) = Plan.load(kept_plan()).costs
    assert costs.plain_ms < 30
    for width, ms in costs.verify_ms.items():
        is_hidden = width in paused and ends == 1000
        assert ms == pytest.approx(10 + width) or (is_hidden and ms < 1.5 * 2 * (10 + width))


def test_kept_costs_that_a_pause_explains_are_timed_again(models, user_cache, monkeypatch, capsys):
    opened(models[0])
    plan = Plan.load(kept_plan())
    (costs,) = plan.costs
    false = {width: 3840.0 if width >= 8 else 10.0 + width for width in costs.verify_ms}
    replace(plan, costs=[replace(costs, verify_ms=false, plain_ms=12.0)]).save(kept_plan())
    monkeypatch.setattr(first_use, "timer_for", lambda _: BusyMachine((), 0))
    capsys.readouterr()
    opened(models[0])

    assert "the machine was busy when the steps were timed; they are timed again" in capsys.readouterr().err
    (mended,) = Plan.load(kept_plan()).costs
    assert mended.verify_ms[8] == pytest.approx(18.0)
    monkeypatch.setattr(first_use, "timer_for", None)  # nothing is timed
    assert opened(models[0]).plan.costs == [mended]


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_costs_that_answers_show_to_be_a_busy_machines_are_timed_again(models, user_cache, share):
    """The timed costs of a width that no answer verified would stay wrong."""
    plan = opened(models[0]).plan
    (costs,) = plan.costs
    narrow = sorted(costs.verify_ms)[:2]
    estimates = OnlineEstimates(kept_plan(), plan, dict)
    passes = [(width, share * costs.verify_ms[width]) for width in narrow]
    estimates.add(traced(*passes * (LEAST_PASSES // 2 - 1)))
    estimates.save()
    assert not was_busy(kept_plan()), "too few passes"
    estimates.add(traced(*passes * LEAST_PASSES))
    estimates.add(traced(*[(width, costs.verify_ms[width]) for width in narrow] * LEAST_PASSES))
    estimates.save()

    assert was_busy(kept_plan()) == (share < BUSY)


def test_a_plan_that_a_busy_machine_timed_is_timed_again(models, user_cache, monkeypatch, capsys):
    with monkeypatch.context() as busy:
        busy.setattr(first_use, "timer_for", lambda _: BusyMachine(range(100), 1e9))  # far slower than the passes are
        opened(models[0]).generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    capsys.readouterr()
    opened(models[0])

    assert "they are timed again" in capsys.readouterr().err
    assert Plan.load(kept_plan()).costs[0].plain_ms < 1000.0


def test_what_answers_show_of_costs_is_kept_for_the_next_use(models, user_cache):
    decoder = opened(models[0])
    before = Plan.load(kept_plan()).costs
    decoder.generate(PROMPT, max_new_tokens=60)

    assert Plan.load(kept_plan()).costs != before
    assert state_file(kept_plan()).exists()


def test_a_damaged_plan_is_made_anew_and_foreign_statistics_are_dropped(models, user_cache, capsys):
    opened(models[0]).generate(PROMPT, max_new_tokens=20)
    path = kept_plan()
    state_file(path).write_text('{"version": 1, "model": "another"}')
    capsys.readouterr()
    opened(models[0])
    assert "is damaged or of another model; acceptance is learned anew" in capsys.readouterr().err
    assert not state_file(path).exists()

    path.write_text(path.read_text()[:-30])
    opened(models[0])
    assert "is damaged, of an older version or of another draft head; it is created again" in capsys.readouterr().err
    assert Plan.load(path).is_provisional


def traced(*passes):
    """A trace of (verify width, milliseconds) passes."""
    trace = Trace()
    for width, milliseconds in passes:
        trace.note(PLAIN_STEP if width == 1 else TreeShape(0, 1, width), 1, 1.0, 0.0)
        trace.note_pass(int(milliseconds * 1e6))
    return trace


def test_costs_follow_the_passes_of_their_width_and_the_others_in_proportion():
    costs = Costs(128, 1.0, {2: 1.0}, {1: 10.0, 4: 12.0, 8: 16.0}, 0.1, 10.1)
    slower = refined_costs(costs, traced(*[(4, 24.0)] * 640))

    assert slower.verify_ms[4] == pytest.approx(12 * (64 + 640 * 2) / 704)
    assert slower.verify_ms[8] == pytest.approx(16 * (64 + 640 * 2) / 704)
    assert slower.plain_ms - slower.verify_ms[1] == pytest.approx(0.1)
    assert slower.draft_ms[2] > 1.8
    assert refined_costs(costs, traced()) == costs
    one_width = refined_costs(costs, traced(*[(1, 10.0)] * 600, *[(8, 160.0)] * 600))
    assert one_width.verify_ms[1] == pytest.approx(10.0)
    assert one_width.verify_ms[8] > 100
    faster_wide = refined_costs(costs, traced(*[(8, 11.0)] * 10_000, *[(1, 10.0)] * 10_000, *[(4, 12.0)] * 10_000))
    assert faster_wide.verify_ms[4] == faster_wide.verify_ms[8], "never dearer than a wider pass"
    faster_wide.steps()


def test_estimates_that_cannot_be_written_end_no_request(models, user_cache, monkeypatch):
    opened(models[0])
    path = kept_plan()
    estimates = OnlineEstimates(path.parent / "is a file" / "x" / "plan.yaml", Plan.load(path), dict)
    (path.parent / "is a file").write_text("")
    estimates.add(traced((4, 2.0)))


def test_a_table_that_is_shipped_for_the_model_is_used(models, user_cache, monkeypatch, tmp_path):
    table = tmp_path / "shipped"
    table.mkdir()
    NGramScorer.default(with_table=True).save(table / SCORER_FILE)
    Table.of([Document([1, 2, 3], [4, 5, 6] * 4)]).save(table / TABLE_FILE)
    monkeypatch.setattr(first_use, "table_folder", lambda _: table)

    assert opened(models[0]).plan.model_free == (StatisticsOptions(table=True),)
    assert opened(models[0], drafter="text").plan.model_free == (StatisticsOptions(table=False),)


def test_an_open_decoder_keeps_no_vocabulary_of_its_file(tmp_path, user_cache):
    """After a first use and a later one, by a link; 20 MB of a file with 150,000 tokens."""
    link = tmp_path / "link.gguf"
    link.symlink_to(write_gguf(tmp_path / "model.gguf", tiny_model("llama")))
    gguf.forget_headers()
    for _ in range(2):
        gguf.read_gguf_layout(link)
        assert gguf._read.cache_info().currsize == 0
        recommended_sampling_of(opened(link))
        assert gguf._read.cache_info().currsize == 0


def test_a_first_chat_parses_the_tokenizer_once(tmp_path, user_cache, monkeypatch):
    """Two parsed tokenizers of 150,000 tokens would take 45 MB more."""
    parsed, parse = [], kept_tokenizer._compact
    monkeypatch.setattr(kept_tokenizer, "_compact", lambda *given: parsed.append(given[0]) or parse(*given))

    opened(write_gguf(tmp_path / "model.gguf", tiny_model("llama")), chat=True)

    assert len(parsed) == 1


@pytest.mark.slow
def test_a_first_use_on_a_gpu(models, tmp_path):
    """On the device that stands in for one: the same tokens, by a plan for that device, found again."""
    target, draft_model = models
    expected = opened(target).generate(PROMPT, max_new_tokens=30).tokens
    with ProcessPoolExecutor(1, get_context("spawn"), import_module, ("on_stand_in",)) as processes:
        found = processes.submit(_there, str(target), str(draft_model), str(tmp_path), PROMPT).result()

    assert found == {
        "tokens": expected, "where": "apart", "device": "cuda", "weights": "full", "found again": True
    }  # fmt: skip


def test_quantised_blocks_and_mixtures_on_a_gpu(tmp_path):
    """Tokens of transformers on the dequantised weights, also of a mixture of experts, which full ones decode, too."""
    prompt, settings = [5, 9, 9, 40, 7], {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    ids, files, expected = torch.tensor([prompt]), [], []
    models = {"llama": tiny_model("llama"), "qwen3_moe": tiny_model("qwen3_moe", num_experts=5, num_experts_per_tok=3)}
    for family, model in models.items():
        file = write_gguf(tmp_path / f"{family}.gguf", model, family, Kind.Q5_0)
        full = load_model(file, torch.float32, torch.device("cpu"), 1, pack=False).model
        full.set_attn_implementation("eager")
        answer = full.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
        expected.append(answer[0, len(prompt) :].tolist())
        files.append((str(file), "file"))
    files, expected = [*files, (files[-1][0], "full")], [*expected, expected[-1]]
    with ProcessPoolExecutor(1, get_context("spawn"), import_module, ("on_stand_in",)) as processes:
        found = processes.submit(_there, files, prompt, of="decoded").result()

    assert [each["tokens"] for each in found] == expected
    assert all(each["where"] == {"apart"} for each in found)
    assert [each["waits"] for each in found] == [[], [], []]
    plain, mixture, full = (each["layers"] for each in found)
    assert (plain["QuantisedLinear"], plain["QuantisedEmbedding"]) == (1 + 4 * 2, 1)  # q, k and v are one, gate and up
    assert (mixture["QuantisedEmbedding"], mixture["QuantisedExperts"]) == (1, 2)
    assert not full


def _there(*given, of="first_use"):
    return getattr(import_module("on_stand_in"), of)(*given)


def test_a_plan_of_another_device_is_refused(models, user_cache):
    opened(models[0], device="cpu")
    with pytest.raises(YggdrasilError, match="is for the device cpu; calibrate one with --device cuda"):
        Decoder.from_pretrained(kept_plan(), device="cuda")
    with pytest.raises(YggdrasilError, match="device must be one of cpu, cuda, not 'tpu'"):
        opened(models[0], device="tpu")
