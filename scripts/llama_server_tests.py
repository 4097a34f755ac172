"""A pytest plugin: llama.cpp's own tests of its server, asked of ours. ``check_llama_tests.py`` runs them with it.

Its servers stand where the tests would start llama-server. What the tests know of their model (words, counts of tokens)
is not compared; what they ask of llama.cpp's own ``/completion`` is asked of ``/v1/completions``. Nothing else is
changed. ``LEFT_OUT`` says which tests are not run and why; docs/server.md has the list in short.
"""

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

OWN_OPTIONS = "starts a server with options or endpoints that are llama.cpp's own"
OWN_FIELDS = "asks for fields that are llama.cpp's own"
OTHER_MODEL = "counts tokens of its model, or needs another one"
FIRST_CHUNK = "wants null as the first chunk's content, which is empty here as OpenAI's is"
PARAMETERS = {  # of parametrized tests, those that are left out
    "test_chat_completion": (r"chatml|This is not a chat template", OWN_OPTIONS),
    "test_completion": (r"-True\]", OWN_FIELDS),
    "test_invalid_chat_completion_req": (r"messages7", "two answers in a row are taken here"),
    "test_logit_bias": (r"\[(False-False|False-True|True-False)\]", OWN_FIELDS),
}
LEFT_OUT = {
    "test_server_multiple_addresses": OWN_OPTIONS,
    "test_server_props": OWN_OPTIONS,
    "test_server_slots": OWN_OPTIONS,
    "test_load_split_model": OTHER_MODEL,
    "test_no_ui": OWN_OPTIONS,
    "test_server_model_aliases_and_tags": OWN_OPTIONS,
    "test_tokenize_with_bos": OTHER_MODEL,
    "test_tokenize_with_pieces": OWN_FIELDS,
    "test_access_static_assets_without_api_key": OWN_OPTIONS,
    "test_cors_options": "any page may ask llama.cpp; here only sites that were named",
    "test_cors_origins_localhost_rejects": "a preflight of another site is refused with 400, in llama.cpp with 200",
    "test_cors_origins_defaults_to_localhost_with_tools_enabled": OWN_OPTIONS,
    "test_cors_proxy_only_forwards_explicit_proxy_headers": OWN_OPTIONS,
    "test_local_media_file": OTHER_MODEL,
    "test_metrics_disabled": OWN_OPTIONS,
    "test_metrics_prometheus_format": "our metrics have names of their own",
    "test_metrics_prompt_processed_and_cached": "our metrics have names of their own",
    "test_metrics_predicted_total_matches_requests": "our metrics have names of their own",
    "test_metrics_timings_on_prompt_progress": OWN_FIELDS,
    "test_metrics_slots_idle_after_completion": OWN_OPTIONS,
    "test_metrics_embedding_prompt_is_counted": OTHER_MODEL,
    "test_chat_completion_cached_tokens": OTHER_MODEL,
    "test_chat_template": OWN_OPTIONS,
    "test_chat_template_assistant_prefill": OWN_OPTIONS,
    "test_chat_template_continue_final_message_vllm_compat": OWN_OPTIONS,
    "test_chat_template_continue_final_message_mutual_exclusion": OWN_FIELDS,
    "test_apply_chat_template": OWN_OPTIONS,
    "test_completion_with_json_schema": OWN_FIELDS,
    "test_logprobs_stream": FIRST_CHUNK,
    "test_return_progress": OWN_FIELDS,
    "test_chat_completions_token_count": OWN_OPTIONS,
    "test_verbose_debug": OWN_FIELDS,
    "test_completion_stream": OWN_FIELDS,
    "test_completion_stream_with_openai_library_stops": OTHER_MODEL,
    "test_nocache_long_input_prompt": OTHER_MODEL,
    "test_json_prompt_no_mtmd": OWN_FIELDS,
    "test_json_prompt_mtm_error_when_not_supported": OWN_FIELDS,
    "test_completion_with_tokens_input": OWN_FIELDS,
    "test_completion_unified": OWN_OPTIONS,
    "test_completion_response_fields": OWN_FIELDS,
    "test_n_probs": OWN_FIELDS,
    "test_n_probs_stream": OWN_FIELDS,
    "test_n_probs_post_sampling": OWN_FIELDS,
    "test_n_probs_post_backend_sampling": OWN_FIELDS,
    "test_cancel_request": OWN_OPTIONS,
    "test_completion_prompt_cache": OTHER_MODEL,
}
# Drawn answers that must be long, whatever the seed gives: asked to go on past an end token. After "What is LLM?" one
# answer in five of SmolLM2-135M is empty, in llama-server too.
LONG_BY_LUCK = ("test_completion_parallel_slots",)
OF_THEIR_MODEL = {"n_prompt"}  # parameters that count what their tokenizer makes of a text
CONSTRAINED = re.compile(r'^\\?"|^\[ -3000|^\(\\\{|^a\{5')  # expressions that a grammar fulfils, whatever the model
TIMES = ("prompt_n", "prompt_ms", "prompt_per_token_ms", "predicted_n", "predicted_ms", "predicted_per_token_ms",
         "predicted_per_second", "cache_n")  # fmt: skip
