"""A server under clients that err, go away, come too many, or are not allowed in."""

import json
import re
import socket
import threading
from dataclasses import replace

import pytest
from bundled_server import MODEL, open_pair, serving, wait_until

from yggdrasil import YggdrasilError
from yggdrasil.serving.server_settings import Limits, ServerSettings

CHAT = [{"role": "user", "content": "Count"}]


def fault(running, expect, path="/v1/chat/completions", **body):
    error = running.post(path, expect, **body)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type: the model reads text alone",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should"),
        ({"messages": CHAT, "stop": ["a", 5]}, "stop.1: Input should"),
        ({"messages": CHAT, "temperature": -1}, "temperature"),
        ({"messages": CHAT, "top_p": -0.1}, "top_p"),
        ({"messages": CHAT, "max_tokens": "many"}, "max_tokens"),
        ({"messages": CHAT, "n": 1000}, "n is 1000"),
        ({"messages": CHAT, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": CHAT, "logit_bias": {"99999": 1}}, "99999"),
        ({"messages": CHAT, "regex": "(", "max_tokens": 4}, "regex"),
        ({"messages": CHAT, "response_format": {"type": "json_schema"}}, "schema"),
        ({"messages": CHAT, "stop": ["a"] * 100}, "stop"),
        ({"messages": CHAT, "bad_words": ["a"] * 2000}, "there are 2000 bad_words"),
        ({"messages": CHAT, "bad_words": ["a" * 40000]}, "of 40000 letters"),
        ({"messages": CHAT, "tool_choice": "required"}, "tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_requests_are_refused_in_openais_shape(server, body, said):
    error = fault(server, 400, **body)

    assert error["type"] == "invalid_request_error"
    assert said in error["message"]


JSON = {"Content-Type": "application/json"}
PAGE = {"Origin": "https://elsewhere.example"}
HALF = b'"messages": [{"role": "user", "content": "%s"}]' % rb"\ud800"
TOOL = rb'"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]'
ASKED = b'"messages": [{"role": "user", "content": "a"}]'


@pytest.mark.parametrize(
    ("content", "headers", "said"),
    [
        (b"{%s}" % HALF, JSON, "message 1 has half of a surrogate pair"),
        (b"{%s, %s}" % (ASKED, TOOL), JSON, "the chat with its tools has half of a surrogate pair"),
        (b"{%s}" % ASKED, PAGE, "header Content-Type: application/json"),
        (b"{%s}" % ASKED, {**PAGE, "Content-Type": "text/plain"}, "header Content-Type: application/json"),
        (b"{nope", JSON, "the body is not JSON: Expecting property name .* (at character 1)"),
        (b"", JSON, "the body is empty"),
        (b"[]", JSON, "the body is JSON, and no object"),
        (b'{"messages": "caf\xe9"}', JSON, "the body is not text in UTF-8 (byte 17)"),
        (b"[" * 100_000, JSON, "the body is nested too deeply"),
        (b'{"seed": %s}' % (b"1" * 5000), JSON, "the body cannot be read: Exceeds the limit"),
    ],
)
def test_a_body_that_cannot_be_read_is_told_why(server, content, headers, said):
    reply = server.client.post("/v1/chat/completions", content=content, headers=headers)
    error = reply.json()["error"]

    assert reply.status_code == 400
    assert error["param"] is None
    assert re.search(".*".join(map(re.escape, said.split(".*"))), error["message"])


def test_prompts_are_counted_before_they_are_read(server, monkeypatch):
    monkeypatch.setattr("yggdrasil.serving.tokenization.Texts.encode", lambda *_: pytest.fail("read"))

    assert "300 answers" in fault(server, 400, "/v1/completions", prompt=["a"] * 100, n=3)["message"]
    assert "500 answers" in fault(server, 400, "/v1/completions", prompt=[[5]] * 500)["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"speculation": {"expansion": [2] * 20_000}}, "has 20000 levels; the shapes hold 3"),
        ({"speculation": {"expansion": [10**4000] * 3}}, "speculation.expansion.0: Input should be less than"),
        ({"n": 10**4299}, "n: Input should be less than"),
    ],
    ids=["levels", "children", "answers"],
)
def test_numbers_are_refused_before_they_are_multiplied(server, body, said):
    assert said in fault(server, 400, "/v1/completions", prompt=["a"] * 10, **body)["message"]


@pytest.mark.parametrize("prompt", [[-1], [[5], [-1]]])
def test_a_token_that_cannot_be_is_said_to_be_none(server, prompt):
    assert "greater than or equal to 0" in fault(server, 400, "/v1/completions", prompt=prompt)["message"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 200) for path in ("/health", "/v1/health", "/", "/models", "/v1/models", f"/v1/models/{MODEL}")),
        ("/metrics", 200), ("/openapi.json", 200), ("/v1/models/gpt-9", 404), ("/v1/completions", 405),
    ],
)  # fmt: skip
def test_whoever_only_asks_whether_it_is_there_gets_the_head_of_the_answer_alone(server, path, status):
    head, whole = server.client.head(path), server.client.get(path)

    assert (head.status_code, head.content) == (status, b"")
    assert whole.status_code == status
    assert whole.content
    headers = [dict(reply.headers, date=None) for reply in (head, whole)]
    if path == "/metrics":  # which tell of more with every request
        headers = [dict(each, **{"content-length": None}) for each in headers]
    assert headers[0] == headers[1]


