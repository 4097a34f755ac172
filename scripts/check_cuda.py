#!/usr/bin/env python3
"""Check and measure Yggdrasil on one CUDA device, within ten minutes, into one JSON file.

    python3 scripts/check_cuda.py --out results
    python3 scripts/check_cuda.py --out results --device cpu --tiny    # the same path without a GPU

Needs PyTorch, transformers and a C compiler for Triton; no network, no build of its own. Every section runs in a
process of its own with a share of the time, and writes after each measurement: what fails or runs out of time loses
only itself.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARES = {"environment": 0.06, "tests": 0.32, "llama2-7b": 0.31, "llama3-8b": 0.31}  # of the whole time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few samples: does it run at all?")
    parser.add_argument("--seconds", type=float, default=570.0, help="time for everything")
    parser.add_argument("--sections", nargs="+", choices=tuple(SHARES), default=list(SHARES))
    parser.add_argument("--section", choices=tuple(SHARES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.section is not None:
        return _run_here(arguments)
    report = _run_all(arguments)
    print(json.dumps({name: section["status"] for name, section in report["sections"].items()}, indent=1))
    return 0 if all(section["status"] == "done" for section in report["sections"].values()) else 1


def _run_all(arguments: argparse.Namespace) -> dict:
    """Every section in its own process; ``check_cuda.json`` is complete after each. Time left over goes on."""
    started = time.monotonic()
    report = {"schema": "yggdrasil-cuda-check", "version": 1, "device": arguments.device, "tiny": arguments.tiny}
    report["sections"] = {}
    for number, name in enumerate(arguments.sections):
        left = arguments.seconds - (time.monotonic() - started)
        share = SHARES[name] / sum(SHARES[other] for other in arguments.sections[number:])
        report["sections"][name] = _run_section(name, arguments, left * share)
        report["seconds"] = round(time.monotonic() - started, 1)
        _write(arguments.out / "check_cuda.json", report)
        print(f"{name}: {report['sections'][name]['status']} after {report['seconds']} s", flush=True)
    return report


def _run_section(name: str, arguments: argparse.Namespace, seconds: float) -> dict:
    command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--out", str(arguments.out)]
    command += ["--device", arguments.device, "--seconds", str(max(seconds - 10.0, 5.0))]
    command += ["--tiny"] if arguments.tiny else []
    log = arguments.out / f"{name}.log"
    partial = arguments.out / f"{name}.json"
    partial.unlink(missing_ok=True)
    begun = time.monotonic()
    with log.open("w") as stream:
        try:
            code = subprocess.run(
                command, stdout=stream, stderr=stream, timeout=max(seconds, 20.0), check=False
            ).returncode
            status = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
    result = json.loads(partial.read_text()) if partial.exists() else {}
    faults = [key for key, value in result.items() if isinstance(value, dict) and "error" in value]
    if status == "done" and faults:
        status = f"faults in {', '.join(faults)}"
    tail = log.read_text(errors="replace")[-3000:]
    return {"status": status, "seconds": round(time.monotonic() - begun, 1), "results": result, "log": tail}


def _run_here(arguments: argparse.Namespace) -> int:
    from cuda_sections import SECTIONS, Notes

    deadline = time.monotonic() + arguments.seconds
    notes = Notes(arguments.out / f"{arguments.section}.json", deadline)
    section = SECTIONS.get(arguments.section, SECTIONS["pair"])
    section(notes, arguments.section, arguments.device, tiny=arguments.tiny)
    return 0


def _write(path: Path, content: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
