#!/usr/bin/env python3
"""Check a running server: its clients, answers under load, disconnects, memory, any request, and what it costs.

    scripts/check_server.py --url http://127.0.0.1:8000 --section load --section disconnects
    scripts/check_server.py --section overhead --plan mine

Each section prints one line of figures; the first that fails prints a sentence, and the exit code is 1. ``clients`` and
``fuzz`` install what they need (the openai SDK, llm, LangChain; schemathesis) from the package index into an
environment of their own. ``overhead`` serves the plan itself.
"""

import sys
from typing import Annotated

import httpx2
import typer
from server_clients import check_clients, check_fuzz
from server_load import check_disconnects, check_load, check_turns
from server_memory import check_memory
from server_overhead import check_overhead

from yggdrasil.cli import run_script


def main(  # noqa: PLR0913 - one argument for each option
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    section: Annotated[
        list[str] | None,
        typer.Option(help="clients, load, disconnects, turns, memory, fuzz, overhead; else all but the last."),
    ] = None,
    key: Annotated[str, typer.Option(help="Its key.")] = "none",
    seconds: Annotated[float, typer.Option(help="How long the load lasts.")] = 600.0,
    disconnects: Annotated[int, typer.Option(help="How many clients go away.")] = 1000,
    requests: Annotated[int, typer.Option(help="How many requests are made up, at least.")] = 5000,
    mixed: Annotated[int, typer.Option(help="How many mixed requests the section memory sends.")] = 288,
    keep_mb: Annotated[int, typer.Option(help="The server's --keep-mb, by which its memory may grow.")] = 512,
    plan: Annotated[str | None, typer.Option(help="A plan, to be decoded with a server and without.")] = None,
) -> None:
    """Run the sections one after the other."""
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600) as client:
        sections = {
            "clients": lambda: check_clients(url, key),
            "load": lambda: check_load(client, seconds),
            "disconnects": lambda: check_disconnects(client, disconnects),
            "turns": lambda: check_turns(client),
            "memory": lambda: check_memory(client, mixed, keep_mb),
            "fuzz": lambda: check_fuzz(client, url, key, requests),
            **({"overhead": lambda: check_overhead(plan)} if plan is not None else {}),
        }
        for name in section or sections:
            if name not in sections:
                raise typer.BadParameter(f"there is no section {name} (overhead needs --plan): {', '.join(sections)}")
            try:
                print(f"{name}: {sections[name]()}", flush=True)
            except AssertionError as fault:
                print(f"{name}: {fault}", file=sys.stderr)
                raise typer.Exit(1) from None


if __name__ == "__main__":
    run_script(main, "check_server")