MODEL, LIMIT = os.environ.get("SERVED_MODEL", ""), int(os.environ.get("SERVED_LIMIT", "512"))
OPEN, KEYED = (int(os.environ.get(name, "0")) for name in ("SERVED_PORT", "SERVED_PORT_WITH_KEY"))


class Anything:
    """Equal to whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def pytest_configure(config: pytest.Config) -> None:
    """Put our servers in the place of theirs, before any test module is imported."""
    os.environ["DEBUG_EXTERNAL"] = "1"
    sys.path.insert(0, str(Path(config.invocation_params.dir)))
    import utils
    from openai.resources.chat.completions import Completions as Chats
    from openai.resources.completions import Completions

    matches, process = utils.match_regex, utils.ServerProcess
    utils.match_regex = lambda regex, text: not CONSTRAINED.match(regex) or matches(regex, text)
    process.start = _start
    process.make_request = _asked_of_ours(process.make_request)
    process.make_stream_request = _streamed_by_ours(process.make_stream_request)
    for kind in (Chats, Completions):
        kind.create = _of_our_model(kind.create)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Leave out what ``LEFT_OUT`` names, and forget what is known of another model."""
    kept, out = [], []
    for item in items:
        pattern, _ = PARAMETERS.get(item.originalname, ("$.", ""))
        is_out = item.originalname in LEFT_OUT or re.search(pattern, item.name) is not None
        (out if is_out and not _is_other(item) else kept).append(item)
        if hasattr(item, "callspec"):
            item.callspec.params.update({name: Anything() for name in OF_THEIR_MODEL & item.callspec.params.keys()})
    config.hook.pytest_deselected(items=out)
    items[:] = kept


def _is_other(item: Any) -> bool:
    """``test_logit_bias`` of the chat, which has the name of one of completions'."""
    return item.originalname == "test_logit_bias" and "chat" in item.path.name


def _start(server: Any, timeout_seconds: int = 0) -> None:
    server.server_port = KEYED if server.api_key else OPEN
    server.n_slots, server.n_ctx = 1, LIMIT
    if server.model_alias == "tinyllama-2":
        server.model_alias = MODEL


def _asked_of_ours(ask: Any) -> Any:
    """``make_request`` that asks ``/v1/completions`` for what llama.cpp's own ``/completion`` gives."""

    @functools.wraps(ask)
    def asking(server: Any, method: str, path: str, data: Any = None, *more: Any, **options: Any) -> Any:
        is_own = path in ("/completion", "/completions") and isinstance(data, dict) and "prompt" in data
        reply = ask(
            server, method, "/v1/completions" if is_own else path, _body(server, data, is_own), *more, **options
        )
        reply.headers = {name.title(): value for name, value in reply.headers.items()}  # they know one spelling
        if is_own and reply.status_code == 200:
            choice, timings = reply.body["choices"][0], reply.body["timings"]
            reply.body = {
                "content": choice["text"], "tokens": [], "truncated": False, "has_new_line": "\n" in choice["text"],
                "timings": {name: timings[name] for name in TIMES},
            }  # fmt: skip
        return reply

    return asking


def _streamed_by_ours(ask: Any) -> Any:
    """The same of a stream; the first chunk's empty content is what theirs writes as null."""

    @functools.wraps(ask)
    def asking(server: Any, method: str, path: str, data: Any = None, *more: Any, **options: Any) -> Any:
        is_own = path == "/completion"
        place = "/v1/completions" if is_own else path
        for i, chunk in enumerate(ask(server, method, place, _body(server, data, is_own), *more, **options)):
            if is_own:
                yield {"content": "".join(choice["text"] for choice in chunk["choices"])}
                continue
            if i == 0 and chunk["choices"] and chunk["choices"][0]["delta"].get("content") == "":
                chunk["choices"][0]["delta"]["content"] = None
            yield {**chunk, "model": server.model_alias if chunk["model"] == MODEL else chunk["model"]}

    return asking


def _body(server: Any, data: Any, is_own: bool) -> Any:
    """Fields as OpenAI names them; their model's name is left out."""
    if not isinstance(data, dict):
        return data
    body = {name: value for name, value in data.items() if name != "model"}
    if is_own:
        body = {"temperature": server.temperature, "seed": server.seed, **body}
        body["max_tokens"] = body.pop("n_predict", server.n_predict)
        if any(f"::{name}[" in os.environ.get("PYTEST_CURRENT_TEST", "") for name in LONG_BY_LUCK):
            body["ignore_eos"] = True
    return body


def _of_our_model(create: Any) -> Any:
    @functools.wraps(create)
    def creating(self: Any, **fields: Any) -> Any:
        return create(self, **{**fields, "model": MODEL})

    return creating
