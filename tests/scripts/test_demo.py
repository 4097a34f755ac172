"""The demo's last lines: figures of a comparison in words."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_pair import TEXT

from yggdrasil.bench.compare import compare
from yggdrasil.bench.divergence import Divergence
from yggdrasil.bench.record import drafter_names
from yggdrasil.drafters.heads.kinds import is_head
from yggdrasil.drafters.shipped_assets import resolve_shipped_head
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.prompts import HELD_OUT_CHAT_PROMPTS, Prompt, read_prompts
from yggdrasil.tree.shape import TreeShape

SCRIPTS = Path(__file__).parents[2] / "scripts"
TIE = Divergence(0, 1, 2, 1, 0.0, 0.1, "tie")


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo_script", SCRIPTS / "demo.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPTS))
    spec.loader.exec_module(module)
    sys.path.remove(str(SCRIPTS))
    return module


@pytest.fixture(scope="module")
def results(pair):
    """Two answers of 12 tokens, at 5 and 7 ms a token where plain decoding takes 9."""
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    prompts = [Prompt(str(i), decoder.tokenizer.decode(TEXT[i : i + 9])) for i in (0, 20)]
    found = compare(decoder, prompts, 12, lambda _: None, warm_up=False)
    return [
        replace(result, plain=timed(result.plain, 9.0), tree=timed(result.tree, ours))
        for result, ours in zip(found, (5.0, 7.0), strict=True)
    ]


def timed(generation, tpot_ms):
    return replace(generation, metrics=replace(generation.metrics, tpot_ms=tpot_ms))


def test_the_result_is_one_sentence(demo, results):
    assert demo.verdict(results).startswith(
        "\nYggdrasil answered at 6.0 ms a token where plain decoding takes 9.0: 1.50 times as fast, "
        "and every token was the same (2 of 2 answers).\n"
    )


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("tie", "the same in 1 of 2 answers; where they were not"),
        ("fault", "but 1 of 2 answers differ, which is a fau"),
    ],
)
def test_different_tokens_are_said(demo, results, verdict, words):
    first, second = results
    wrong = replace(second.tree, tokens=[0, *second.tree.tokens[1:]])
    parted = replace(second, tree=wrong, divergence=replace(TIE, verdict=verdict))

    assert words in demo.verdict([first, parted])


def test_the_questions_are_held_out(demo):
    names = {prompt.id for prompt in read_prompts(HELD_OUT_CHAT_PROMPTS)}

    assert len(set(demo.COMPARED)) == 4
    assert names >= set(demo.COMPARED)


def test_the_head_that_it_asks_for_guesses(demo, pair, monkeypatch, tmp_path):
    given_options = {}
    decoder = pair.decoder(FixedPolicy(TreeShape(2, 2, 4)))
    monkeypatch.setattr(demo, "fetch_model", lambda name: tmp_path / "model.gguf")
    opened = SimpleNamespace(
        from_pretrained=lambda file, **options: given_options.update(options, file=file) or decoder
    )
    monkeypatch.setattr(demo, "Decoder", opened)
    said = []
    monkeypatch.setattr(demo, "say", said.append)

    assert demo.open_model()[0] is decoder
    assert given_options["file"] == tmp_path / "model.gguf"
    assert given_options["drafter"] == demo.DRAFTERS
    assert said == [f"Drafts come from {drafter_names(decoder.assembly.engine)}"]


def test_the_head_that_it_asks_for_comes_along(demo):
    assert [is_head(resolve_shipped_head(name)) for name in demo.DRAFTERS] == [True, False, False]
