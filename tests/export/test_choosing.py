"""Settings are what the objective makes of costs and recorded acceptance, in the engine's own words."""

import json
import shlex
from itertools import product

import numpy as np
import pytest
from made_up import learned
from tiny_pair import SHAPES

from yggdrasil.calibration.own_text import Document
from yggdrasil.errors import ArtifactError, YggdrasilError
from yggdrasil.export.choosing import ModelDrafter, choose_draft_model, choose_look_up
from yggdrasil.export.costs import EngineCosts
from yggdrasil.export.settings import ENGINES, Settings, plain_settings
from yggdrasil.scheduling.search import AcceptedLengths
from yggdrasil.tree.shape import TreeShape

LOOPS = [Document([1, 2, 3, 4] * 3, [1, 2, 3, 4] * 12), Document([5, 6, 7] * 4, [5, 6, 7] * 16)]
NOTHING_AGAIN = [Document(list(range(20)), list(range(20, 80)))]


def costs(row_ms, drafter_ms=None):
    """A pass takes 10 ms and so much more for each row beyond the first."""
    drafter = {} if drafter_ms is None else {1: drafter_ms, 4: drafter_ms, 16: drafter_ms}
    return EngineCosts({1: 10.0, 2: 10.0 + row_ms, 65: 10.0 + 64 * row_ms}, drafter)


def lengths():
    made = learned()
    return AcceptedLengths(made.mean_survival, made.ratios, SHAPES.verify_widths), made.acceptance


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_text_that_comes_again_is_looked_up_and_other_text_is_not(engine):
    assert choose_look_up(engine, costs(0.1), LOOPS).predicted.speedup > 2
    assert choose_look_up(engine, costs(0.1), NOTHING_AGAIN) == plain_settings(engine, 10.0)


def test_rows_that_cost_more_are_drafted_less():
    text = [Document([1, 2, 3, 4] * 3, [1, 2, 3, 4, 1, 2, 9, 8, 1, 2, 3, 4, 1, 7] * 6)]
    drafted = [
        choose_look_up("vllm", costs(row_ms), text).options.get("num_speculative_tokens", 0) for row_ms in (0.1, 9.0)
    ]

    assert drafted[0] > drafted[1]


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_no_text_is_a_sentence(engine):
    with pytest.raises(YggdrasilError, match="--prompts"):
        choose_look_up(engine, costs(1.0), [])


@pytest.mark.parametrize(("row_ms", "drafter_ms"), list(product((0.1, 0.7, 3.0), (0.1, 1.0, 4.0))))
def test_a_draft_model_gets_the_shape_that_equation_3_finds_best(row_ms, drafter_ms):
    """Every shape of SGLang, by the paper's formula: tokens over the milliseconds of drafting and verifying."""
    known, acceptance = lengths()
    worth = {(0, 0, 1): 0.1}
    for width, depth, kept in product(SHAPES.draft_widths, range(1, SHAPES.max_depth + 1), SHAPES.verify_widths):
        if width == 1:
            whole = min(w for w in SHAPES.verify_widths if w > depth)
            tokens, kept = known.aal(TreeShape(1, depth, whole)), depth + 1
        elif depth < kept <= width * depth:
            tokens = known.aal(TreeShape(width, depth, kept))
        else:
            continue
        worth[width, depth, kept] = tokens / (depth * drafter_ms + 10.0 + (kept - 1) * row_ms)
    best = max(worth, key=worth.get)

    chosen = choose_draft_model("sglang", costs(row_ms, drafter_ms), known, acceptance, ModelDrafter("drafter"))

    plain = {"eagle-topk": 0, "num-steps": 0, "num-draft-tokens": 1}
    assert tuple(chosen.options.get(f"--speculative-{name}", none) for name, none in plain.items()) == best
    assert chosen.predicted.ms_per_token == pytest.approx(1 / worth[best])


def test_a_draft_model_that_costs_as_much_as_the_target_is_left_out():
    chosen = choose_draft_model("llama-server", costs(5.0, 10.0), *lengths(), ModelDrafter("drafter.gguf"))

    assert chosen == plain_settings("llama-server", 10.0)
    assert chosen.line == "--spec-type none"


def test_llama_server_is_charged_for_reading_the_verified_tokens_twice():
    free = choose_draft_model("vllm", costs(0.1, 1.0), *lengths(), ModelDrafter("drafter"))
    twice = choose_draft_model("llama-server", costs(0.1, 1.0), *lengths(), ModelDrafter("drafter.gguf"))

    depth = twice.options["--spec-draft-n-max"]
    assert depth == free.options["num_speculative_tokens"]
    assert (twice.predicted.ms_per_token - free.predicted.ms_per_token) * free.predicted.aal == pytest.approx(1.0)


def test_the_least_probability_pays_for_its_row():
    """The drafter's probability is the acceptance here: what a row takes, at the rate of the whole."""
    chosen = choose_draft_model("llama-server", costs(0.7, 0.1), *lengths(), ModelDrafter("drafter.gguf"))

    assert chosen.options["--spec-draft-p-min"] == pytest.approx(0.7 / chosen.predicted.ms_per_token, abs=0.02)


