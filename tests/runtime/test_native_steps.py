"""Steps made from a configuration compute what transformers' model does, with the same bits at every width."""

import copy
from functools import cache

import pytest
import torch
from recurrent_models import recurrent_config, recurrent_model
from tiny import VOCAB_SIZE, all_plain_logits, tiny_config, tiny_model
from transformers import AutoConfig

from yggdrasil.acceptance.greedy import walk_greedy
from yggdrasil.checkpoints.formats.rounding import rounding_to
from yggdrasil.native import is_native
from yggdrasil.runtime.loading import prepare_model
from yggdrasil.runtime.native_steps.call import RotaryTable, frequencies
from yggdrasil.runtime.native_steps.description import describe
from yggdrasil.runtime.native_steps.families import FAMILIES, with_defaults
from yggdrasil.runtime.runner import ModelRunner

pytestmark = pytest.mark.skipif(not is_native(), reason="the native library is not there")
COVERED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "granite", "phi3", "olmo2", "exaone4",
    "ernie4_5",
)  # fmt: skip
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
HYBRID = (
    "lfm2", "qwen3_5", "bamba", "falcon_h1", "falcon_scaled", "granite_dense", "nemotron_dense", "lfm2_moe",
    "qwen3_5_moe", "qwen3_next", "granite_moe", "nemotron_h", "nemotron_latent",
)  # fmt: skip
KINDS = [(torch.float32, "full"), (torch.bfloat16, "full"), (torch.float32, "q8_0"), (torch.bfloat16, "q4_0")]
CONTEXT = tuple(torch.randint(1, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(1)).tolist())
PARENTS = (-1, 0, 0, 1, 1, 2, 5)
TOKENS = tuple(torch.randint(1, VOCAB_SIZE, (7,), generator=torch.Generator().manual_seed(2)).tolist())
# Of the logits' range: bfloat16 keeps 8 bits, and a rounded input of a quantised layer may fall to its neighbour.
BOUNDS = {
    (torch.float32, "full"): 1e-5, (torch.bfloat16, "full"): 0.03, (torch.float32, "q8_0"): 0.03,
    (torch.bfloat16, "q4_0"): 0.06,
}  # fmt: skip
NEAR_TIE = 0.015  # of a router's logits in bfloat16; three rows of these tests are tied so: by 0.001, 0.010 and 0.014
families = pytest.mark.parametrize("family", COVERED + MIXTURES + HYBRID)
kinds = pytest.mark.parametrize(("dtype", "weights"), KINDS, ids=["f32", "bf16", "f32-q8_0", "bf16-q4_0"])


@cache
def loaded_model(family, dtype, weights):
    model = new_model(family).to(dtype)
    return prepare_model(model, family, 2, quantise=None if weights == "full" else rounding_to(weights, model))


def new_model(family):
    return copy.deepcopy(recurrent_model(_own_name(family)).plain) if family in HYBRID else tiny_model(family)


def config_of(family):
    return recurrent_config(_own_name(family)) if family in HYBRID else tiny_config(family)


def _own_name(family):
    return "granite" if family == "granite_moe" else family  # "granite" is also a family without experts


def new_runner(family, dtype=torch.float32, weights="full", backend="native", layers=(0, 1)):
    loaded = loaded_model(family, dtype, weights)
    runner = ModelRunner(loaded, 64, loaded.vocab_size, backend, layers)
    assert runner.backend == backend
    return runner


def path_to(node):
    return [] if node < 0 else [*path_to(PARENTS[node]), node]


def run(runner, tokens, positions, mask, start):
    offsets = torch.tensor([start, start])
    rows = torch.tensor(tokens), torch.tensor(positions)
    return runner.call(runner.weights, runner.cache.tensors(), *rows, torch.tensor(mask), offsets)


def read(runner, start, tokens):
    mask = [[column <= row for column in range(len(tokens))] for row in range(len(tokens))]
    found = run(runner, tokens, range(start, start + len(tokens)), mask, start)
    accept(runner, start, range(len(tokens)))
    return found


def accept(runner, start, rows):
    runner.cache.commit([start + row for row in rows], start)
    if runner.states is not None:
        runner.states.commit(start, rows)


def verify(runner):
    nodes = range(len(PARENTS))
    mask = [[other in path_to(node) for other in nodes] for node in nodes]
    return run(runner, TOKENS, [len(CONTEXT) + len(path_to(node)) - 1 for node in nodes], mask, len(CONTEXT))


