"""Many processes and threads on one plan, and a long file of prompts."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked import Outcome, Run, Server
from stage import NAME, TEXTS, Stage, generate
from verdict import wrong_tokens

NUMBER = 8
SIZES = (100, 1_000, 3_000)
ALLOWED_MB = 40.0  # between the first and the last: the list of prompts itself, and what an allocator keeps


@pytest.mark.slow
def test_processes_and_threads_on_one_plan_give_the_same_tokens(tmp_path):
    stage = Stage(tmp_path / "stage")
    folder = stage.sandbox("together")
    texts = {str(i): text for i, text in enumerate(TEXTS)}
    servers = [Server() for _ in range(NUMBER)]  # a server runs one at a time

    def one(place: int) -> Outcome:
        own = folder / f"process-{place}"  # for what is printed; all else is shared
        own.mkdir()
        for entry in stage.base.iterdir():
            (own / entry.name).symlink_to(folder / entry.name)
        return servers[place].run(
            Run("eager", generate(NAME, "--prompts", "prompts.jsonl"), str(own), timeout=600.0, fresh=True)
        )

    with ThreadPoolExecutor(NUMBER) as pool:
        outcomes = list(pool.map(one, range(NUMBER)))
    threads = servers[0].run(Run("threads", [NAME, str(NUMBER)], str(folder), timeout=600.0))
    for server in servers:
        server.close()

    assert [(each.err, wrong_tokens(each.out, stage.reference, texts)) for each in outcomes] == [("", None)] * NUMBER
    assert threads.code == 0, threads.err
    assert json.loads(threads.out) == [[stage.reference[text] for text in TEXTS]] * NUMBER


@pytest.mark.slow
def test_a_long_file_of_prompts_takes_no_more_memory_than_a_short_one(tmp_path):
    folder = Stage(tmp_path / "stage").sandbox("memory")
    lines = (json.dumps({"id": str(i), "prompt": f"{TEXTS[i % len(TEXTS)]} {i}"}) for i in range(SIZES[-1]))
    (folder / "many.jsonl").write_text("".join(f"{line}\n" for line in lines))
    arguments = generate(NAME, "--prompts", "many.jsonl")
    arguments[arguments.index("--max-new-tokens") + 1] = "2"
    server = Server()

    outcome = server.run(Run("watched", [*map(str, SIZES), "--", *arguments], str(folder), timeout=3600.0))

    server.close()
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("\n") == SIZES[-1], "every prompt has a line"
    resident = json.loads((folder / "resident.json").read_text())
    assert resident[str(SIZES[-1])] - resident[str(SIZES[0])] < ALLOWED_MB
