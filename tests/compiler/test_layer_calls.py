"""A layer traced once and called for every layer: the tokens of transformers, whatever the depth."""

import copy

import pytest
import torch
from tiny import sharpened
from tiny_pair import TEXT, OracleDrafter, TinyPair, make_pair, random_model

from yggdrasil.compiler.in_process import InProcessStep, compiling_by
from yggdrasil.compiler.layer_calls import trace_step
from yggdrasil.engine.host_acceptance import PreparedRequest
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import PLAIN_POLICY, FixedPolicy
from yggdrasil.runtime.graphs import Recorder
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.passes import HostBuffer, Readback
from yggdrasil.scheduling.plan import Shapes
from yggdrasil.serving.errors import fault_of
from yggdrasil.tree.shape import TreeShape

PROMPT = TEXT[:20]
FEW = Shapes(max_length=120, draft_widths=(4,), max_depth=3, candidates=4, verify_widths=(1, 8), prefill_widths=(16,))
TREE = FixedPolicy(TreeShape(4, 3, 8))


def interpret(graph, inputs):
    """Return the graph, which runs operator by operator: a compiler that makes nothing."""
    return graph


def decoder_of(pair, compiler=interpret, **options):
    """A decoder whose steps are all traced; those of the target alone unless a ``drafter`` is given."""
    options = {"drafter": OracleDrafter([*PROMPT, *pair.reference(PROMPT, 30)]), **options}
    with compiling_by(compiler):
        decoder = pair.decoder(TREE, FEW, backend="cudagraph", **options)
        decoder.assembly.complete()
    return decoder


def steps_of(decoder):
    runners = [runner for runner in (decoder.assembly.target, decoder.assembly.drafter) if runner is not None]
    return [step for runner in runners for step in runner._steps.values()]


def plain_step(decoder):
    module, inputs = decoder.assembly.target._defined["plain", 1]
    return trace_step(module, inputs)


def test_tokens_equal_transformers():
    pair = make_pair(num_hidden_layers=3)
    decoder = decoder_of(pair, drafter=pair.drafter)

    for speculation in (True, False):
        found = decoder.generate(PROMPT, max_new_tokens=24, speculation=speculation)
        assert found.tokens == pair.reference(PROMPT, 24)
        assert (found.metrics.aal > 1.5) == speculation
    assert all(step.is_compiled for step in steps_of(decoder) if not step.name.startswith("prefill"))


def test_equal_layers_are_traced_as_one():
    step = plain_step(make_pair(num_hidden_layers=5).decoder(PLAIN_POLICY, FEW, backend="cudagraph"))
    called = [node for node in step.traced.graph.graph.nodes if node.target is torch.ops.yggdrasil.run_layer.default]

    assert (len(called), len(step.graphs), step.graph_of) == (5, 1, [0] * 5)


def test_layers_that_differ_are_traced_apart():
    """Every second layer of Gemma 2 sees a window of the text."""
    from transformers import AutoModelForCausalLM, Gemma2Config

    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
    config = Gemma2Config(**shape, num_key_value_heads=1, num_hidden_layers=4, sliding_window=8)
    torch.manual_seed(0)
    model = sharpened(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), 4)
    untouched = copy.deepcopy(model)
    loaded = prepare_model(model, "gemma", 1)
    pair = TinyPair(loaded, loaded, untouched, untouched)
    decoder = decoder_of(pair)

    assert plain_step(decoder).graph_of == [0, 1, 0, 1]
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == pair.reference(PROMPT, 20)


def test_two_decoders_of_one_shape_keep_to_their_own_weights():
    """Equal graphs are compiled once a process; weights and caches are inputs."""
    compiled = []

    def counting(graph, inputs):
        compiled.append(graph)
        return graph

    pairs = [make_pair(seed=seed) for seed in (0, 1)]
    decoders, counts = [], []
    for pair in pairs:
        decoders.append(decoder_of(pair, counting))
        counts.append(len(compiled))
    for pair, decoder in zip(pairs, decoders, strict=True):
        assert decoder.generate(PROMPT, max_new_tokens=20).tokens == pair.reference(PROMPT, 20)

    assert counts == [len(compiled)] * 2


def test_threads_of_the_caller_change_nothing():
    """Dynamo compiles again when their number changes; traced graphs have no such guard."""
    pair, compiled = make_pair(), []

    def counting(graph, inputs):
        compiled.append(graph)
        return graph

    decoder, before = decoder_of(pair, counting), torch.get_num_threads()
    count = len(compiled)
    try:
        torch.set_num_threads(3)
        tokens = decoder.generate(PROMPT, max_new_tokens=10).tokens
    finally:
        torch.set_num_threads(before)

    assert (tokens, len(compiled)) == (pair.reference(PROMPT, 10), count)


