"""Bad input on the command line: one sentence that names the mend, exit code 2, no traceback, nothing written."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import MambaConfig

PACKAGE = Path(__file__).parents[2] / "yggdrasil"
TARGET, DRAFTER = PACKAGE / "assets/tiny/target", PACKAGE / "assets/tiny/drafter"


@pytest.fixture
def run(monkeypatch, program, tmp_path):
    """Run the program in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return program


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"text number {i}"}) + "\n" for i in range(6)))
    return path


def calibration(prompts, target=TARGET, drafter=DRAFTER, **options):
    extra = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    given = target, "--drafter", drafter, "--prompts", prompts
    return ["calibrate", *given, "--name", "x", "--root", ".", *extra]


def assert_one_sentence(result, *parts):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.strip().startswith("yggdrasil: ")
    for part in parts:
        assert part in err


def test_generate_needs_exactly_one_source_of_prompts(run, prompts):
    assert_one_sentence(run("generate", "tiny"), "--prompt", "--prompts")
    assert_one_sentence(run("generate", "tiny", "--prompt", "a", "--prompts", prompts), "either")


def test_an_empty_prompt_is_refused(run):
    assert_one_sentence(run("generate", "tiny", "--prompt", ""), "empty")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--host", "x" * 300, "cannot listen on"),
        ("--host", "a\nb", "cannot listen on a b"),
        ("--host", "", "--host is empty"),
        ("--api-key", "a b", "--api-key"),
        ("--api-key", "", "--api-key"),
        ("--cors-origin", "", "--cors-origin"),
        ("--cors-origin", "example.org", "--cors-origin example.org is no site"),
        ("--cors-origin", "http://a/b", "--cors-origin"),
    ],
)
def test_what_no_server_can_do_is_refused_before_there_is_a_model(run, option, value, said):
    code, out, err = run("serve", "none.yaml", option, value)

    assert (code, out) == (2, "")
    assert said in err.strip().splitlines()[-1]
    assert all(line.startswith("yggdrasil: ") for line in err.strip().splitlines())


@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat", "--prompt", "a"], ["serve", "--port", 0]])
def test_a_folder_without_weights_lacks_weights_and_no_template(run, tmp_path, command):
    """Neither does the bundled tokenizer have a chat template: what is missing first is said first."""
    (tmp_path / "half").mkdir()
    for path in TARGET.glob("*.json"):
        (tmp_path / "half" / path.name).write_bytes(path.read_bytes())

    result = run(command[0], "half", *command[1:])

    assert_one_sentence(result, "half has no *.safetensors weights")
    assert "template" not in result[2]


