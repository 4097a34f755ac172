"""However a command ends: one sentence, the exit code that fits, and no traceback. Each in a process of its own."""

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import errno, os, signal, sys, time
from yggdrasil.cli import run_script

def command(text: str = "") -> None:
    {body}

run_script(command, "program")
"""


def run(body, *arguments, stdout=subprocess.PIPE, **options):
    """Run a script whose command has ``body``; returns (exit code, stdout, stderr)."""
    command = [sys.executable, "-c", SCRIPT.format(body=body), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit none
    try:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=60, **options)
    finally:
        signal.signal(signal.SIGINT, before)
    return done.returncode, (done.stdout or b"").decode(), done.stderr.decode()


def assert_sentence(result, code, *parts):
    assert result[0] == code
    assert result[2].strip().startswith("program: ")
    assert len(result[2].strip().splitlines()) == 1
    for part in parts:
        assert part in result[2]


def test_output_that_takes_no_more_is_named():
    with Path("/dev/full").open("wb") as full:
        result = run("print('x' * 100)", stdout=full)

    assert_sentence(result, 2, "standard output", "No space left")


@pytest.mark.parametrize(("fault", "named"), [("ENOSPC", "there"), ("EACCES", "here")])
def test_a_copy_that_fills_the_disk_names_where_it_is_written(fault, named):
    """Python's own copies name their source first; of another fault, it is what cannot be used."""
    result = run(f"raise OSError(errno.{fault}, os.strerror(errno.{fault}), 'here', None, 'there')")

    assert_sentence(result, 2, f"cannot use {named} (")


def test_a_working_directory_that_is_gone_is_named(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()

    result = run("pass", cwd=gone, preexec_fn=gone.rmdir)

    assert_sentence(result, 2, "the working directory is gone")


def test_a_reader_that_went_away_ends_it_in_silence():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as stdout:
        code, _, err = run("print('x' * 100)", stdout=stdout)

    assert (code, err) == (1, "")


def test_a_closed_output_is_refused_before_anything_is_done(tmp_path):
    body = f"open({str(tmp_path / 'done')!r}, 'w')"

    assert_sentence(run(body, preexec_fn=lambda: os.close(1)), 2, "standard output is closed")
    assert not (tmp_path / "done").exists()


def test_a_closed_error_stream_changes_nothing():
    assert run("print('result')", preexec_fn=lambda: os.close(2))[:2] == (0, "result\n")


def test_a_closed_stream_is_no_file_that_is_opened_later(tmp_path):
    body = f"f = open({str(tmp_path / 'file')!r}, 'w'); os.write(2, b'noise'); f.close(); print(f.fileno)"
    body = body.replace("print(f.fileno)", "print('done')")

    assert run(body, preexec_fn=lambda: os.close(2))[0] == 0
    assert (tmp_path / "file").read_text() == ""


def test_characters_that_the_output_cannot_show_are_escaped():
    code, out, _ = run("print('\\u2713 \\ud800')")

    assert (code, out) == (0, "\u2713 \\ud800\n")


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(signal.SIGINT, "KeyboardInterrupt", 130), (signal.SIGTERM, "Terminated", 143)]
)
def test_signals_interrupt_and_sigterm_is_told_from_ctrl_c(number, kind, code):
    """Also where the tests themselves run behind a shell that ignores interruptions, which children would inherit."""
    body = f"""
    try:
        os.kill(os.getpid(), {int(number)})
        time.sleep(30)
    except KeyboardInterrupt as error:
        print(type(error).__name__)
        raise"""
    result = run(body, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))

    assert_sentence(result, code, "interrupted")
    assert result[1] == f"{kind}\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_may_say_what_was_kept(number, code):
    body = f"""
    from yggdrasil.errors import Interrupted
    try:
        os.kill(os.getpid(), {int(number)})
        time.sleep(30)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; two parts are kept") from None"""

    assert_sentence(run(body), code, "two parts are kept")


@pytest.mark.parametrize(
    ("number", "end"),
    [
        (signal.SIGINT, "pass"), (signal.SIGTERM, "raise OSError"), (signal.SIGTERM, "sys.exit(3)"),
        (signal.SIGINT, "assert False"),
    ],
)  # fmt: skip
def test_a_signal_while_the_interpreter_shuts_down_ends_it_without_a_word(number, end):
    body = f"""
    import atexit
    sys.stderr = open(os.devnull, "w")  # what the command itself says
    atexit.register(time.sleep, 30)
    atexit.register(os.kill, os.getpid(), {int(number)})
    atexit.register(setattr, sys, "stderr", sys.__stderr__)
    {end}"""
    code, _, err = run(body)

    assert (code, err) == (-number, "")


INTERRUPTED_IMPORT = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.linalg":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from yggdrasil.cli import main
sys.argv = ["yggdrasil", "generate", "/nowhere", "--prompt", "a"]
main()
"""


def test_an_interruption_while_numpy_is_imported_is_not_lost():
    """torch imports it from native code, which took it for missing and went on."""
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 130, done.stderr
    assert "yggdrasil: interrupted" in done.stderr


def test_an_argument_that_is_no_text_is_named():
    assert_sentence(run("print(text)", "--text", b"a\xff"), 2, "argument 2", "UTF-8")


def test_a_fault_of_the_command_line_is_one_line_that_names_the_option():
    assert_sentence(run("print(text)", "--tekst", "a"), 2, "--tekst", "--help")


def test_no_memory_is_said():
    body = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({2**30}, {2**30})); bytearray({2**31})"

    assert_sentence(run(body), 2, "out of memory")


def test_a_file_too_large_for_the_disk_is_named(tmp_path):
    body = "from yggdrasil.artifacts import write_atomic; from pathlib import Path; "
    body += f"write_atomic(Path({str(tmp_path / 'big')!r}), bytes(5000))"
    result = run(body, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))

    assert_sentence(result, 2, str(tmp_path / "big"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()

    assert_sentence(run(f"os.mkdir({str(tmp_path / 'file/below')!r})"), 2, "file/below", "Not a directory")


def test_a_bug_keeps_its_traceback():
    code, _, err = run("assert False, 'a bug'")

    assert code == 1
    assert "Traceback" in err


def test_a_closed_standard_input_is_an_empty_one():
    assert run("print(repr(sys.stdin.read()), sys.stdin.isatty())", preexec_fn=lambda: os.close(0))[:2] == (
        0,
        "'' False\n",
    )


def test_bytes_that_are_no_text_do_not_come_as_half_characters(monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")

    assert run("print(sys.stdin.errors)", stdin=subprocess.DEVNULL)[:2] == (0, "strict\n")


def test_our_own_warnings_are_sentences():
    """Those of others keep the line that they come from."""
    body = """
    import warnings
    import yggdrasil.errors as ours
    warnings.warn_explicit("it is slow", UserWarning, ours.__file__, 1)
    warnings.warn_explicit("it is old", UserWarning, "/elsewhere/module.py", 1)"""
    lines = run(body)[2].splitlines()

    assert lines[0] == "program: it is slow"
    assert lines[1] == "/elsewhere/module.py:1: UserWarning: it is old"


def test_the_program_runs_as_a_module_and_says_its_versions():
    command = [sys.executable, "-m", "yggdrasil", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)

    assert re.fullmatch(r"yggdrasil \S+ \(torch \S+, transformers \S+, Python \S+\)\n", done.stdout)
    assert done.stderr == ""
