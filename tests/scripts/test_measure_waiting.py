"""How long a command takes to print its first text; running llama.cpp is the comparison's business."""

import sys
from pathlib import Path

import pytest
from measure_waiting import completion_command, watched

from yggdrasil.errors import YggdrasilError


def command(program):
    return [sys.executable, "-c", program]


def test_the_first_token_is_the_first_text_and_not_the_end(tmp_path):
    program = "import time\nprint(flush=True)\ntime.sleep(0.3)\nprint('one', flush=True)\nprint('two')"

    found = watched(command(program), tmp_path, {})

    assert 0.3 <= found["first_token_s"] < found["whole_s"]
    assert found["peak_mb"] > 1.0


@pytest.mark.parametrize("program", ["print()", "import sys; print('one'); sys.exit('no such model')"])
def test_a_command_that_fails_or_prints_nothing_is_no_figure(tmp_path, program):
    with pytest.raises(YggdrasilError, match=r"ended with (0: |1: no such model)$"):
        watched(command(program), tmp_path, {})


@pytest.mark.parametrize(("is_chat", "words"), [(True, "--conversation --single-turn"), (False, "--no-conversation")])
def test_llama_cpp_is_asked_for_one_answer(is_chat, words):
    found = " ".join(completion_command(Path("llama-completion"), "model.gguf", 1, is_chat=is_chat))

    assert found.startswith(f"llama-completion --model model.gguf {words} --ctx-size")
    assert "--predict 1 " in found
    assert "--no-warmup" in found