def test_a_busy_port_is_refused_before_anything_is_imported(run, monkeypatch):
    """Nor is a name of nothing looked for later than that."""
    monkeypatch.setitem(sys.modules, "yggdrasil.serving.process", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_one_sentence(run("serve", TARGET, "--port", port), f"cannot listen on 127.0.0.1, port {port}")
    assert_one_sentence(run("serve", "nothere.gguf", "--port", 0), "there is no file nothere.gguf")


WRONG = (
    ("generate", TARGET, "--prompt", "a", "--temperature", "-1"),
    ("generate", TARGET),
    ("generate", "nothere.gguf", "--prompt", "a"),
    ("chat", TARGET, "--top-p", "3"),
    ("chat", "llama3"),
    ("chat", TARGET, "--greedy", "--temperature", "1"),
    ("bench", TARGET),
    ("plans", "nosuch"),
)
# Each command in a fork of a process that has imported the program.
WITHOUT_TORCH = """
import json, os, sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "pandas")))
import numpy, typer, yggdrasil.cli.checks, yggdrasil.cli.exit_codes
from yggdrasil.cli import main
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        os.dup2(os.open(f"{number}.err", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv[1:] = arguments
        main()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_what_is_wrong_is_found_without_importing_torch(tmp_path):
    arguments = json.dumps([[*map(str, each)] for each in WRONG])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, arguments],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
    )  # fmt: skip
    said = [(tmp_path / f"{number}.err").read_text() for number in range(len(WRONG))]

    assert [each.split(": ")[0] for each in said] == ["yggdrasil"] * len(WRONG), said
    assert [len(each.splitlines()) for each in said] == [1] * len(WRONG), said
    assert done.stdout.split() == ["2"] * len(WRONG)


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["serve", TARGET], "fastapi", "server"),
        (["report", "tiny", "--out", "report.html"], "plotly", "report"),
        (["generate", TARGET, "--prompt", "a", "--regex", "b"], "llguidance", "structured"),
    ],
)
@pytest.mark.parametrize("is_checkout", [True, False])
def test_a_missing_package_is_named_at_once_with_what_installs_it(
    run, monkeypatch, arguments, package, extra, is_checkout
):
    monkeypatch.setattr("yggdrasil.arguments.find_spec", lambda name: None if name == package else name)
    if not is_checkout:
        monkeypatch.setattr("yggdrasil.arguments.__file__", "/usr/lib/python3/yggdrasil/arguments.py")
    command = (
        f"pip install -e '{PACKAGE.parent}[{extra}]'" if is_checkout else f"pip install 'yggdrasil-decode[{extra}]'"
    )

    code, _, said = run(*arguments)

    assert code == 2
    assert f"needs the package {package}; install it with `{command}`" in said


def test_a_key_that_the_environment_left_empty_leaves_no_server_open(run, monkeypatch):
    monkeypatch.setenv("YGGDRASIL_API_KEY", "")

    assert_one_sentence(run("serve", "none.yaml"), "the API key is empty", "YGGDRASIL_API_KEY")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("report", "tiny", "--text", "--limit", "2"), "--limit and --chat are for the prompts of --prompts"),
        (("report", "tiny", "--text", "--chat"), "--limit and --chat are for the prompts of --prompts"),
        (("calibrate", TARGET, "--chat"), "--chat is for --prompts FILE"),
        (("calibrate", TARGET, "--keep-drafter"), "--keep-drafter is for a draft model or a head"),
        (("generate", "none.yaml", "--prompt", "a", "--limit", "2"), "--limit is for --prompts FILE"),
    ],
)
def test_no_option_is_ignored_for_want_of_another(run, prompts, command, said):
    assert_one_sentence(run(*(prompts if part == "FILE" else part for part in command)), said)


def test_texts_that_mean_nothing_are_refused_before_there_is_a_model(run, prompts):
    assert_one_sentence(run("generate", "none.yaml", "--prompt", "a", "--regex", ""), "the regex is empty")
    assert_one_sentence(run(*calibration(prompts, target="")), "target", "empty")
    assert_one_sentence(run("search", "a\nb", "--prompts", prompts), "a b")
    assert_one_sentence(run("search", "x" * 200, "--prompts", prompts), "x" * 200)
    result = run("search", "a\nb", "--prompts", prompts)
    assert len(result[2].strip().splitlines()) == 1


def test_missing_files_are_named(run, tmp_path):
    assert_one_sentence(run("generate", "tiny", "--prompts", "none.jsonl"), "none.jsonl")
    assert_one_sentence(run(*calibration(tmp_path / "none.jsonl")), "none.jsonl")
    assert_one_sentence(run("generate", "none.yaml", "--prompt", "a"), "none.yaml")


def test_a_name_without_a_plan_or_model_is_told_what_there_is(run):
    assert_one_sentence(run("generate", "nothing-of-this-name", "--prompt", "a"), "a model is a folder")


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: text.replace("tiny", "tony")])
def test_a_truncated_or_edited_plan_is_refused(run, tmp_path, damage):
    plan = next((PACKAGE.parent / "plans/tiny").glob("*.yaml"))
    (tmp_path / "damaged.yaml").write_text(damage(plan.read_text()))

    assert_one_sentence(run("generate", "damaged.yaml", "--prompt", "a"), "damaged.yaml", "calibrate")


def test_widths_that_make_no_shapes_are_named(run, prompts):
    assert_one_sentence(run(*calibration(prompts, draft_widths="4,2")), "draft_widths")
    assert_one_sentence(run(*calibration(prompts, verify_widths="1,x")), "1,x")


def test_checkpoints_that_are_none_are_named(run, prompts, tmp_path):
    assert_one_sentence(run(*calibration(prompts, target=tmp_path)), str(tmp_path), "holds no config.json")
    assert_one_sentence(run(*calibration(prompts, drafter="no/such/folder")), "no/such/folder")


def test_a_recurrent_target_is_refused_with_the_reason(run, prompts, tmp_path):
    folder = tmp_path / "mamba"
    MambaConfig(vocab_size=4096, hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TARGET / name).read_bytes())

    assert_one_sentence(run(*calibration(prompts, target=folder)), "recurrent layers")
    assert not (tmp_path / "plans").exists()


def test_a_pair_with_different_tokenizers_is_refused(run, prompts, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    for file in DRAFTER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    assert_one_sentence(run(*calibration(prompts, drafter=folder)), "different tokenizers", "token 300")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(run, prompts):
    assert_one_sentence(run(*calibration(prompts, device="cuda")), "no CUDA device", "--device cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nothing_is_trained_on_a_gpu_that_is_not_there(run, tmp_path):
    training = run("train", TARGET, "--out", tmp_path / "head", "--device", "cuda")

    assert_one_sentence(training, "no CUDA device", "--device cpu")
    assert not list(tmp_path.glob("head*"))


def test_weights_that_cannot_be_made_say_where_they_come_from(run, prompts, monkeypatch):
    monkeypatch.setattr("yggdrasil.checkpoints.formats.ggml.find_spec", lambda _: None)
    assert_one_sentence(run(*calibration(prompts, weights="q4_k_m")), "--weights q4_k_m", "llama-cpp-python")
    assert_one_sentence(run(*calibration(prompts, drafter_weights="q6_k")), "--drafter-weights q6_k", "llama-quantize")
    assert_one_sentence(
        run(*calibration(prompts, drafter="text", drafter_weights="q8_0")), "--drafter-weights", "draft model"
    )
    assert_one_sentence(run(*calibration(prompts, weights="q3")), "--weights q3 is none of auto, full, file")


def test_a_width_that_verifies_no_tree_is_refused_before_anything_is_compiled(run, prompts):
    assert_one_sentence(run(*calibration(prompts, verify_widths="1")), "--verify-widths 1 leaves no tree to verify")
