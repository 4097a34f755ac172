"""Renames request fields of vLLM and llama.cpp to this server's, and warns of unknown fields."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

_OURS = {
    "min_tokens": "min_new_tokens",  # vLLM
    "include_stop_str_in_output": "include_stop",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "repeat_penalty": "repetition_penalty",  # llama.cpp
    "n_predict": "max_tokens",
    "json_schema": "guided_json",
}
_STRUCTURED = {"json": "guided_json", "regex": "regex", "choice": "choice", "grammar": "grammar"}  # vLLM's newer names
# Ignored without a warning, because they change no token: request labels, options for caches, batches and billing.
_HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "cache_prompt", "id_slot", "slot_id", "timings_per_token", "request_id", "priority", "cache_salt", "keep_alive",
    "return_progress", "verbosity", "parallel_tool_calls", "skip_special_tokens", "spaces_between_special_tokens",
    "return_token_ids",
}  # fmt: skip


def translated(body: Any) -> Any:
    """Return a request's body with field names of vLLM and llama.cpp replaced by this server's.

    A body that is no mapping is returned unchanged.

    Raises:
        PydanticCustomError: a field is given under two names with two values, or guided_json is text but not JSON.
    """
    if not isinstance(body, Mapping):
        return body
    fields: dict[str, Any] = dict(body)
    structured = fields.pop("structured_outputs", None)
    if isinstance(structured, Mapping):
        for name, value in structured.items():
            if name == "json_object" and value:
                _put(fields, "response_format", {"type": "json_object"}, name)
            elif name in _STRUCTURED and value is not None:
                _put(fields, _STRUCTURED[name], value, name)
            elif value is not None and name != "json_object":
                fields[f"structured_outputs.{name}"] = value
    for name, ours in _OURS.items():
        if name in fields:
            _put(fields, ours, fields.pop(name), name)
    schema = fields.pop("guided_json", None)
    if schema is not None:
        wanted = {"type": "json_schema", "json_schema": {"schema": _parsed(schema)}}
        _put(fields, "response_format", wanted, "guided_json")
    return fields


def warnings_of(extra: Mapping[str, Any] | None) -> list[str]:
    """Return one sentence for each unknown field that may have been meant to change the answer, at most 16.

    Args:
        extra: unknown fields of a request; None if it has none.
    """
    names = sorted(name for name, value in (extra or {}).items() if name not in _HARMLESS and value is not None)
    return [f"the field {name[:40]} is unknown to this server and was ignored" for name in names[:16]]


def _put(fields: dict[str, Any], ours: str, value: Any, theirs: str) -> None:
    if value is None:
        return
    if fields.get(ours) not in (None, value):
        shown = {"theirs": theirs, "ours": ours}
        raise PydanticCustomError("two_names", "{theirs} says something else than {ours}; give one of them", shown)
    fields[ours] = value


def _parsed(schema: Any) -> Any:
    """Return the JSON schema, parsed if it was sent as text. Raises PydanticCustomError if the text is not JSON."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise PydanticCustomError("no_json", "guided_json is a text, and no JSON; give a schema") from None
