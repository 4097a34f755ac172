"""What is read from llama.cpp's server; running it is the comparison's business."""

import importlib.util
from pathlib import Path

import pytest

from yggdrasil.errors import YggdrasilError

PATH = Path(__file__).parents[2] / "scripts" / "llama_cpp.py"


@pytest.fixture(scope="module")
def llama_cpp():
    spec = importlib.util.spec_from_file_location("llama_cpp_script", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(num_tokens, **timings):
    times = {"prompt_ms": 7.0, "predicted_n": num_tokens, "predicted_per_token_ms": 2.0, **timings}
    return {"tokens": list(range(num_tokens)), "timings": times, "stop_type": "limit"}


def test_plain_decoding_takes_a_pass_a_token(llama_cpp):
    found = llama_cpp.continuation_of(answer(5), 5)

    assert (found.tokens, found.ttft_ms, found.tpot_ms) == ([0, 1, 2, 3, 4], 7.0, 2.0)
    assert found.decoded == found.passes == 4


def test_accepted_drafts_save_passes(llama_cpp):
    found = llama_cpp.continuation_of(answer(9, draft_n=12, draft_n_accepted=5), 9)

    assert (found.decoded, found.passes) == (8, 3)


def test_a_short_answer_is_refused(llama_cpp):
    with pytest.raises(YggdrasilError, match=r"llama.cpp gave 4 of 5 tokens \(limit\)"):
        llama_cpp.continuation_of(answer(4), 5)


def test_a_failed_step_names_its_log(llama_cpp, tmp_path):
    llama = llama_cpp.LlamaCpp(tmp_path, print)

    with pytest.raises(YggdrasilError, match=r"the step configure failed \(no such thing\); see .*configure.log"):
        llama._run("configure", ["sh", "-c", "echo no such thing; exit 3"])


def test_the_matrix_source_keeps_its_stores_and_is_mended_once(llama_cpp, tmp_path):
    source = tmp_path / "mmq.cpp"
    source.write_text("int main() {}\n")
    for _ in range(2):
        llama_cpp._keep_stores(source)

    assert source.read_text() == '#pragma GCC optimize("no-tree-dse", "no-dse")\nint main() {}\n'