def test_a_full_context_says_both_numbers(server):
    error = fault(server, 400, "/v1/completions", prompt=[5] * 600)

    assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, 512)
    assert error["type"] == "exceed_context_size_error"
    assert "600" in error["message"]
    assert "512" in error["message"]


def test_unknown_models_and_paths(server):
    assert fault(server, 404, messages=CHAT, model="gpt-9")["code"] == "model_not_found"
    assert fault(server, 404, "/v1/nothing")["type"] == "not_found_error"
    assert server.client.get("/v1/chat/completions").status_code == 405
    assert server.client.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert server.client.get(f"/v1/models/{MODEL}").json()["meta"]["n_ctx"] == 512


def test_any_model_name_is_accepted_where_the_server_was_told_so(server, monkeypatch):
    service = server.uvicorn.config.app.state.service
    monkeypatch.setattr(service, "settings", replace(service.settings, any_model=True))
    reply = server.post("/v1/chat/completions", messages=CHAT, model="gpt-9", max_tokens=2)
    assert reply["usage"]["completion_tokens"] == 2


def test_tokens_there_and_back(server):
    tokens = server.post("/tokenize", content="def f(x): é")["tokens"]

    assert server.post("/detokenize", tokens=tokens)["content"] == "def f(x): é"
    assert server.post("/tokenize", messages=CHAT)["count"] > len(CHAT[0]["content"].split())
    assert "99999" in fault(server, 400, "/detokenize", tokens=[99999])["message"]


ASKS = json.dumps({"messages": CHAT}).encode()
RAW = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(ASKS), ASKS)
)


def test_a_client_that_goes_away_frees_the_decoder(server, monkeypatch):
    """Answering, and waiting in the line: of the one no more than an iteration is decoded, of the other nothing."""
    answered = metric(server, 'answers_total{reason="cancelled"}')
    target, iterations = server.worker.decoder.assembly.engine.target, threading.Semaphore(0)
    verify = target.verify
    monkeypatch.setattr(target, "verify", lambda width: iterations.acquire(timeout=30) and verify(width))
    submit, submitted = server.worker.submit, []
    monkeypatch.setattr(server.worker, "submit", lambda ask: submitted.append(ask) or submit(ask))
    with server.client.stream("POST", "/v1/chat/completions", json={"messages": CHAT, "stream": True}) as stream:
        next(stream.iter_lines())
        with socket.create_connection(server.uvicorn.servers[0].sockets[0].getsockname()) as waiting:
            waiting.sendall(RAW)
            wait_until(lambda: len(server.worker.line) == 1)
        wait_until(lambda: len(server.worker.line) == 0)
    wait_until(submitted[0].gone.is_set)
    iterations.release()
    wait_until(lambda: metric(server, 'answers_total{reason="cancelled"}') == answered + 1)
    server.chat(max_tokens=1)


