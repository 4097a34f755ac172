"""Compiled steps: the tokens of eager ones, compiled once for ever, and the same bits for every width."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from tiny_pair import TEXT, OracleDrafter, addresses, make_pair, noisy_copy, random_model

from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.compiler import compiled
from yggdrasil.drafters import Capabilities
from yggdrasil.engine.assembly import assemble
from yggdrasil.errors import YggdrasilError
from yggdrasil.native import is_native
from yggdrasil.native.shims import c_shims
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.runtime.loading import load_model, prepare_model
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

PROMPT = TEXT[:12]
SHAPES = Shapes(max_length=80, draft_widths=(2,), max_depth=3, candidates=2, verify_widths=(1, 4), prefill_widths=(8,))
TREE = FixedPolicy(TreeShape(2, 3, 4))
# One a step for all widths above 1: the pair's two prefills share a package, being of one configuration.
PACKAGES = ["finish-wn", "grow-wn", "head-wn", "plain-w1", "prefill-wn", "verify-wn"]


@pytest.fixture(scope="module")
def compiled_decoder(pair, compile_cache):
    """Every step of the pair, compiled."""
    decoder = pair.decoder(TREE, SHAPES, backend="inductor")
    decoder.assembly.warm()
    return decoder


@pytest.fixture
def no_compiler(monkeypatch):
    """Whoever asks for a compiler fails, be it PyTorch's or the system's."""

    def refuse(*_, **__):
        raise AssertionError("a compiler was called")

    monkeypatch.setattr(compiled, "compile_package", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(torch.export, "export", refuse)
    monkeypatch.setattr(torch._dynamo, "optimize", refuse)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", refuse)


@pytest.mark.compiled
def test_compiled_tokens_equal_eager_ones(pair, compiled_decoder, compile_cache):
    expected = pair.reference(PROMPT, 50)
    eager = pair.decoder(TREE, SHAPES)
    for speculation in (True, False):
        ours = compiled_decoder.generate(PROMPT, max_new_tokens=50, speculation=speculation)
        theirs = eager.generate(PROMPT, max_new_tokens=50, speculation=speculation)

        assert ours.tokens == theirs.tokens == expected
        assert ours.metrics.iterations == theirs.metrics.iterations  # the same trees were drafted and accepted
    packages = sorted(path.name.rpartition("-")[0] for path in (compile_cache / "steps").glob("*.pt2"))
    assert packages == PACKAGES


@pytest.mark.compiled
def test_loading_a_package_does_not_import_the_compiler(compiled_decoder, compile_cache):
    """It takes two seconds, at every start."""
    (package,) = (compile_cache / "steps").glob("finish-*.pt2")
    script = (
        "import sys; from pathlib import Path; from yggdrasil.compiler.packages import open_package;"
        f"open_package(Path({str(package)!r})); sys.exit('torch._inductor.codecache' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.compiled
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is mapped")
def test_what_pytorch_unpacks_is_gone_once_it_is_loaded(compiled_decoder, compile_cache, tmp_path):
    """Each start would leave two megabytes."""
    (package,) = (compile_cache / "steps").glob("verify-*.pt2")
    script = (
        "import os; from pathlib import Path; from yggdrasil.compiler.packages import open_package;"
        f"open_package(Path({str(package)!r})); print(*os.listdir({str(tmp_path)!r})); os._exit(0)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


@pytest.mark.compiled
@pytest.mark.skipif(not c_shims(), reason="steps call operators through the dispatcher here")
def test_steps_call_our_operators_directly(compiled_decoder, compile_cache):
    """What a wrapper's JSON lists goes through boxes and the dispatcher, at ten times the price of a call."""
    direct = {operator.name() for operator in c_shims()}
    packages = list((compile_cache / "steps").glob("*.pt2"))
    boxed = {}
    for package in packages:
        with ZipFile(package) as archive:
            lists = [name for name in archive.namelist() if name.endswith(".wrapper.json")]
            nodes = [node["node"] for name in lists for node in json.loads(archive.read(name))["nodes"]]
        boxed[package.name] = [node["target"] for node in nodes]

    assert "yggdrasil::tree_attention" in direct
    assert len(packages) == len(PACKAGES)
    assert not {name for names in boxed.values() for name in names} & direct


