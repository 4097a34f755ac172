"""llama.cpp as a system to compare with: its server, built from the source package of llama-cpp-python.

The source package carries all of llama.cpp, so a package index is the only thing that must be reachable. Prompts go in
and come out as token ids, and times are the server's own. Everything lies in one work folder and is made once.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, Self

from bench_systems import Continuation

from yggdrasil.artifacts import model_fingerprint
from yggdrasil.errors import YggdrasilError

PACKAGE = "llama-cpp-python==0.3.36"
CMAKE_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
# GCC's intrinsics of AMX do not say which memory they read: stores of shapes and numbers before them were
# dropped, and files of 4 to 8 bits crashed. In this one source no store is taken for dead.
MATRIX_SOURCE = "ggml/src/ggml-cpu/amx/mmq.cpp"
KEEP_STORES = '#pragma GCC optimize("no-tree-dse", "no-dse")\n'
START_SECONDS = 120
OUT_TYPES = {"bfloat16": "bf16", "float32": "f32"}
# Its caches are float16 unless told otherwise; in float32 they must not be what rounds.
CACHE_OPTIONS = {"bfloat16": [], "float32": ["--cache-type-k", "f32", "--cache-type-v", "f32"]}
DRAFT_CACHE_OPTIONS = {"bfloat16": [], "float32": ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]}


class LlamaCpp:
    """A work folder with llama.cpp built in it and models converted for it."""

    def __init__(self, work: Path, say: Callable[[str], None]) -> None:
        self._work = work.resolve()
        self._say = say
        self._python = self._work / "venv" / "bin" / "python"
        self._build_folder = self._work / "build"

    @property
    def server(self) -> Path:
        """The program that serves a model."""
        return self._build_folder / "bin" / "llama-server"

    @property
    def completion(self) -> Path:
        """The program that gives one answer and ends; llama-cli in older versions."""
        return self._build_folder / "bin" / "llama-completion"

    def build(self, jobs: int) -> None:
        """Download, unpack and compile what is not there yet; minutes the first time, and it goes on where it stopped.

        Raises:
            YggdrasilError: a step failed; its log is named.
        """
        if self.server.exists() and self.completion.exists():
            return
        self._work.mkdir(parents=True, exist_ok=True)
        if not self._python.exists():
            self._say("llama.cpp: making an environment for its build tools")
            venv.create(self._work / "venv", with_pip=True)
        self._pip("install", "cmake", "ninja", "scikit-build-core")
        source = self._source()
        _keep_stores(source / MATRIX_SOURCE)
        self._say("llama.cpp: compiling its programs for this machine")
        cmake = str(self._python.with_name("cmake"))
        tools = {**os.environ, "PATH": f"{self._python.parent}{os.pathsep}{os.environ['PATH']}"}
        options = [f"-D{name}={value}" for name, value in CMAKE_OPTIONS.items()]
        configure = [cmake, "-S", str(source), "-B", str(self._build_folder), "-G", "Ninja", *options]
        self._run("configure", configure, environment=tools)
        targets = ["--target", self.server.name, self.completion.name]
        self._run("compile", [cmake, "--build", str(self._build_folder), *targets, "-j", str(jobs)], environment=tools)

    def version(self) -> str:
        """What was built: the package and llama.cpp's own description."""
        answer = subprocess.run([self.server, "--version"], capture_output=True, text=True, check=False)
        lines = [line for line in (answer.stdout + answer.stderr).splitlines() if "version" in line]
        return f"{PACKAGE}, {lines[0].strip() if lines else 'version unknown'}"

    def convert(
        self,
        checkpoint: str,
        dtype: str,
        vocabulary: Literal["numbers", "words"] = "numbers",
        options: Sequence[str] = (),
    ) -> Path:
        """The GGUF file of a checkpoint folder in this dtype, converted once by llama.cpp's own converter.

        Of ``vocabulary`` says llama_cpp_convert.py: only a file with "words" can be loaded by us. ``options`` are the
        converter's.
        """
        folder = Path(checkpoint)
        if not folder.is_dir():
            raise YggdrasilError(f"{checkpoint} is not a folder; llama.cpp needs the checkpoint on disk")
        out_type = OUT_TYPES[dtype]
        driver = Path(__file__).with_name("llama_cpp_convert.py")
        words = "-words" if vocabulary == "words" else ""
        file = self._work / "models" / f"{folder.name}-{model_fingerprint(folder)}{words}-{out_type}.gguf"

        def command(partial: Path) -> list[str]:
            converted = [str(folder.resolve()), "--outtype", out_type, "--outfile", str(partial), *options]
            return [sys.executable, str(driver), str(self._source()), vocabulary, *converted]

        return self._made(file, f"converting {checkpoint} to GGUF, {out_type}", "convert", command)

    def quantised(self, checkpoint: str, kind: str, options: Sequence[str] = ()) -> Path:
        """The checkpoint in ``kind`` (bf16, q8_0, q4_k_m ..), rounded once by llama.cpp's own quantiser."""
        whole = self.convert(checkpoint, "bfloat16", "words", options)
        if kind == "bf16":
            return whole
        file = whole.with_name(f"{whole.stem.removesuffix('-bf16')}-{kind}.gguf")
        program = str(self.steps_program())
        return self._made(
            file, f"rounding {checkpoint} to {kind}", "quantise",
            lambda partial: [program, "quantise", str(whole), str(partial), kind],
        )  # fmt: skip

    def steps_program(self) -> Path:
        """The program that times passes, compiled once against the libraries of the server."""
        source = Path(__file__).with_name("llama_cpp_steps.cpp")
        program = self._work / f"llama-steps-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
        headers = [f"-I{self._source() / part}" for part in ("include", "ggml/include")]
        libraries = [
            str(self._build_folder / file)
            for file in ("src/libllama.a", *(f"ggml/src/libggml{part}.a" for part in ("", "-cpu", "-base")))
        ]
        system = ["-fopenmp", "-lpthread", "-ldl", "-lm"]
        compiler = [os.environ.get("CXX", "g++"), "-O2", "-std=c++17", *headers, str(source), *libraries, *system]
        what = "compiling the program that times its passes"
        return self._made(program, what, "steps", lambda partial: [*compiler, "-o", str(partial)])

    def _made(self, file: Path, what: str, step: str, command: Callable[[Path], list[str]]) -> Path:
        """``file``, made by a command that writes to the name it is given, unless it is there."""
        if not file.exists():
            self._say(f"llama.cpp: {what}")
            file.parent.mkdir(exist_ok=True)
            partial = file.with_name(f"{file.name}.partial")
            self._run(step, command(partial))
            partial.replace(file)
        return file

    def _source(self) -> Path:
        """llama.cpp's sources, unpacked from the package."""
        found = sorted(self._work.glob("source/*/vendor/llama.cpp"))
        if found:
            return found[0]
        self._say(f"llama.cpp: downloading the sources of {PACKAGE}")
        sources = ["--no-binary", ":all:", "--no-deps", "--no-build-isolation", PACKAGE]
        self._pip("download", *sources, "--dest", str(self._work))
        archive = next(self._work.glob("llama_cpp_python-*.tar.gz"))
        unpacked = self._work / "source.partial"
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(archive) as file:
            file.extractall(unpacked, filter="data")
        unpacked.rename(self._work / "source")
        return next(self._work.glob("source/*/vendor/llama.cpp"))

    def _pip(self, *arguments: str) -> None:
        self._run("pip", [str(self._python), "-m", "pip", "--disable-pip-version-check", *arguments])

    def _run(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        log = self._work / f"{name}.log"
        with log.open("w") as output:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
        if done.returncode:
            last = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "no output")
            raise YggdrasilError(f"llama.cpp: the step {name} failed ({last.strip()[:200]}); see {log}")


