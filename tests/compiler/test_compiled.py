"""Steps that TorchInductor compiles: the tokens of transformers, and the same bits of a row at every width."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny import tiny_model
from tiny_pair import TEXT, OracleDrafter, TinyPair

from yggdrasil.compiler import in_process
from yggdrasil.native import is_native
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.tree.shape import TreeShape

PROMPT, FAMILY = TEXT[:12], "gpt_neox"  # of a family that no native steps cover, with norms that subtract a mean
SHAPES = Shapes(max_length=80, draft_widths=(2,), max_depth=3, candidates=2, verify_widths=(1, 8), prefill_widths=(8,))
TREE = FixedPolicy(TreeShape(2, 3, 8))


def pair_of(dtype):
    model = tiny_model(FAMILY).to(dtype)
    untouched = copy.deepcopy(model)
    untouched.set_attn_implementation("eager")
    loaded = prepare_model(model, FAMILY, 1)
    return TinyPair(loaded, loaded, untouched, untouched)


def decoder_of(pair, policy, drafter=None, shapes=SHAPES):
    decoder = pair.decoder(policy, shapes, drafter=drafter, backend="native")
    assert decoder.assembly.target.backend == "inductor"
    return decoder


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.skipif(not is_native(), reason="the portable kernels' sums depend on the width")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_have_the_same_bits_whatever_travels_with_them(dtype, compile_cache):
    """Hidden states, keys and values of verified rows against those of plain steps, and so the tokens."""
    pair = pair_of(dtype)
    plain = decoder_of(pair, PLAIN_POLICY)
    plain.assembly.complete()
    assert all(step.is_compiled for step in plain.assembly.target._steps.values())
    plain_states = record_states(plain.assembly.engine.target)
    expected = plain.generate(PROMPT, max_new_tokens=40).tokens
    if dtype == torch.float32:
        assert expected == pair.reference(PROMPT, 40)

    tree = decoder_of(pair, TREE, OracleDrafter([*PROMPT, *expected]))
    tree_states = record_states(tree.assembly.engine.target)
    generation = tree.generate(PROMPT, max_new_tokens=40)

    assert generation.tokens == expected
    assert 1.5 < generation.metrics.aal < 4.0
    shared = plain_states.keys() & tree_states.keys()
    assert len(shared) == 39
    assert [place for place in sorted(shared) if not torch.equal(plain_states[place], tree_states[place])] == []
    length = len(PROMPT) + 39
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


def test_a_machine_without_a_compiler_decodes_the_same_tokens(monkeypatch, capsys):
    def fail(graph, inputs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setitem(in_process._COMPILERS, "cpu", fail)
    pair = pair_of(torch.float32)
    decoder = decoder_of(pair, PLAIN_POLICY, shapes=replace(SHAPES, verify_widths=(1,)))
    decoder.assembly.complete()

    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == pair.reference(PROMPT, 20)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "runs uncompiled and so slower (RuntimeError: no C++ compiler)" in said[0]


def test_a_library_that_was_cut_off_is_compiled_again(tmp_path, monkeypatch):
    """A process may be killed while it writes one."""
    library, calls = tmp_path / "half.main.so", []
    library.touch()
    monkeypatch.setattr(in_process, "_USERS_FOLDER", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def compile_once(graph, inputs, options):
        calls.append(graph)
        if library.exists():
            raise ImportError(f"{library}: file too short")
        return graph

    monkeypatch.setattr(in_process, "compile_by_inductor", compile_once)

    assert in_process.compile_for_cpu("graph", []) == "graph"
    assert len(calls) == 2


def test_where_one_step_cannot_be_compiled_none_is(monkeypatch):
    """Rows of compiled steps and of others differ in their last bits, and so may the text."""

    made = []

    def fail_once(graph, inputs):
        made.append(graph)
        if len(made) == 4:
            raise RuntimeError("too long")
        return graph

    monkeypatch.setitem(in_process._COMPILERS, "cpu", fail_once)
    pair = pair_of(torch.float32)
    decoder = decoder_of(pair, PLAIN_POLICY)
    decoder.assembly.complete()

    assert not any(isinstance(step, in_process.InProcessStep) and step.is_compiled for step in steps_of(decoder))
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == pair.reference(PROMPT, 20)


def steps_of(decoder):
    return decoder.assembly.target._steps.values()


@pytest.mark.compiled
def test_options_that_this_pytorch_does_not_have_are_left_out(compile_cache, monkeypatch):
    """PyTorch 2.11 has not all of them: with such an option no step was compiled."""
    monkeypatch.setitem(in_process._CPU_OPTIONS, "cpp.an_option_of_another_version", 0)
    decoder = decoder_of(pair_of(torch.float32), PLAIN_POLICY, shapes=replace(SHAPES, verify_widths=(1,)))
    decoder.assembly.complete()

    assert all(step.is_compiled for step in decoder.assembly.target._steps.values())
