"""Options of ``generate`` become the parameters they name; senseless ones are one sentence."""

import inspect
import json

import pytest

from yggdrasil.acceptance.sampling import GREEDY, Constraint
from yggdrasil.acceptance.speculation import DEFAULT, OFF
from yggdrasil.cli.generate import generate
from yggdrasil.cli.sampling import sampling_of, speculation_of
from yggdrasil.errors import YggdrasilError


def options(**given):
    """What ``generate`` hands on: its defaults, and what was given."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(generate).parameters.items()}
    assert given.keys() <= defaults.keys()
    return {**defaults, **given}


def test_defaults_are_greedy_decoding_by_the_plan():
    assert sampling_of(options()) == GREEDY
    assert speculation_of(options()) == DEFAULT
    assert speculation_of(options(speculation="off")) == OFF


def test_every_parameter_arrives(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object"}))
    plain = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.7, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "min_new_tokens": 2, "seed": 9, "logprobs": 1,
    }  # fmt: skip
    params = sampling_of(options(**plain, logit_bias=["5=-2.5", "6=1"], bad_word=["x"], json_schema=schema))

    assert {name: getattr(params, name) for name in plain} == plain
    assert params.logit_bias == {5: -2.5, 6: 1.0}
    assert params.bad_words == ("x",)
    assert params.constraint == Constraint("json_schema", schema.read_text())
    accepted = {
        "rule": "relaxed", "relaxed_topk": 4, "relaxed_delta": 0.1,
        "thinking_only": True, "exactness": "fixed-width", "fixed_width": 4,
    }  # fmt: skip
    chosen = speculation_of(options(**accepted, expansion="2,1"))
    assert {name: getattr(chosen, name) for name in accepted} == accepted
    assert chosen.expansion == (2, 1)
    typical = speculation_of(options(rule="typical", typical_epsilon=0.2, typical_delta=0.5))
    assert (typical.typical_epsilon, typical.typical_delta) == (0.2, 0.5)
    assert speculation_of(options(exactness="strict", tolerance=0.5)).tolerance == 0.5
    assert speculation_of(options(audit=True, tolerance=0.5)).tolerance == 0.5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"logit_bias": ["5"]}, "--logit-bias 5 is not TOKEN=BIAS"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0 .greedy., or between 0.0001"),
        ({"regex": "a", "grammar": "b"}, "give one of --json-schema, --regex and --grammar"),
        (
            {"rule": "typical", "speculation": "off"},
            "--speculation off drafts nothing that --rule typical could accept",
        ),
        ({"expansion": "2,x"}, "'2,x' is not a list of numbers"),
        ({"thinking_only": True}, "--thinking-only belongs to --rule relaxed, which is not given"),
        ({"fixed_width": 4}, "--fixed-width belongs to --exactness fixed-width"),
        ({"tolerance": 0.5}, "--tolerance belongs to --exactness strict or --audit"),
        ({"expansion": "0"}, "at least one level of at least one child"),
    ],
)
def test_senseless_options(given, sentence):
    def read():
        return sampling_of(options(**given)), speculation_of(options(**given))

    with pytest.raises(YggdrasilError, match=sentence):
        read()


def test_a_schema_that_is_no_file_or_no_json(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path, sentence in ((tmp_path / "none.json", "could not be read"), (broken, "is not JSON")):
        with pytest.raises(YggdrasilError, match=sentence):
            sampling_of(options(json_schema=path))
