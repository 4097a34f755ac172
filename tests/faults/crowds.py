"""Many at once, and many one after the other: threads and processes on one plan, a long file of prompts."""

import json
from concurrent.futures import ThreadPoolExecutor

from forked import Outcome, Run, Server
from stage import NAME, TEXTS, Stage, generate
from verdict import wrong_tokens

SIZES = (100, 1_000, 10_000)
ALLOWED_MB = 40.0  # between the first and the last: the list of prompts itself, and what an allocator keeps


def together(stage: Stage, number: int) -> list[str]:
    """``number`` processes, then as many threads of one process, each decoding all prompts; what went wrong."""
    folder = stage.sandbox("together")
    texts = {str(i): text for i, text in enumerate(TEXTS)}
    server, servers = Server(), [Server() for _ in range(number)]  # a server runs one at a time

    def one(place: int) -> Outcome:
        own = folder / f"process-{place}"  # for what is printed; all else is shared
        own.mkdir()
        for entry in stage.base.iterdir():
            (own / entry.name).symlink_to(folder / entry.name)
        return servers[place].run(
            Run("eager", generate(NAME, "--prompts", "prompts.jsonl"), str(own), timeout=600.0, fresh=True)
        )

    with ThreadPoolExecutor(number) as pool:
        outcomes = list(pool.map(one, range(number)))
    found = [outcome.err.strip() or wrong_tokens(outcome.out, stage.reference, texts) for outcome in outcomes]
    wrong = [f"a process: {fault}" for fault in found if fault]
    outcome = server.run(Run("threads", [NAME, str(number)], str(folder), timeout=600.0))
    if outcome.code != 0:
        wrong.append(f"threads: {outcome.err.strip():.300}")
    else:
        answers = json.loads(outcome.out)
        wrong += [f"a thread: {other}" for other in answers if other != [stage.reference[text] for text in TEXTS]]
        wrong += [] if len(answers) == number else [f"{len(answers)} threads answered"]
    for each in (server, *servers):
        each.close()
    return wrong


def memory(stage: Stage, sizes: tuple[int, ...] = SIZES) -> dict[int, float]:
    """Resident megabytes of one process after so many prompts of one file."""
    folder = stage.sandbox("memory")
    lines = (json.dumps({"id": str(i), "prompt": f"{TEXTS[i % len(TEXTS)]} {i}"}) for i in range(sizes[-1]))
    (folder / "many.jsonl").write_text("".join(f"{line}\n" for line in lines))
    server = Server()
    arguments = generate(NAME, "--prompts", "many.jsonl")
    arguments[arguments.index("--max-new-tokens") + 1] = "2"
    outcome = server.run(Run("watched", [*map(str, sizes), "--", *arguments], str(folder), timeout=7200.0))
    server.close()
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("\n") == sizes[-1], "every prompt has a line"
    return {int(size): float(mb) for size, mb in json.loads((folder / "resident.json").read_text()).items()}
