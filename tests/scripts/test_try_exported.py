"""An engine with exported settings is compared with ours: here both are one small server with canned answers."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import try_exported as module
import typer

from yggdrasil.errors import YggdrasilError

METRICS = """# HELP of a counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 7.0
"""


@contextmanager
def canned(text, metrics=METRICS):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(metrics if self.path == "/metrics" else json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (request["model"], request["temperature"]) == ("m", 0)
            self.reply(json.dumps({"choices": [{"text": text, "message": {"content": text}}]}))

        def reply(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def compare(monkeypatch, ours, theirs, metrics=METRICS):
    monkeypatch.setattr(module, "serving", lambda *_: canned(ours))
    monkeypatch.setattr(module, "started", lambda *_: canned(theirs, metrics))
    module.main("model", ["--speculative-config", "{}"], "sh", engine="vllm")


def test_it_prints_how_far_texts_agree_and_what_was_accepted(monkeypatch, capsys):
    compare(monkeypatch, "x" * 50 + "a", "x" * 50 + "b")

    assert capsys.readouterr().out.splitlines() == [
        "chat: the first 50 of 51 characters are equal",
        "completion: the first 50 of 51 characters are equal",
        "drafted 20, accepted 7 tokens",
    ]


@pytest.mark.parametrize(("theirs", "metrics"), [("x" * 39 + "y", METRICS), ("x" * 50, METRICS.replace("20.0", "0.0"))])
def test_another_text_and_an_engine_that_drafts_nothing_are_failures(theirs, metrics, monkeypatch, capsys):
    with pytest.raises(typer.Exit) as ended:
        compare(monkeypatch, "x" * 50, theirs, metrics)
    assert ended.value.exit_code == 1
    assert "vllm drafted nothing, or its text is another" in capsys.readouterr().err


def test_a_program_that_does_not_exist_is_reported_before_anything_starts():
    with pytest.raises(YggdrasilError, match="--program: nowhere/vllm is no program"):
        module.main("model", [], Path("nowhere/vllm"), engine="vllm")
