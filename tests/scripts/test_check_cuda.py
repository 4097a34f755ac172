"""The check of a GPU, on a device that stands in for one: every section, with nothing but what that machine has."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf_files import tiny_model, write_gguf
from tiny_pair import TEXT

from yggdrasil.engine.targets.captured_target import CapturedTarget
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_cuda.py"
ABSENT = ("gguf", "typer", "rich", "pandas", "sklearn")
# All sections but the first in one process: each would import PyTorch and transformers again.
TOGETHER = """
import argparse, contextlib, json, os, sys
import check_cuda

def process(name, label, arguments, seconds, settings, only, in_own_process=check_cuda._process):
    if name == "machine":
        return in_own_process(name, label, arguments, seconds, settings, only)
    own = {{"section": name, "seconds": seconds, "only": json.dumps([label, *only])}}
    os.environ["CUDA_CHECK_MODE"] = "compiled" if name in {compiled} else "captured"
    with (arguments.out / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
        code = check_cuda._run_here(argparse.Namespace(**{{**vars(arguments), **own}}))
    return "done" if code == 0 else f"failed with exit code {{code}}"

check_cuda._process = process
sys.exit(check_cuda.main())
"""
SECTIONS = ("machine", "float32", "bfloat16", "quantised", "costs 7B", "decodes", "transformers", "attention")


def run(tmp_path, *arguments, check=True, program=(str(SCRIPT),)):
    """The script where a package that is absent raises ImportError, and no C++ compiler works."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    environment = {**os.environ, "CXX": "/bin/false", "YGGDRASIL_CACHE": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (tmp_path, ROOT, SCRIPT.parent)))
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, env=environment, timeout=1600)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "compiled", [("costs 7B",), pytest.param(SECTIONS, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_every_section_runs_on_a_stand_in(tmp_path, compiled):
    """Tracing every step of every decode takes minutes: steps of the sections ``compiled`` alone are traced."""
    out, program = tmp_path / "out", ("-c", TOGETHER.format(compiled=compiled))
    done = run(tmp_path, "--device", "cpu", "--tiny", "--out", out, "--seconds", 5000, check=False, program=program)
    sections = json.loads((out / "report.json").read_text())["sections"]

    assert {name: section["status"] for name, section in sections.items()} == dict.fromkeys(SECTIONS, "done")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 60
    assert len(list(out.iterdir())) <= 8
    results = sections["float32"]["results"]
    kinds = "plain", "tree", "drafter", "head", "schedule", "sampled", "rule", "hybrid"
    tokens = [value for name, value in results.items() if name.startswith(kinds)]
    assert len(tokens) >= 10
    assert set(tokens) == {"equal"}
    assert ("plain, compiled" in results) == ("float32" in compiled)
    assert {"T(1), compiled", "T(4), compiled"} <= set(sections["costs 7B"]["results"])
    quantised = sections["quantised"]["results"]
    assert quantised["MXFP4 equals"] == quantised["experts in MXFP4 equals"] == "equal"
    compared = [key.split()[0] for key, value in sections["attention"]["results"].items() if isinstance(value, float)]
    assert compared[:3] == ["ours", "sdpa", "flex"]  # outputs are those of the portable operator
    assert "tree egt of 4" in sections["decodes"]["results"]
    assert "transformers assisted" in sections["transformers"]["results"]


def test_a_decode_of_other_tokens_leaves_what_first_differs(pair):
    """The keys or values of a layer before that token; the tokens if the cache is right, or there is no model."""
    from cuda_check.differences import check_tokens
    from cuda_check.notes import DiffersError

    decoder, prompt = pair.decoder(FixedPolicy(TreeShape(2, 2, 4))), TEXT[:12]
    expected = decoder.generate(prompt, max_new_tokens=9).tokens
    found = [*expected[:6], expected[6] + 1, *expected[7:]]
    check_tokens(decoder, prompt, expected, expected, None)

    for model, said in ((None, "token 6 of "), (lambda: pair.plain_target, "keys and values are right; the text")):
        with pytest.raises(DiffersError, match=said) as caught:
            check_tokens(decoder, prompt, found, expected, model)
        assert caught.value.tensors["ours"].tolist() == found
    rows = decoder.assembly.target.cache.rows()
    rows[len(rows) // 2 + 1][:, 14] += 0.5
    with pytest.raises(DiffersError, match=r"token 6 of .*; of layer 1 the values differs by up to 0\.5") as caught:
        check_tokens(decoder, prompt, found, expected, lambda: pair.plain_target)
    assert caught.value.tensors["expected"].shape[1] == 12 + 5


def test_shipped_tokens_are_those_of_transformers(monkeypatch):
    """The check needs no reference of its own on the machine that it runs on."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from cuda_check.models import TOKENS, computed_tokens, prompts, weights_digest

    shipped = json.loads(TOKENS.read_text())
    assert shipped["weights"] == weights_digest(), "run scripts/check_cuda.py --write-tokens"
    assert [row[:12] for row in shipped["tokens"][:2]] == computed_tokens(prompts()[:2], 12)


def test_a_file_in_parts_is_joined_when_all_have_come(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from cuda_check import parts

    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(range(256)) * 10)
    first, second, third = parts.split(model, tmp_path / "parts")
    sums, kept = tmp_path / "parts" / parts.SUMS, tmp_path / "kept"

    assert parts.join([first], kept) == "SHA256SUMS is not there: send it with a part"
    assert parts.join([third, sums], kept) == "waits for model.gguf.part1"
    joined = parts.join([second], kept)
    assert joined.read_bytes() == model.read_bytes()
    (kept / second.name).write_bytes(b"x" * 1000)
    assert "is damaged" in parts.join([], kept)


def test_a_joined_file_decodes(tmp_path, monkeypatch):
    """On captured steps as on eager ones; a wrong token is noted."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    from cuda_check import parts
    from cuda_check.notes import Notes

    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))

    def results():
        notes = Notes(tmp_path / "report.json", "model", time.monotonic() + 600, frozenset())
        parts.model(notes, torch.device("cpu"), tiny=True, path=file)
        return json.loads((tmp_path / "report.json").read_text())["sections"]["model"]["results"]

    found = results()
    assert len(found["tokens on the device"]) == 8
    assert found["equal"]
    plain = CapturedTarget.plain
    monkeypatch.setattr(CapturedTarget, "plain", lambda self, token: plain(self, token)._replace(tokens=[5]))
    assert not results()["equal"]


def test_what_fails_is_run_again_in_simpler_settings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check_cuda
    from cuda_check.notes import Report

    tried = []

    def process(name, label, arguments, seconds, settings, only):
        tried.append((label, settings.get("CUDA_CHECK_MODE"), list(only)))
        report = Report(arguments.out / "report.json")
        found = {"tree": {"error": "illegal memory access"}, "plain": "equal"} if len(tried) < 3 else {"tree": "equal"}
        report.section(label)["results"] = found
        report.write()
        return "done"

    monkeypatch.setattr(check_cuda, "_process", process)
    check_cuda._run_section("float32", SimpleNamespace(out=tmp_path), 100.0)

    assert tried == [
        ("float32", None, []),
        ("float32, again captured", "captured", ["tree"]),
        ("float32, again eager", "eager", ["tree"]),
    ]
    statuses = [section["status"] for section in Report(tmp_path / "report.json").content["sections"].values()]
    assert statuses == ["faults in tree", "faults in tree", "done"]


@pytest.fixture
def check_cuda(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    import check_cuda

    return check_cuda


def arguments_of(check_cuda, monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["check_cuda.py", *map(str, given)])
    return check_cuda._arguments()


def test_a_section_that_dies_spoils_no_other(tmp_path, monkeypatch, check_cuda, capsys):
    """Killed, too slow, or unable to start: each is said, and those behind it run and have the time that is left."""
    ends, given = iter(["killed", "slow", "done"]), []

    def process(command, *, timeout, **_):
        given.append(timeout)
        end = next(ends)
        if end == "slow":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=-11 if end == "killed" else 0)

    monkeypatch.setattr(subprocess, "run", process)
    monkeypatch.setattr(check_cuda, "SETTINGS", ({},))
    sections = "machine", "float32", "quantised"
    arguments = arguments_of(check_cuda, monkeypatch, "--out", tmp_path, "--seconds", 180, "--sections", *sections)

    assert check_cuda._run_all(arguments) == 1
    found = json.loads((tmp_path / "report.json").read_text())["sections"]
    statuses = [section["status"] for section in found.values()]
    assert statuses[0] == "failed with exit code -11"
    assert statuses[1].startswith("stopped after ")
    assert statuses[2] == "done"
    assert given[2] > 179  # all that is left
    assert capsys.readouterr().out.splitlines()[-1].endswith(" s")


def decoded(ms):
    return {"ms_per_token": ms}


def full_results(name):
    """What a section notes on a GPU."""
    if name.startswith("costs"):
        modes = "captured", "compiled"
        times = {f"T({width}), {mode}": {"128": 1.0, "2048": 1.2} for mode in modes for width in (1, 8)}
        rates = [f"{mode}, context {size}" for mode in modes for size in (128, 2048)]
        return times | {"bandwidth": {rate: {"of_measured": 0.5} for rate in rates}}
    if name == "quantised":
        return {f"T(W) {form}": {"ms": {}, "gb_per_s": 1.0, "bfloat16 ms": {}} for form in "abcd"}
    if name == "attention":
        return {f"ours W{width} S{size}": 1.0 for width in (1, 16, 64) for size in (128, 2048)}
    if name in ("decodes", "transformers"):
        return {f"tree {number}": decoded(1.0) for number in range(22 if name == "decodes" else 4)}
    return {"plain": "equal"}


def test_the_summary_of_a_whole_run_fits_in_sixty_lines(tmp_path, check_cuda):
    from cuda_check.notes import Report

    report = Report(tmp_path / "report.json")
    for name in check_cuda.SECTIONS:
        report.content["sections"][name] = {"status": "done", "results": full_results(name)}
    report.content["sections"]["bfloat16"]["results"] = {"odd": 1.0}
    lines = check_cuda._summary(report)

    assert len(lines) < check_cuda.MOST_LINES
    assert [line for line in lines if line.endswith(": done")] == [f"{name}: done" for name in check_cuda.SECTIONS]
    assert sum(line.count("tree ") for line in lines) == 26
    assert sum(line.startswith("  no summary: ") for line in lines) == 1


def test_compiled_code_comes_back_as_far_as_it_fits_and_is_used_again(tmp_path, monkeypatch, check_cuda):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    arguments = arguments_of(check_cuda, monkeypatch, "--out", out, "--code", out / "code.bin")
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / "captures" / "card"
    kept.mkdir(parents=True)
    for name, size in (("small.bin", 100), ("large.bin", 5000)):
        (kept / name).write_bytes(random.Random(0).randbytes(size))
    kernel = tmp_path / "cache" / "triton" / "KEY" / "attend.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"kernel")
    monkeypatch.setattr(check_cuda, "MOST_CODE", 4000)
    check_cuda._bring_code(arguments)
    monkeypatch.setenv("YGGDRASIL_CACHE", str(elsewhere))
    monkeypatch.setattr(check_cuda, "_run_section", lambda *_: None)

    assert (out / "code.bin").stat().st_size <= 4000
    check_cuda._run_all(arguments)  # into the folder that has the code
    assert [path.name for path in elsewhere.rglob("*.bin")] == ["small.bin"]
    assert (elsewhere / "triton" / "KEY" / "attend.cubin").read_bytes() == b"kernel"
    (out / "code.bin").write_bytes(b"cut off")
    check_cuda._run_all(arguments)
    assert "code.bin is not used" in json.loads((out / "report.json").read_text())["code"]
