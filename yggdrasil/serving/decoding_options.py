"""Converts the fields of an HTTP request to the decoder's options."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from yggdrasil.acceptance.sampling import MIN_TEMPERATURE, Constraint, SamplingParams
from yggdrasil.acceptance.speculation import OFF, Speculation
from yggdrasil.engine.request_options import RequestOptions
from yggdrasil.errors import YggdrasilError
from yggdrasil.serving.errors import Fault
from yggdrasil.serving.request_fields import DecodingFields, ResponseFormat, SpeculationFields
from yggdrasil.serving.server_settings import Limits

_SAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_new_tokens",
)  # fmt: skip
_OWN = _SAME[:6]  # fields for which a model's files may recommend values
Body = TypeVar("Body", bound=DecodingFields)
_ANY_OBJECT = '{"type": "object"}'


def options_of(
    body: DecodingFields,
    limits: Limits,
    *,
    max_new_tokens: int,
    choice: int = 0,
    logprobs: int | None = None,
    constraint: Constraint | None = None,
    begins_turn: bool = False,
    keeps_special: bool = False,
) -> RequestOptions:
    """Return the decoder's options for one answer to an HTTP request.

    Args:
        body: the request's fields.
        max_new_tokens: maximum tokens of the answer.
        choice: index of the answer, which is added to the seed.
        logprobs: number of alternatives to report with the log-probability of each token; None: no log-probabilities.
        constraint: the constraint of a required tool call, or None. If given, ``body`` must not set one too.
        begins_turn: whether the answer begins the assistant's turn in a chat.
        keeps_special: whether the answer's text keeps special tokens, because the model writes tool calls with them.

    Raises:
        Fault: a limit of this server is exceeded, a constraint is incomplete, or there are two constraints.
        YggdrasilError: a value is out of its range.
    """
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > limits.stops:
        raise Fault(400, f"there are {len(stop)} stop strings; at most {limits.stops} are taken", param="stop")
    words = body.bad_words or []
    if len(words) > limits.bad_words or sum(map(len, words)) > limits.bad_letters:
        raise Fault(
            400, f"there are {len(words)} bad_words of {sum(map(len, words))} letters; at most {limits.bad_words} of "
            f"{limits.bad_letters} in all are taken", param="bad_words",
        )  # fmt: skip
    given = constraint_of(body)
    if constraint is not None and given is not None:
        raise Fault(400, "a tool call that is required cannot also follow a response_format; leave out one")
    chosen = constraint or given
    if chosen is not None and len(chosen.text.encode()) > limits.grammar_bytes:
        raise Fault(
            400,
            f"the {chosen.name} has {len(chosen.text.encode())} bytes; at most {limits.grammar_bytes} are taken",
        )
    sampling = SamplingParams(
        **_same(body), seed=_seed(body.seed, choice), logit_bias=_biases(body.logit_bias or {}),
        bad_words=tuple(body.bad_words or ()), logprobs=logprobs, constraint=chosen,
    )  # fmt: skip
    return RequestOptions(
        max_new_tokens=max_new_tokens, stop=[text for text in stop if text], include_stop=bool(body.include_stop),
        ignore_eos=bool(body.ignore_eos), stop_tokens=tuple(body.stop_token_ids or ()),
        begins_turn=begins_turn, keeps_special=keeps_special,
        speculation=_speculation(body.speculation), sampling=sampling, wait=True,
    )  # fmt: skip


def with_recommended_sampling(body: Body, own: SamplingParams) -> Body:
    """Return a copy of a request in which unset sampling fields have the values of ``own``.

    The fields are temperature, top_k, top_p, min_p, typical_p and repetition_penalty. ``body`` itself is returned if
    its temperature is 0 or ``own`` is greedy.

    Args:
        own: the parameters that the model's files recommend.
    """
    if own.is_greedy or body.temperature == 0:
        return body
    return body.model_copy(update={name: getattr(own, name) for name in _OWN if getattr(body, name) is None})


def _same(body: DecodingFields) -> dict[str, Any]:
    """Return those fields of ``body`` that are not None and that ``SamplingParams`` has under the same name.

    A ``top_p`` of 0 or a temperature below ``MIN_TEMPERATURE``, which OpenAI allows, becomes greedy decoding.
    """
    same = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if same.get("top_p") == 0:
        del same["top_p"]
        same["temperature"] = 0.0
    if 0 < same.get("temperature", 0.0) < MIN_TEMPERATURE:
        same["temperature"] = 0.0
    return same


def constraint_of(body: DecodingFields) -> Constraint | None:
    """Return the constraint that a request sets by response_format, regex, grammar or choice; None if it sets none.

    A response_format of type "text" sets no constraint.

    Raises:
        Fault: more than one constraint is set, a response_format json_schema has no schema, or choice has an empty
            text.
    """
    found = [_constraint_of_format(body.response_format)] if body.response_format is not None else []
    found += [Constraint("regex", body.regex)] if body.regex is not None else []
    found += [Constraint("grammar", body.grammar)] if body.grammar is not None else []
    found += [_one_of(body.choice)] if body.choice is not None else []
    constraints = [each for each in found if each is not None]
    if len(constraints) > 1:
        raise Fault(400, "give one of response_format, regex, grammar and choice")
    return constraints[0] if constraints else None


def _one_of(texts: Sequence[str]) -> Constraint:
    if not all(texts):
        raise Fault(400, "choice has an empty text; give texts of a letter at least", param="choice")
    terms = " | ".join(json.dumps(text) for text in texts)
    return Constraint("grammar", f"start: {terms}\n", title="choice")


def _constraint_of_format(wanted: ResponseFormat) -> Constraint | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint("json_schema", _ANY_OBJECT if wanted.schema_ is None else json.dumps(wanted.schema_))
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise Fault(400, "response_format json_schema needs json_schema.schema", param="response_format.json_schema")
    return Constraint("json_schema", json.dumps(wanted.json_schema.schema_))


def _speculation(wanted: bool | SpeculationFields | None) -> Speculation:
    if wanted is False:
        return OFF
    if wanted is None or wanted is True:
        return Speculation()
    given: dict[str, Any] = {
        each.name: getattr(wanted, each.name) for each in fields(Speculation) if getattr(wanted, each.name) is not None
    }
    return Speculation(**given)


def _seed(seed: int | None, choice: int) -> int | None:
    """Return the seed of the answer with index ``choice``, modulo 2**64, so that negative seeds are valid."""
    return None if seed is None else (seed + choice) % 2**64


def _biases(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise YggdrasilError("logit_bias maps token numbers to biases; a key is no number") from None
