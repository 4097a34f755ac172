"""Other people's programs against a server, each from the package index in an environment of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx2
from server_asking import metric, text_of

from yggdrasil.acceptance.speculation import Exactness, RuleName

CLIENTS = ("openai", "llm", "langchain-openai")
EXAMPLES = 50  # of each path in one run, which makes about 1,500 requests; with more it long says nothing
MOST_SECONDS = 5400.0  # for all requests that are made up: one that hangs is a fault
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


def check_clients(url: str, key: str) -> str:
    """The openai SDK (sync, async, streams, tools, structured answers), llm and LangChain get their answers."""
    with tempfile.TemporaryDirectory() as folder:
        python = _environment(Path(folder), CLIENTS)
        script = Path(__file__).with_name("server_client_session.py")
        said = _run([str(python), str(script), f"{url}/v1", key], Path(folder))
    return said.strip().replace("\n", "; ")


def check_fuzz(client: httpx2.Client, url: str, key: str, requests: int) -> str:
    """Requests made up from the OpenAPI document: no fault of the server's, nothing outside the document, no leak."""
    _build_steps(client)
    before = metric(client, "process_resident_memory_bytes"), metric(client, "process_open_fds")
    began, statuses = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python, report = _environment(folder, ("schemathesis",)), folder / "report.ndjson"
        command = [
            str(python.with_name("schemathesis")), "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS),
            "--max-examples", str(EXAMPLES), "--header", f"Authorization: Bearer {key}", "--request-timeout",
            "120", "--continue-on-failure", "--no-color", "--report", "ndjson", "--report-ndjson-path", str(report),
            "--suppress-health-check", "all",
        ]  # fmt: skip
        while statuses.total() < requests:
            left = began + MOST_SECONDS - time.monotonic()
            seed = ["--seed", str(statuses.total())]
            _run([*command, *seed], folder, timeout=left, SCHEMATHESIS_HOOKS="server_fuzz_hooks")
            statuses.update(_statuses(report))
            print(f"{statuses.total()} requests made up so far", file=sys.stderr, flush=True)
    text_of(client, "Hi", max_tokens=1)
    after = metric(client, "process_resident_memory_bytes"), metric(client, "process_open_fds")
    assert after[1] <= before[1] + 8, f"open files grew from {before[1]:.0f} to {after[1]:.0f}"
    return (
        f"{statuses.total()} requests in {time.monotonic() - began:.0f} s without a fault, by status "
        f"{dict(sorted(statuses.items()))}; memory {before[0] / 1e6:.0f} MB before and {after[0] / 1e6:.0f} after, "
        f"open files {before[1]:.0f} and {after[1]:.0f}"
    )


def _build_steps(client: httpx2.Client) -> None:
    """Ask once for what is compiled when it is first asked for, which takes longer than a request made up may."""
    speculations: list[dict[str, Any]] = [{"rule": rule} for rule in get_args(RuleName)]
    speculations += [{"exactness": exactness} for exactness in get_args(Exactness)]
    for speculation in speculations:
        for more in ({}, {"temperature": 0.5}, {"temperature": 0.5, "response_format": {"type": "json_object"}}):
            body = {"prompt": "Hi", "max_tokens": 4, "speculation": speculation, **more}
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code < 500, reply.text


def _environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """The Python of a new environment with these packages."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    _run([str(python), "-m", "pip", "install", "--quiet", *packages], folder)
    return python


def _run(command: list[str], folder: Path, *, timeout: float | None = None, **more: str) -> str:
    """What a program prints; of this project it sees the scripts alone, and it writes to ``folder``."""
    own = {"HOME": str(folder), "LLM_USER_PATH": str(folder), "PYTHONPATH": str(Path(__file__).parent)}
    environment = {**os.environ, **own, **more}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command[:3])} failed:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def _statuses(report: Path) -> Iterator[str]:
    """How each request of a report was answered."""
    with report.open() as lines:
        for event in map(json.loads, lines):
            for each in event.get("ScenarioFinished", {}).get("recorder", {}).get("interactions", {}).values():
                yield str((each.get("response") or {}).get("status_code", "none"))