@pytest.mark.compiled
def test_a_second_start_compiles_nothing_and_takes_any_weights(compiled_decoder, no_compiler):
    other = make_pair(seed=5)
    decoder = other.decoder(TREE, SHAPES, backend="inductor")
    runners = (decoder.assembly.target, decoder.assembly.drafter)

    assert all(runner.is_compiled(*step) for runner in runners for step in runner.defined)
    assert not any(runner.compile(*step) for runner in runners for step in runner.defined)
    generation = decoder.generate(PROMPT, max_new_tokens=50)
    assert generation.tokens == other.reference(PROMPT, 50)
    assert generation.tokens != compiled_decoder.generate(PROMPT, max_new_tokens=50).tokens


@pytest.mark.compiled
def test_decoding_calls_no_compiler_and_moves_no_buffer(pair, compiled_decoder, no_compiler):
    before = addresses(compiled_decoder)
    for prompt in (PROMPT, TEXT[30:31], TEXT[:70]):
        tokens = compiled_decoder.generate(prompt, max_new_tokens=30).tokens

        assert tokens == pair.reference(prompt, min(30, 80 - len(prompt)))
        assert addresses(compiled_decoder) == before


@pytest.mark.compiled
@pytest.mark.skipif(not is_native(), reason="PyTorch's own loader holds Python's lock")
def test_other_threads_go_on_while_a_step_runs(compiled_decoder):
    """Else a server could neither read nor send while it decodes. No thread is made to give up the lock here."""
    interval = sys.getswitchinterval()
    step, ticks, has_ended = compiled_decoder.assembly.target.step("plain", 1), 0, threading.Event()

    def tick():
        nonlocal ticks
        while not has_ended.is_set():
            ticks += 1
            time.sleep(0)

    def goes_on():
        before = ticks
        step()
        return ticks > before

    thread = threading.Thread(target=tick)
    thread.start()
    sys.setswitchinterval(1e3)
    try:
        assert any(goes_on() for _ in range(100_000))
    finally:
        sys.setswitchinterval(interval)
        has_ended.set()
        thread.join()


@pytest.mark.compiled
@pytest.mark.skipif(not is_native(), reason="the portable kernels' sums depend on the width")
def test_bf16_rows_have_the_same_bits_whatever_travels_with_them(compile_cache):
    """Hidden states, keys and values of verified rows against those of plain steps, and so the tokens."""
    pair = make_pair(dtype=torch.bfloat16)
    shapes = replace(SHAPES, verify_widths=(1, 8))
    plain = pair.decoder(PLAIN_POLICY, shapes, drafter=None, backend="inductor")
    plain_states = record_states(plain.assembly.engine.target)
    expected = plain.generate(PROMPT, max_new_tokens=60).tokens

    oracle = OracleDrafter([*PROMPT, *expected])
    tree = pair.decoder(FixedPolicy(TreeShape(2, 3, 8)), shapes, drafter=oracle, backend="inductor")
    tree_states = record_states(tree.assembly.engine.target)
    generation = tree.generate(PROMPT, max_new_tokens=60)

    assert generation.tokens == expected
    assert 1.5 < generation.metrics.aal < 4.0
    shared = plain_states.keys() & tree_states.keys()
    assert len(shared) == 59
    assert [place for place in sorted(shared) if not torch.equal(plain_states[place], tree_states[place])] == []
    length = len(PROMPT) + 59
    for ours, theirs in zip(tree.assembly.target.cache.tensors(), plain.assembly.target.cache.tensors(), strict=True):
        assert torch.equal(ours[:, :length], theirs[:, :length])