@families
def test_logits_are_those_of_transformers_along_every_path(family):
    runner = new_runner(family)

    prompt, tree = read(runner, 0, CONTEXT), verify(runner)

    texts = [(*CONTEXT, *(TOKENS[i] for i in path_to(node))) for node in range(len(PARENTS))]
    expected = [all_plain_logits(untouched(family), text)[-1] for text in texts]
    torch.testing.assert_close(prompt.logits, all_plain_logits(untouched(family), CONTEXT), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tree.logits, torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert torch.equal(tree.best_tokens()[1], tree.logits.argmax(-1))


@families
def test_greedy_tokens_are_those_of_generate_whether_rows_are_plain_or_a_tree(family):
    expected = generated(family, CONTEXT, 24)
    plain, tree = new_runner(family), new_runner(family)
    text = [*CONTEXT, int(read(plain, 0, CONTEXT).best_tokens()[1][-1])]
    while len(text) < len(CONTEXT) + 24:
        text.append(int(read(plain, len(text) - 1, text[-1:]).best_tokens()[1]))
    assert text[len(CONTEXT) :] == expected

    certain = [*CONTEXT, int(read(tree, 0, CONTEXT).best_tokens()[1][-1])]
    while len(certain) < len(CONTEXT) + 24:  # guesses that are right once, then wrong
        start, following = len(certain) - 1, [*expected[len(certain) - len(CONTEXT) :], 1, 1][:2]
        tokens = [certain[-1], 5, following[0], following[1] % (VOCAB_SIZE - 1) + 1]
        mask = [
            [True, False, False, False],
            [True, True, False, False],
            [True, False, True, False],
            [True, False, True, True],
        ]
        found = run(tree, tokens, [start, start + 1, start + 1, start + 2], mask, start)
        choices = found.best_tokens()[1].tolist()
        rows = walk_greedy([0, 1, 2, 3], tokens, [0, 0, 0, 2], [True] * 4, choices)
        accept(tree, start, rows)
        certain += [choices[row] for row in rows]
    assert certain[: len(text)] == text


@families
@kinds
def test_rows_have_the_same_bits_at_every_width(family, dtype, weights):
    runner = new_runner(family, dtype, weights)
    read(runner, 0, CONTEXT)
    tree = verify(runner)
    assert not torch.equal(tree.logits[0], tree.logits[1])

    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        alone = new_runner(family, dtype, weights)
        for position, token in enumerate(CONTEXT):
            read(alone, position, [token])
        for depth, node in enumerate(path_to(leaf)):
            row = read(alone, len(CONTEXT) + depth, [TOKENS[node]])
            assert torch.equal(row.logits[0], tree.logits[node])
            assert torch.equal(row.best_tokens()[0][0], tree.best_tokens()[0][node])
            for ours, theirs in zip(row.layers, tree.layers, strict=True):
                assert torch.equal(ours[0], theirs[node])


@families
@kinds
def test_the_cache_after_a_commit_is_that_of_a_fresh_prefill(family, dtype, weights):
    runner, fresh = new_runner(family, dtype, weights), new_runner(family, dtype, weights)
    read(runner, 0, CONTEXT)
    verify(runner)
    accepted = path_to(6)

    accept(runner, len(CONTEXT), accepted)

    text = (*CONTEXT, *(TOKENS[node] for node in accepted))
    read(fresh, 0, text)
    for ours, theirs in zip(runner.cache.rows(), fresh.cache.rows(), strict=True):
        assert torch.equal(ours[:, : len(text)], theirs[:, : len(text)])
    if runner.states is not None:
        for ours, theirs in zip(runner.cache.states.save(), fresh.cache.states.save(), strict=True):
            assert ours.abs().max() > 0
            assert torch.equal(ours, theirs)


@families
@kinds
def test_logits_stay_near_those_of_the_models_own_code(family, dtype, weights):
    native, eager = new_runner(family, dtype, weights), new_runner(family, dtype, weights, "eager")
    leads = watched_routers(loaded_model(family, dtype, weights).model, config_of(family))

    for step in (lambda runner: read(runner, 0, CONTEXT), verify):
        found, expected = step(native), step(eager)
        scale = float(expected.logits.amax() - expected.logits.amin())
        distances = (found.logits - expected.logits).abs().amax(1)
        if leads and dtype == torch.bfloat16:  # where two experts are nearly equal, rounding decides which one runs
            distances = distances[torch.stack(leads).amin(0) >= NEAR_TIE]
        assert float(distances.max()) <= BOUNDS[dtype, weights] * scale
        leads.clear()


def watched_routers(model, config):
    """Return a list to which each router of ``model`` adds, for each row, the lead of its last expert over the next."""
    leads, places = [], getattr(config, "num_experts_per_tok", 0)

    def watch(router, inputs, _):
        own = getattr(router, "layer", router)
        logits = torch.nn.functional.linear(inputs[0].flatten(0, -2), own.weight, getattr(own, "bias", None))
        best = logits.float().sort(1, descending=True).values
        leads.append(best[:, places - 1] - best[:, places])

    for name, module in model.named_modules():
        if name.endswith((".router", ".mlp.gate", ".block_sparse_moe.gate", ".feed_forward.gate", ".mixer.gate")):
            module._forward_hooks.clear()  # of an earlier test: models are shared
            module.register_forward_hook(watch)
    return leads


@families
def test_a_description_reads_the_same_from_a_whole_configuration_and_from_its_file(family, tmp_path):
    """Files leave out what is a family's default; transformers' configurations hold it all."""
    config = config_of(family)
    config.save_pretrained(tmp_path)
    kept = AutoConfig.from_pretrained(tmp_path)
    shortened = config.to_diff_dict() | {"model_type": config.model_type}

    assert describe(shortened) == describe(kept.to_dict()) is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    if family == "mimo":  # no configuration of its own
        pytest.skip("transformers has no class of it")
    theirs = AutoConfig.for_model(family)
    sizes = ("num_attention_heads", "hidden_size", "num_hidden_layers")
    ours = with_defaults({"model_type": family, **{name: getattr(theirs, name) for name in sizes}})

    for name, value in ours.items():
        if hasattr(theirs, name) and name not in ("sliding_window", "num_key_value_heads"):
            assert getattr(theirs, name) == value or (name == "head_dim" and theirs.head_dim is None), name


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 8 for i in range(8)],
         "long_factor": [4.0] * 8, "original_max_position_embeddings": 64, "factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotary_frequencies_are_those_of_transformers(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(rope))
    theirs = LlamaRotaryEmbedding(config)

    turns, scale = frequencies(rope, 16)

    assert torch.equal(turns, theirs.inv_freq)
    assert scale == theirs.attention_scaling