# ==== faults ====


def failing_compiler(graph, inputs):
    raise RuntimeError("no compiler here")


def failing_code(graph, inputs):
    def run(*tensors):
        raise RuntimeError("illegal instruction")

    return run


@pytest.mark.parametrize("compiler", [failing_compiler, failing_code])
def test_what_cannot_be_compiled_runs_uncompiled(compiler, capsys):
    pair = make_pair()
    decoder = decoder_of(pair, compiler)

    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == pair.reference(PROMPT, 20)
    said = capsys.readouterr().err
    assert said.count("the step verify of width 8 runs uncompiled") == 1
    assert not any(step.is_compiled for step in steps_of(decoder))


def test_one_step_that_fails_leaves_the_others_compiled():
    def no_verification(graph, inputs):
        if "best_tokens" in graph.code and "sort" in graph.code:  # what accepts
            raise RuntimeError("too many registers")
        return graph

    pair = make_pair()
    decoder = decoder_of(pair, no_verification)
    uncompiled = {step.name for step in steps_of(decoder) if not step.is_compiled}

    assert uncompiled == {"verify of width 8"}
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == pair.reference(PROMPT, 20)


def test_what_cannot_be_captured_is_run(monkeypatch, capsys):
    def refuse(self, run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recorder, "record", refuse)
    pair = make_pair()
    decoder = decoder_of(pair)

    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == pair.reference(PROMPT, 20)
    assert "a step cannot be captured and runs slower (RuntimeError: operation not permitted" in capsys.readouterr().err


def test_a_full_memory_is_one_sentence(monkeypatch):
    pair = make_pair()
    decoder = pair.decoder(PLAIN_POLICY, FEW, backend="cudagraph")

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as broken:
        broken.setattr(InProcessStep, "__call__", full)
        with pytest.raises(YggdrasilError, match="the GPU's memory is full"):
            decoder.generate(PROMPT, max_new_tokens=5)

    assert decoder.generate(PROMPT, max_new_tokens=5).tokens == pair.reference(PROMPT, 5)


def test_work_that_has_failed_runs_before_it_is_recorded(monkeypatch):
    """Recording allows no allocation, and the run that failed may have allocated nothing."""
    recorder, log, faults = Recorder(torch.device("cpu")), [], [torch.OutOfMemoryError("full")]

    def work():
        log.append("run")
        if faults:
            raise faults.pop()
        return ()

    monkeypatch.setattr(recorder, "record", lambda run: log.append("record") or run)
    step = recorder.capture(work)
    with pytest.raises(YggdrasilError, match="memory is full"):
        step()
    step()
    assert log == ["run", "run"]
    step()
    assert log == ["run", "run", "record", "run"]


@pytest.mark.parametrize(("owner", "name"), [(HostBuffer, "write"), (Readback, "wait"), (PreparedRequest, "begin")])
def test_a_memory_that_fills_outside_a_capture_ends_one_request(monkeypatch, owner, name):
    """Also where a buffer or a transfer is at fault, and the next request decodes."""
    pair = make_pair()
    decoder = pair.decoder(FixedPolicy(TreeShape(4, 3, 8)), FEW, backend="cudagraph")
    expected = decoder.generate(PROMPT, max_new_tokens=20).tokens

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as broken:
        broken.setattr(owner, name, full)
        with pytest.raises(YggdrasilError, match="the GPU's memory is full") as caught:
            decoder.generate(PROMPT, max_new_tokens=20)

    assert fault_of(caught.value).status == 500
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected == pair.reference(PROMPT, 20)


def test_a_model_whose_layers_give_more_than_a_tensor_runs_uncompiled(capsys):
    pair = make_pair()
    layer = pair.target.model.model.layers[0]
    forward = type(layer).forward
    layer.__class__ = type("Odd", (type(layer),), {"forward": lambda self, *a, **k: (forward(self, *a, **k),) * 2})
    with pytest.raises(TypeError, match="not one tensor"):
        plain_step(pair.decoder(PLAIN_POLICY, FEW, backend="cudagraph"))


def test_a_random_model_of_another_depth_shares_no_more_than_its_layers():
    deep, shallow = (random_model(num_hidden_layers=layers) for layers in (4, 2))
    graphs = []
    for model in (deep, shallow):
        loaded = prepare_model(model, "model", 1)
        graphs.append(
            plain_step(TinyPair(loaded, loaded, model, model).decoder(PLAIN_POLICY, FEW, backend="cudagraph"))
        )

    assert graphs[0].graphs[0].graph.code == graphs[1].graphs[0].graph.code
    assert graphs[0].traced.graph.code != graphs[1].traced.graph.code
