#!/usr/bin/env python3
"""Check and measure Yggdrasil on one CUDA device, within eight minutes.

    python3 scripts/check_cuda.py --out results
    python3 scripts/check_cuda.py --out results --device cpu --tiny    # every section, on a stand-in for a GPU

Needs PyTorch, transformers, numpy, yaml, safetensors and a C compiler for Triton; no network. If the folder
yggdrasil/native/lib with libraries built elsewhere travels too, n-gram statistics draft; otherwise look-up does.
Sections are processes of their own with times of their own, and ``report.json`` is written after each measurement. A
section that fails is run again in simpler settings, with what failed alone: launches that wait, uncompiled steps,
then eager ones.

A GGUF file that is too large to travel at once goes in parts (and needs the package gguf there):

    python3 scripts/check_cuda.py --split model.gguf --out parts               # here: 30 MB each, and SHA256SUMS
    python3 scripts/check_cuda.py --model parts/* --keep kept --out results    # there, until all parts have come
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

# Seconds of each section; what one leaves over goes to those behind it.
SECTIONS = {
    "machine": 35.0, "float32": 115.0, "bfloat16": 40.0, "quantised": 30.0, "costs 7B": 75.0, "decodes": 110.0,
    "transformers": 75.0, "attention": 40.0, "costs 1.5B": 35.0, "costs 135M": 25.0, "costs 8B": 25.0,
}  # fmt: skip
SETTINGS = (
    {},
    {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_CHECK_MODE": "captured"},
    {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_CHECK_MODE": "eager"},
)
MOST_LINES = 60
MOST_LOG = 8_000_000
MOST_CODE = 16_000_000  # bytes of a file that comes back


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("CXX", "/bin/false")  # the host's operators are then the portable ones
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.section is not None:
        return _run_here(arguments)
    if arguments.write_tokens:
        from cuda_check.models import write_tokens

        write_tokens()
        return 0
    if arguments.split is not None:
        from cuda_check.parts import split

        print("\n".join(str(path) for path in split(arguments.split, arguments.out)))
        return 0
    return _run_all(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder to write, at most eight files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few samples: does it run at all?")
    parser.add_argument("--seconds", type=float, default=465.0, help="time for everything")
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--code", type=Path, help="compiled code of an earlier run, code.bin of its folder")
    parser.add_argument("--model", type=Path, nargs="+", help="parts of a GGUF file to join, check and decode with")
    parser.add_argument("--keep", type=Path, default=Path("kept"), help="where parts wait for each other")
    parser.add_argument("--split", type=Path, help="cut this file into parts of 30 MB")
    parser.add_argument("--write-tokens", action="store_true", help="compute the tokens that the repository ships")
    for hidden in ("--section", "--only", "--file"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


# ==== all sections ====


def _run_all(arguments: argparse.Namespace) -> int:
    from cuda_check.notes import Report

    started = time.monotonic()
    unplaced = _place_code(arguments)
    for name in ("report.json", "log.txt", "trace.json.gz", "differing.safetensors", "code.bin"):
        (arguments.out / name).unlink(missing_ok=True)
    report = Report(arguments.out / "report.json")
    report.content |= {
        "schema": "yggdrasil-cuda-check",
        "version": 2,
        "device": arguments.device,
        "tiny": arguments.tiny,
        **unplaced,
    }
    report.write()
    sections = _joined(arguments, report) if arguments.model else arguments.sections
    if arguments.tiny:  # tiny models have one size
        sections = [name for name in sections if not name.startswith("costs") or name == "costs 7B"]
    for number, name in enumerate(sections):
        left = arguments.seconds - (time.monotonic() - started)
        wanted = [SECTIONS.get(other, 60.0) for other in sections[number:]]
        _run_section(name, arguments, left * wanted[0] / sum(wanted))
    report = Report(arguments.out / "report.json")
    report.content["seconds"] = round(time.monotonic() - started, 1)
    report.write()
    _bring_code(arguments)
    print("\n".join([*_summary(report)[: MOST_LINES - 1], f"{report.content['seconds']} s"]))
    statuses = [section["status"] for section in report.content["sections"].values()]
    return 0 if all(status == "done" for status in statuses) else 1


def _joined(arguments: argparse.Namespace, report: "Report") -> list[str]:  # noqa: F821
    from cuda_check.parts import join

    found = join(arguments.model, arguments.keep)
    if isinstance(found, str):
        report.section("model")["status"] = found
        report.write()
        return []
    arguments.file = str(found)
    return ["model"]


def _run_section(name: str, arguments: argparse.Namespace, seconds: float) -> None:
    """The section, and what failed of it again in simpler settings while there is time."""
    from cuda_check.notes import Report, faults_of

    ends, failed = time.monotonic() + seconds, []
    for attempt, settings in enumerate(SETTINGS):
        left = ends - time.monotonic()
        if attempt and (not failed or left < 12):
            break
        label = name if attempt == 0 else f"{name}, again {settings['CUDA_CHECK_MODE']}"
        status = _process(name, label, arguments, left, settings, failed)
        report = Report(arguments.out / "report.json")
        section = report.section(label)
        faults = faults_of(section["results"])
        section["status"] = status if status != "done" or not faults else f"faults in {', '.join(faults)}"[:300]
        report.write()
        failed = faults or ([] if status == "done" else ["everything"])


def _process(
    name: str, label: str, arguments: argparse.Namespace, seconds: float, settings: dict[str, str], only: list[str]
) -> str:
    command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--out", str(arguments.out)]
    command += ["--device", arguments.device, "--seconds", str(max(seconds - 4.0, 4.0))]
    command += ["--tiny"] if arguments.tiny else []
    command += ["--file", arguments.file] if arguments.file else []
    command += ["--only", json.dumps([label, *(only if "everything" not in only else [])])]
    log = arguments.out / "log.txt"
    cache = _cache(arguments)
    caches = {"YGGDRASIL_CACHE": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    environment = {**os.environ, **settings, **caches}
    with log.open("a") as stream:
        stream.write(f"\n==== {label}\n")
        stream.flush()
        try:
            code = subprocess.run(
                command, stdout=stream, stderr=stream, timeout=max(seconds, 8.0), check=False, env=environment
            ).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
    if log.stat().st_size > MOST_LOG:
        log.write_bytes(log.read_bytes()[-MOST_LOG // 2 :])
    return "done" if code == 0 else f"failed with exit code {code}"


def _cache(arguments: argparse.Namespace) -> Path:
    return Path(os.environ.get("YGGDRASIL_CACHE") or arguments.out.resolve().parent / ".check-cuda-cache")


def _place_code(arguments: argparse.Namespace) -> dict[str, str]:
    """Unpack the code of an earlier run where sections look for it. Return what the report says of a failure."""
    if arguments.code is None:
        return {}
    try:
        _cache(arguments).mkdir(parents=True, exist_ok=True)
        shutil.unpack_archive(arguments.code, _cache(arguments), "gztar", filter="data")
    except (OSError, shutil.ReadError, tarfile.TarError) as error:
        return {"code": f"{arguments.code} is not used: {error}"[:300]}
    return {}


def _bring_code(arguments: argparse.Namespace) -> None:
    """Pack what sections compiled into one file that may come back; where it is too large, without the largest."""
    folder, packed = _cache(arguments), arguments.out / "code.bin"
    found = [*(folder / "captures").rglob("*.bin"), *(folder / "triton").rglob("*")]
    paths = sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_size)
    while paths:
        with tarfile.open(packed, "w:gz", compresslevel=3) as archive:
            for path in paths:
                archive.add(path, path.relative_to(folder))
        if packed.stat().st_size <= MOST_CODE:
            return
        packed.unlink()
        paths.pop()


def _summary(report: "Report") -> list[str]:  # noqa: F821
    lines = []
    for name, section in report.content["sections"].items():
        lines.append(f"{name}: {section['status'][:160]}")
        try:
            lines += [line[:300] for line in _figures(name, section["results"])]
        except Exception as error:  # noqa: BLE001 - odd results of one section must not hide the others
            lines.append(f"  no summary: {error}"[:300])
    return lines


def _figures(name: str, results: dict[str, Any]) -> list[str]:
    """Lines for a person of what a section has found."""
    if name.startswith("costs"):
        from cuda_check.costs import summary
    elif name.startswith("quantised"):
        from cuda_check.quantised import summary
    elif name.startswith("attention"):
        from cuda_check.attention import summary
    elif name.startswith(("float32", "bfloat16")):
        from cuda_check.correctness import summary
    elif name.startswith(("decodes", "transformers")):
        from cuda_check.decodes import summary
    else:
        rates = {key: value for key, value in results.items() if key.endswith("_per_s")}
        return [f"  {json.dumps(rates)}"] if rates else []
    return summary(results)


# ==== one section, in a process of its own ====


def _run_here(arguments: argparse.Namespace) -> int:
    from cuda_check.notes import Notes

    deadline = time.monotonic() + arguments.seconds
    label, *only = json.loads(arguments.only)
    from cuda_check.models import open_device

    device = open_device(arguments.device)
    notes = Notes(arguments.out / "report.json", label, deadline, frozenset(only))
    _section(arguments, notes, device)
    from yggdrasil.compiler.in_process import keep_code

    keep_code()
    return 0


def _section(arguments: argparse.Namespace, notes: "Notes", device: "torch.device") -> None:  # noqa: F821
    name, tiny = arguments.section, arguments.tiny
    if name == "machine":
        from cuda_check.machine import machine

        machine(notes, device, tiny=tiny)
    elif name in ("float32", "bfloat16"):
        from cuda_check import correctness

        getattr(correctness, name)(notes, device, tiny=tiny)
    elif name == "quantised":
        from cuda_check.quantised import quantised

        quantised(notes, device, tiny=tiny)
    elif name == "attention":
        from cuda_check.attention import attention

        attention(notes, device, tiny=tiny)
    elif name.startswith("costs "):
        from cuda_check.costs import costs

        costs(notes, device, tiny=tiny, size=name.removeprefix("costs "))
    elif name in ("decodes", "transformers"):
        from cuda_check import decodes

        getattr(decodes, name)(notes, device, tiny=tiny)
    else:
        from cuda_check.parts import model

        model(notes, device, tiny=tiny, path=Path(arguments.file))


if __name__ == "__main__":
    sys.exit(main())