@pytest.mark.parametrize(
    "change",
    [{"model_type": "gpt2"}, {"hidden_act": "relu"}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
     {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, {"layer_types": ["linear_attention"] * 2}],
    ids=str,
)  # fmt: skip
def test_what_no_program_computes_is_not_described(change):
    config = tiny_config("qwen2" if "layer_types" in change else "llama").to_dict()
    if "layer_types" in change:
        change = change | {"use_sliding_window": True, "sliding_window": 4}

    assert describe(config) is not None
    assert describe(config | change) is None


@pytest.mark.parametrize("family", ["gpt2", "olmoe", "glm4"])
def test_another_family_is_left_to_the_compiler(family):
    loaded = prepare_model(tiny_model(family), family, 1)

    assert ModelRunner(loaded, 64, VOCAB_SIZE, "native").backend == "inductor"


@cache
def untouched(family):
    model = new_model(family)
    model.set_attn_implementation("eager")
    return model


@cache
def generated(family, prompt, count):
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    output = untouched(family).generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_rows_are_those_of_a_whole_table_however_far_was_read_before(dtype):
    rope, size, positions = {"rope_type": "default", "rope_theta": 1e4}, 64, 5000
    speeds, _ = frequencies(rope, size)
    angles = torch.arange(positions).float()[:, None] * torch.cat([speeds, speeds])
    table = RotaryTable(rope, size, positions, dtype)

    for first in (0, 700, 512, 4990, 3):  # within the first rows, beyond them, and back
        wanted_rows = torch.arange(first, first + 10)
        cosines, sines = table.rows(wanted_rows, first + 9)
        assert torch.equal(cosines, angles[wanted_rows].cos().to(dtype))
        assert torch.equal(sines, angles[wanted_rows].sin().to(dtype))