def _keep_stores(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    if not text.startswith(KEEP_STORES):
        source.write_text(KEEP_STORES + text, encoding="utf-8")


class LlamaServer:
    """A llama.cpp server with one way of decoding, on a port of its own; ``close`` ends it."""

    def __init__(self, name: str, family: str, command: Sequence[str], log: Path, *, is_plain: bool = False) -> None:
        """``command``: the program and its options; ``family``: systems of the same weights in the same arithmetic."""
        self.name = name
        self.family = family
        self.is_plain = is_plain
        self._log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        quiet = ["--parallel", "1", "--no-webui", "--no-slots", "--cache-ram", "0", "--offline"]
        whole = [*command, "--host", "127.0.0.1", "--port", str(port), *quiet]
        with log.open("w") as output:
            self._process = subprocess.Popen(whole, stdout=output, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Continuation:
        request = {
            "prompt": list(prompt),
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": False,
        }
        answer = self._ask("/completion", request)
        return continuation_of(answer, max_new_tokens)

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def _wait(self) -> None:
        """Return when the model is loaded."""
        deadline = monotonic() + START_SECONDS
        while True:
            try:
                self._ask("/health")
                return
            except (urllib.error.URLError, ConnectionError):  # not listening yet, or still loading
                pass
            if self._process.poll() is not None or monotonic() > deadline:
                lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
                raise YggdrasilError(f"{self.name}: the server did not start ({lines[-1:]}); see {self._log}")
            sleep(0.1)


def continuation_of(answer: dict[str, Any], max_new_tokens: int) -> Continuation:
    """Read an answer of ``/completion``: the server's own times leave the first token out, as ours do."""
    tokens, timings = answer["tokens"], answer["timings"]
    if len(tokens) != max_new_tokens:
        raise YggdrasilError(f"llama.cpp gave {len(tokens)} of {max_new_tokens} tokens ({answer.get('stop_type')})")
    decoded = timings["predicted_n"] - 1
    passes = decoded - timings.get("draft_n_accepted", 0)
    return Continuation(tokens, timings["prompt_ms"], timings["predicted_per_token_ms"], decoded, passes)
