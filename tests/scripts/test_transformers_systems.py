"""Transformers' own ways of decoding: the same tokens, and the passes that are counted."""

import pytest
from tiny_pair import TEXT
from transformers_systems import TransformersSystem

COUNT = 24


@pytest.mark.parametrize(
    "settings",
    [
        {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0},
        {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": 3},
        {},
    ],
    ids=["constant", "heuristic", "default"],
)
def test_assisted_decoding_counts_passes(perfect_pair, settings):
    """With a drafter that is always right, each pass but the last gives all it may."""
    target, drafter = perfect_pair.plain_target, perfect_pair.plain_drafter
    system = TransformersSystem("assisted", target, 1, assistant=drafter, assistant_settings=settings)
    found = system.decode(TEXT[:20], COUNT)

    assert found.tokens == perfect_pair.reference(TEXT[:20], COUNT)
    assert not system.is_plain
    assert 0 < found.passes < found.decoded < COUNT
    if "num_assistant_tokens" in settings and settings["num_assistant_tokens_schedule"] == "constant":
        assert found.decoded == COUNT - 4
        assert found.passes == (COUNT - 4) // 4


def test_the_static_cache_is_compiled_for_and_used_again(pair, monkeypatch):
    """It requests the model's compiled call (here the model itself) and resets the cache for a second text."""
    model, configurations = pair.plain_target, []
    monkeypatch.setattr(model, "get_compiled_call", lambda given: configurations.append(given) or model.__call__)
    system = TransformersSystem("static", model, 1, static_length=80)
    found = [system.decode(prompt, COUNT) for prompt in (TEXT[:30], TEXT[:20])]

    assert [f.tokens for f in found] == [pair.reference(prompt, COUNT) for prompt in (TEXT[:30], TEXT[:20])]
    assert [f.passes for f in found] == [COUNT - 1] * 2
    assert [config.mode for config in configurations] == ["default", "default"]
    assert not system.is_plain


def test_plain_transformers_and_prompt_lookup(pair):
    plain = TransformersSystem("plain", pair.plain_target, 1)
    lookup = TransformersSystem("lookup", pair.plain_target, 1, options={"prompt_lookup_num_tokens": 4})
    one_by_one, looked_up = (system.decode(TEXT[:20], COUNT) for system in (plain, lookup))

    assert plain.is_plain
    assert not lookup.is_plain
    assert one_by_one.tokens == looked_up.tokens == pair.reference(TEXT[:20], COUNT)
    assert one_by_one.passes == one_by_one.decoded == COUNT - 1
    assert one_by_one.tpot_ms > 0
    assert one_by_one.ttft_ms > 0