def metric(server, name):
    lines = server.client.get("/metrics").text.splitlines()
    return float(next((line.split()[-1] for line in lines if line.startswith(f"yggdrasil_{name}")), 0))


def test_only_loopback_names_the_key_and_small_bodies_come_in():
    settings = ServerSettings(
        api_key="schlüssel", cors_origins=("https://a.example",), host_names=("127.0.0.1", "localhost"), queue=1,
        limits=Limits(body_bytes=1000),
    )  # fmt: skip
    release = threading.Event()

    def opening():
        release.wait()
        return open_pair()

    with serving(opening, settings) as running:
        get, key = running.client.get, {"Authorization": "Bearer schlüssel".encode()}
        assert get("/health").status_code == 503
        assert fault_of_get(get("/v1/models"))["type"] == "unavailable_error"
        release.set()
        wait_until(lambda: get("/health").status_code == 200)
        assert get("/health", headers={"Host": "evil.example"}).status_code == 403
        assert get("/health", headers={"Host": "LOCALHOST:81"}).status_code == 200
        assert get("/metrics").status_code == 401
        assert get("/metrics", headers={"X-Api-Key": "wrong"}).status_code == 401
        assert get("/metrics", headers={"X-Api-Key": "schlüssel".encode()}).status_code == 200
        assert running.client.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        reply = running.client.post("/v1/completions", json={"prompt": "a"}, headers=key)
        assert reply.status_code == 200
        assert running.client.post("/tokenize", json={"prompt": "a" * 1000}, headers=key).status_code == 413
        chunked = running.client.post("/tokenize", content=iter([b'{"prompt": "', b"a" * 1000, b'"}']), headers=key)
        assert chunked.status_code == 413
        assert chunked.json()["error"]["code"] == "body_too_large"
        allowed = get("/health", headers={"Origin": "https://a.example"}).headers
        assert allowed["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-origin" not in get("/health", headers={"Origin": "https://b.example"}).headers


def test_a_page_of_another_site_may_read_every_answer(monkeypatch):
    """A browser shows it a network error in the place of an answer that does not name the site: of a 500 too."""
    site = "https://a.example"
    settings = ServerSettings(cors_origins=(site,), queue=1, limits=Limits(body_bytes=1000))
    with serving(open_pair, settings) as running:
        wait_until(lambda: running.worker.decoder is not None)
        ask = {"Origin": site, "Access-Control-Request-Headers": "authorization"}
        for method in ("GET", "HEAD", "POST"):
            submitted = running.client.options("/v1/models", headers={**ask, "Access-Control-Request-Method": method})
            assert submitted.status_code == 200, submitted.text
        monkeypatch.setattr(running.worker.meters, "page", lambda: [][0])
        replies = [
            running.client.request(method, path, headers={"Origin": site}, content=body)
            for method, path, body in (
                ("GET", "/metrics", b""), ("GET", "/none", b""), ("PUT", "/health", b""), ("POST", "/tokenize", b"{"),
                ("POST", "/tokenize", b"a" * 1001), ("HEAD", "/v1/models", b""),
            )
        ]  # fmt: skip
    assert [reply.status_code for reply in replies] == [500, 404, 405, 400, 413, 200]
    assert "IndexError" in fault_of_get(replies[0])["message"]
    assert [reply.headers.get("access-control-allow-origin") for reply in replies] == [site] * len(replies)


def fault_of_get(reply):
    return reply.json()["error"]


def test_too_many_are_sent_away(server, monkeypatch):
    """A line without room is full at once, whatever the decoder is about; how it fills is the line's own test."""
    ask = {"messages": CHAT, "max_tokens": 1}
    with monkeypatch.context() as full:
        full.setattr(server.worker.line, "capacity", 0)
        reply = server.client.post("/v1/chat/completions", json=ask)
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
    assert server.client.post("/v1/chat/completions", json=ask).status_code == 200


def test_a_decoder_that_cannot_be_opened_is_told():
    errors = []
    from yggdrasil.serving.worker import Worker

    def opening():
        raise YggdrasilError("no such model")

    worker = Worker(opening, ServerSettings(), errors.append)
    worker.start()
    wait_until(lambda: errors)
    worker.stop()

    assert str(errors[0]) == "no such model"
