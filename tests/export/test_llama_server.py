"""Requests to a llama-server and what is computed from its times; a stand-in with known costs answers."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from threading import Thread

import pytest

from yggdrasil.errors import YggdrasilError
from yggdrasil.export import exporting, llama_server
from yggdrasil.export.exporting import Request
from yggdrasil.export.llama_server import STEPS, WIDTHS, LlamaServer

VOCABULARY, HIDDEN, WEIGHTS = 1000, 50, 250_000  # the head has a fifth


class StandIn(BaseHTTPRequestHandler):
    """Reads a row in half a millisecond behind 4, decodes a token in 9, keeps the last prompt as its cache."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._say({
            "/props": {"build_info": "b1-stand-in"},
            "/v1/models": {"data": [{"meta": {"n_vocab": VOCABULARY, "n_embd": HIDDEN, "n_params": WEIGHTS}}]},
        }[self.path])  # fmt: skip

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, tokens = request["prompt"], request["n_predict"]
        known = self.server.cached if request["cache_prompt"] else []
        both = zip(prompt, known, strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], both)))
        read = len(prompt) - min(same, len(prompt) - 1)
        self.server.cached = prompt
        timings = {"prompt_n": read, "prompt_ms": self.server.around_ms + 0.5 * read, "predicted_n": tokens}
        timings |= {"predicted_ms": 9.0 * max(tokens - 1, 0), **self.server.drafts}
        self._say({"tokens": list(range(tokens)), "timings": timings})

    def _say(self, body):
        data = self.server.instead.get(self.path, json.dumps(body).encode())
        self.send_response(200)
        self.send_header("Content-Length", str(len(data) + self.server.held_back))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def stand_in():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.cached, server.drafts, server.instead, server.held_back = [], {}, {}, 0
    server.around_ms = 4.0
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def at(server):
    return LlamaServer(f"http://127.0.0.1:{server.server_port}/")


def test_a_pass_is_a_plain_step_and_what_its_further_rows_add(stand_in):
    """Half a millisecond a row without the head, whose fifth of the weights each row needs when it is verified."""
    fractions = []

    found = at(stand_in).pass_ms(fractions.append)

    assert found == pytest.approx({width: 9.0 + 0.5 * (width - 1) / 0.8 for width in WIDTHS})
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_a_slow_server_is_measured_in_fewer_rounds_and_progress_is_shown_within_a_round(stand_in, monkeypatch):
    clock = iter(range(0, 10_000, 45))  # seconds; read at the start and after each round
    monkeypatch.setattr(llama_server, "monotonic", lambda: next(clock))
    fractions = []

    found = at(stand_in).pass_ms(fractions.append)

    assert found == pytest.approx({width: 9.0 + 0.5 * (width - 1) / 0.8 for width in WIDTHS})
    assert len(fractions) == 2 * len(WIDTHS) + 1  # two rounds of 45 s; a third would end after 120 s
    assert fractions == sorted(set(fractions))
    assert fractions[-1] == 1.0


def test_a_pass_of_another_width_is_planned_anew(stand_in):
    """One token takes 9 ms behind others of its width, and 11 behind a wider pass."""
    stand_in.around_ms = 10.5

    found = at(stand_in).pass_ms(lambda _: None)

    assert found[1] == pytest.approx(9.0)
    assert found[3] == pytest.approx(9.0 + 2.0 + 2 * 0.5 / 0.8)


def test_answers_come_as_documents(stand_in):
    document = at(stand_in).answer([5, 6, 7], 4)

    assert document.prompt == [5, 6, 7]
    assert document.answer == [0, 1, 2, 3]
    assert at(stand_in).describe() == "b1-stand-in"


def test_a_slow_server_answers_as_many_prompts_as_there_is_time_for(stand_in, monkeypatch):
    clock = iter(range(0, 10_000, 90))  # seconds; read at the start and after each answer
    monkeypatch.setattr(exporting, "monotonic", lambda: next(clock))
    fractions = []

    class Reporter:
        def phase(self, _):
            return fractions.append

    found = exporting._answers(at(stand_in), [[5, 6, 7]] * 24, Request("mine", "llama-server", tokens=4), Reporter())

    assert [document.answer for document in found] == [[0, 1, 2, 3]] * 3
    assert fractions[-1] == 1.0


def test_a_server_that_speculates_is_not_measured(stand_in):
    stand_in.drafts = {"draft_n": STEPS}

    with pytest.raises(YggdrasilError, match="--spec-type none"):
        at(stand_in).pass_ms(lambda _: None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "localhost:8080", "file:///etc/passwd"])
def test_an_address_that_answers_nothing_is_a_sentence(url):
    with pytest.raises(YggdrasilError, match=url):
        LlamaServer(url).describe()


META = '{"data": [{"meta": {"n_vocab": %s, "n_embd": %s, "n_params": %s}}]}'
TIMES = '{"tokens": [1], "timings": {"prompt_n": %s, "prompt_ms": %s, "predicted_n": 2, "predicted_ms": %s}}'


WRONG = [
    *(("/v1/models", META % each) for each in ((0, 1, 2), ('"x"', 1, 2), (1000, 1, 0), (1000, 9, 9))),
    ("/v1/models", "[]"),
    *(("/completion", text) for text in ("{}", "[]", "[" * 100_000, "{")),
    *(("/completion", TIMES % each) for each in ((1, '"x"', 1), (1, -1, 1), (1, "NaN", 1), ("[]", 1, 1))),
]


@pytest.mark.parametrize(("path", "text"), WRONG)
def test_a_model_or_times_that_cannot_be_are_a_sentence(stand_in, path, text):
    stand_in.instead[path] = text.encode()

    with pytest.raises(YggdrasilError, match=f"{path} did not answer as llama-server does"):
        at(stand_in).pass_ms(lambda _: None)


@pytest.mark.parametrize("text", ["{}", '{"tokens": "abc"}', '{"tokens": [1.5]}'])
def test_an_answer_that_is_none_is_a_sentence(stand_in, text):
    stand_in.instead["/completion"] = text.encode()

    with pytest.raises(YggdrasilError, match="/completion did not answer as llama-server does"):
        at(stand_in).answer([5], 4)


def test_an_answer_that_ends_early_is_a_sentence(stand_in):
    stand_in.held_back = 9

    with pytest.raises(YggdrasilError, match="/props did not answer as llama-server does"):
        at(stand_in).describe()