def record_states(target):
    """The hidden state at every position that becomes certain from now on, [H] each."""
    states, plain, accept = {}, target.plain, target.accept

    def plain_and_note(token):
        outcome = plain(token)
        states[target.length] = outcome.hidden.clone()
        return outcome

    def accept_and_note(outputs, width):
        outcome = accept(outputs, width)
        states.update({target.length + i: outputs[1][row].clone() for i, row in enumerate(outcome.rows)})
        return outcome

    target.plain, target.accept = plain_and_note, accept_and_note
    return states


# ==== names of packages: nothing is compiled below ====


def package_names(target, drafter, shapes=SHAPES):
    """File names of every step, by model."""
    assembly = assemble(target, drafter, shapes, "inductor")
    runners = (assembly.target, assembly.drafter)
    return [{key.file_name() for _, _, key in runner._defined.values()} for runner in runners]


def loaded(model, num_threads=1, pack=True):
    return prepare_model(model, "tiny", num_threads, pack=pack)


@pytest.fixture(scope="module")
def base_names():
    return package_names(loaded(random_model()), loaded(random_model()))


def test_names_do_not_depend_on_values_or_places(base_names, tmp_path):
    other = loaded(noisy_copy(random_model(seed=3), 0.1))
    assert package_names(other, other) == base_names

    folders = [tmp_path / "here", tmp_path / "there"]
    for seed, folder in enumerate(folders):
        random_model(seed).save_pretrained(folder)
    here, there = (load_model(folder, torch.float32, torch.device("cpu"), 1) for folder in folders)
    assert package_names(here, here) == package_names(there, there)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 1},
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_configuration_needs_other_packages(base_names, change):
    other = loaded(random_model(**change))

    for ours, theirs in zip(package_names(other, other), base_names, strict=True):
        assert not ours & theirs


@pytest.mark.parametrize("how", ["dtype", "threads", "layout", "length", "weights"])
def test_anything_else_that_is_compiled_in_needs_other_packages(base_names, how):
    other = {
        "dtype": lambda: loaded(random_model().bfloat16()),
        "threads": lambda: loaded(random_model(), num_threads=2),
        "layout": lambda: loaded(random_model(), pack=False),
        "length": lambda: loaded(random_model()),
        "weights": lambda: prepare_model(model := random_model(), "tiny", 1, quantise=rounding_to("q8_0", model)),
    }[how]()
    shapes = replace(SHAPES, max_length=81) if how == "length" else SHAPES

    for ours, theirs in zip(package_names(other, other, shapes), base_names, strict=True):
        assert not ours & theirs


def test_a_drafter_cut_to_a_smaller_vocabulary_needs_other_packages(base_names):
    _, drafter_names = package_names(loaded(random_model(vocab_size=64)), loaded(random_model()))

    assert not drafter_names & base_names[1]


def test_a_target_read_by_a_drafter_needs_other_packages(base_names):
    drafter = OracleDrafter([])
    drafter.capabilities = Capabilities(layers=(0,))
    assembly = assemble(loaded(random_model()), drafter, SHAPES, "inductor")

    assert not {key.file_name() for _, _, key in assembly.target._defined.values()} & base_names[0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (OSError(27, "File too large"), r"PyTorch cannot write .*\(File too large\); check .*TORCHINDUCTOR_CACHE_DIR"),
        (ValueError("no such intrinsic"), r"the C\+\+ compiler failed on x\.pt2 \(ValueError: no such intrinsic"),
    ],
    ids=["disk", "compiler"],
)
def test_a_full_disk_is_not_called_a_fault_of_the_compiler(tmp_path, monkeypatch, fault, said):
    """inductor wraps both."""
    from torch._inductor.exc import InductorError

    from yggdrasil.compiler.compiled import _write_package

    def fail(*_, **__):
        raise InductorError(fault, None)

    monkeypatch.setattr("torch._inductor.aot_compile", fail)
    with pytest.raises(YggdrasilError, match=said):
        _write_package(SimpleNamespace(module=None, examples=()), tmp_path / "x.pt2")
    assert not (tmp_path / "x.pt2").exists()