@pytest.mark.parametrize(
    ("engine", "kind", "said"),
    [
        ("vllm", "eagle3", {"method": "eagle3", "model": "my/head"}),
        ("vllm", "medusa", {"method": "medusa", "model": "my/head"}),
        ("vllm", "mtp", {"method": "mtp"}),
        ("vllm", "dflash", {"method": "dflash", "model": "my/head"}),
        ("sglang", "eagle3", {"--speculative-algorithm": "EAGLE3", "--speculative-draft-model-path": "my/head"}),
        ("sglang", "mtp", {"--speculative-algorithm": "EAGLE"}),
    ],
)
def test_heads_are_named_in_the_engines_words(engine, kind, said):
    """Of the same costs comes the same shape, but with Medusa and DFlash, whose levels cost one pass."""
    chosen = choose_draft_model(engine, costs(0.1, 1.0), *lengths(), ModelDrafter("my/head", kind))
    model = choose_draft_model(engine, costs(0.1, 1.0), *lengths(), ModelDrafter("my/head"))
    sizes = [
        {name: value for name, value in each.options.items() if isinstance(value, int)} for each in (chosen, model)
    ]

    assert {name: value for name, value in chosen.options.items() if isinstance(value, str)} == said
    if kind in ("medusa", "dflash"):
        depth = chosen.options["num_speculative_tokens"]
        assert depth >= sizes[1]["num_speculative_tokens"]
        assert chosen.predicted.ms_per_token * chosen.predicted.aal == pytest.approx(1.0 + 10.0 + 0.1 * depth)
    else:
        assert sizes[0] == sizes[1]
        assert chosen.predicted == model.predicted


def test_a_block_head_is_a_chain_where_other_heads_have_trees():
    """SGLang reads the rows of a block as the tokens that it verifies, and has no branches for it."""
    chosen = choose_draft_model("sglang", costs(0.1, 1.0), *lengths(), ModelDrafter("my/head", "dflash"))
    chain = choose_draft_model("vllm", costs(0.1, 1.0), *lengths(), ModelDrafter("my/head", "dflash"))

    assert chosen.options == {
        "--speculative-algorithm": "DFLASH", "--speculative-draft-model-path": "my/head",
        "--speculative-num-draft-tokens": 1 + chain.options["num_speculative_tokens"],
    }  # fmt: skip
    assert chosen.predicted == chain.predicted


def test_a_draft_model_without_its_costs_is_a_sentence():
    with pytest.raises(YggdrasilError, match="--drafter-url"):
        choose_draft_model("vllm", costs(1.0), *lengths(), ModelDrafter("drafter"))


def test_lines_are_what_a_shell_takes():
    vllm = choose_look_up("vllm", costs(0.1), LOOPS)
    sglang = choose_look_up("sglang", costs(0.1), LOOPS)

    option, text = shlex.split(vllm.line)
    assert (option, json.loads(text)) == ("--speculative-config", vllm.options)
    assert shlex.split(sglang.line) == [str(part) for pair in sglang.options.items() for part in pair]


def test_an_option_that_the_documents_do_not_have_cannot_be_set():
    with pytest.raises(ValueError, match="--draft-max"):
        Settings("llama-server", "draft-simple", {"--draft-max": 4}, plain_settings("vllm", 1.0).predicted)


def test_costs_between_measured_widths_lie_on_a_line_and_never_fall():
    measured = EngineCosts({1: 10.0, 4: 16.0, 8: 15.0, 16: 31.0}, {1: 2.0})

    steps = measured.steps(range(1, 18))

    assert steps.verify_ms[1] == steps.plain_ms == 10.0
    assert steps.verify_ms[2] == 12.0
    assert steps.verify_ms[4] == 15.0
    assert steps.verify_ms[17] == pytest.approx(33.0)
    assert (np.diff(list(steps.verify_ms.values())) >= 0).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "holds no JSON"),
        ("[]", "should be a mapping"),
        ('{"target_ms": {"1": 9.0}}', "a wider one"),
        ('{"target_ms": {"one": 9.0, "2": 10.0}}', "a whole number"),
        ('{"target_ms": {"1": 9.0, "2": -1.0}}', "positive times"),
        ('{"target_ms": {"1": 9.0, "2": 1e308}}', r"positive times \(less than 1e\+09 ms\)"),
        ('{"target_ms": {"1": 9.0, "2": 10.0}, "drafter_ms": {"2": 1.0}}', "needs width 1"),
        ('{"target_ms": {"1": 9.0, "2": 10.0}, "draft_ms": {}}', "draft_ms"),
    ],
)
def test_costs_that_are_none_are_refused(tmp_path, text, said):
    (tmp_path / "costs.json").write_text(text)

    with pytest.raises((ArtifactError, YggdrasilError), match=said):
        EngineCosts.load(tmp_path / "costs.json")
