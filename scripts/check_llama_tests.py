#!/usr/bin/env python3
"""Run llama.cpp's own tests of its server against ours.

    scripts/check_llama_tests.py --plan smollm2 --checkout llama.cpp --python venv/bin/python

The environment of --python holds what the checkout's tools/server/tests/requirements.txt names. What is left out, and
why, stands in scripts/llama_server_tests.py; it is counted as deselected.

The server's context is 512 tokens, as theirs is: where no steps of that length were compiled, that comes first.
"""

import os
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Annotated

import typer
from served import ROOT, serving

from yggdrasil.cli import run_script
from yggdrasil.errors import YggdrasilError

FILES = ("basic", "chat_completion", "completion", "tokenize", "security", "metrics")
KEY = "sk-this-is-the-secret-key"  # as test_security.py has it
LIMIT = 512
SITES = (
    *("http://localhost", "http://localhost:8080", "http://127.0.0.1", "http://127.0.0.1:3000"),
    *("http://[::1]", "http://[::1]:3000"),
)


def main(
    plan: Annotated[str, typer.Option(help="A plan of a chat model, by its name.")],
    checkout: Annotated[Path, typer.Option(help="Folder of llama.cpp's sources.")],
    python: Annotated[Path, typer.Option(help="Python with pytest and what the tests import.")] = Path(sys.executable),
    only: Annotated[str, typer.Option(help="Only tests whose names hold this.")] = "",
) -> None:
    """Print what pytest prints; exit code 2 where a test fails."""
    tests = checkout / "tools" / "server" / "tests"
    if not (tests / "utils.py").exists():
        raise YggdrasilError(f"{tests} holds no tests; give --checkout a folder with llama.cpp's sources")
    common = ["--max-length", str(LIMIT), *(part for site in SITES for part in ("--cors-origin", site))]
    with serving(plan, *common) as url, serving(plan, *common, "--api-key", KEY) as keyed:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT / "scripts"), "PYTHONDONTWRITEBYTECODE": "1", "SERVED_MODEL": plan,
            "SERVED_LIMIT": str(LIMIT), "SERVED_PORT": _port(url), "SERVED_PORT_WITH_KEY": _port(keyed),
        }  # fmt: skip
        files = [f"unit/test_{name}.py" for name in FILES]
        quiet = ["-q", "-p", "llama_server_tests", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no"]
        command = [str(python.absolute()), "-m", "pytest", *quiet, *(["-k", only] if only else []), *files]
        done = subprocess.run(command, cwd=tests, env=environment, check=False)
    if done.returncode:
        raise YggdrasilError("llama.cpp's tests did not all pass; what failed is above")


def _port(url: str) -> str:
    return str(urllib.parse.urlsplit(url).port)


if __name__ == "__main__":
    run_script(main, "check_llama_tests")
