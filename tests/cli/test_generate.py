"""``yggdrasil generate`` on a tiny pair: prompts told apart, bad ones passed over, ends explained."""

import json
from functools import partial

import pytest
from tiny_pair import byte_tokenizer, chat_tokenizer

from yggdrasil.cli import generate as command
from yggdrasil.errors import YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape

TREE = FixedPolicy(TreeShape(2, 3, 8))


@pytest.fixture
def decoder(pair):
    decoder = pair.decoder(TREE)
    decoder.tokenizer = chat_tokenizer()
    return decoder


@pytest.fixture
def run(monkeypatch, program, tmp_path, decoder):
    """Run the command in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "open_decoder", lambda *_, **__: decoder)
    return partial(program, "generate", "tiny")


def written(folder, *lines):
    path = folder / "some.jsonl"
    path.write_text("\n".join(lines))
    return path


def reference(pair, text, count):
    return byte_tokenizer().decode(pair.reference(byte_tokenizer()(text)["input_ids"], count), skip_special_tokens=True)


def test_one_prompt_is_streamed_alone(run, pair):
    assert run("--prompt", "Then on", "--max-new-tokens", 9) == (0, reference(pair, "Then on", 9) + "\n", "")


def test_a_prompt_is_wrapped_as_a_users_turn(run, pair):
    code, out, _ = run("--prompt", "Then on", "--chat", "--max-new-tokens", 9)

    assert (code, out) == (0, reference(pair, "u-Then on<end>a-", 9) + "\n")
    assert out != reference(pair, "Then on", 9) + "\n"


def test_several_prompts_are_told_apart(run, pair, tmp_path):
    turns = json.dumps({"id": "b", "messages": [{"role": "user", "content": "on"}]})
    path = written(tmp_path, '{"id": "a", "prompt": "Then"}', turns)
    code, out, err = run("--prompts", path, "--max-new-tokens", 9)

    first, second = reference(pair, "Then", 9), reference(pair, "u-on<end>a-", 9)
    assert (code, out, err) == (0, f"== a ==\n{first}\n== b ==\n{second}\n", "")
    assert run("--prompts", path, "--max-new-tokens", 9, "--limit", 1) == (0, first + "\n", "")


BAD = {
    "{": "is not JSON",
    '{"prompt": ""}': "the prompt is empty",
    json.dumps({"prompt": "ab" * 150}): "the context holds 200",
    '{"messages": []}': "has messages that are no chat: messages must be a list",
    '{"prompt": "a\\ud800"}': "has half of a surrogate pair",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_prompt_does_not_end_the_others(run, pair, tmp_path, line):
    path = written(tmp_path, '{"id": "a", "prompt": "Then"}', line, '{"id": "c", "prompt": "on"}')
    code, out, err = run("--prompts", path, "--max-new-tokens", 9)
    assert code == 2
    assert reference(pair, "Then", 9) in out
    assert reference(pair, "on", 9) in out
    fault, total = err.splitlines()
    assert fault.startswith((f"yggdrasil: {path}, line 2 ", f"yggdrasil: {path}, line 2: "))
    assert BAD[line] in fault
    assert total == f"yggdrasil: 1 of 3 prompts of {path} could not be decoded; the others were"

    code, out, err = run("--prompts", path, "--max-new-tokens", 9, "--json")
    first, bad, last = map(json.loads, out.splitlines())
    assert code == 2
    assert (first["id"], last["id"]) == ("a", "c")
    assert first["text"] == reference(pair, "Then", 9)
    assert bad["error"]["file"] == str(path)
    assert bad["error"]["line"] == 2
    assert BAD[line] in bad["error"]["reason"]


def test_what_fails_while_decoding_is_that_prompts_fault(run, pair, tmp_path, decoder, monkeypatch):
    path = written(tmp_path, '{"id": "a", "prompt": "Then"}', '{"id": "b", "prompt": "on"}')
    target, usual, calls = decoder.assembly.engine.target, decoder.assembly.engine.target.commit, []

    def fails_once(rows):
        calls.append(rows)
        if len(calls) == 2:
            raise YggdrasilError("no token may follow")
        usual(rows)

    monkeypatch.setattr(target, "commit", fails_once)
    code, out, err = run("--prompts", path, "--max-new-tokens", 9)

    assert code == 2
    assert out.endswith(f"\n== b ==\n{reference(pair, 'on', 9)}\n")
    assert f"yggdrasil: {path}, line 1: no token may follow" in err.splitlines()


def test_a_file_of_bad_prompts_needs_no_model(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "open_decoder", None)
    code, out, err = run("--prompts", written(tmp_path, "{", "["))

    assert (code, out) == (2, "")
    assert "some.jsonl, line 1 is not JSON" in err


def test_an_end_at_once_is_explained(run, pair, decoder):
    tokens = byte_tokenizer()("Then on")["input_ids"]
    decoder.eos_tokens = frozenset(pair.reference(tokens, 1))
    code, out, err = run("--prompt", "Then on")

    assert (code, out) == (0, "\n")
    assert err == (
        "yggdrasil: the model ended its text at once; a chat model answers with --chat, --ignore-eos goes on\n"
    )


def test_the_contexts_end_is_explained(run):
    code, _, err = run("--prompt", "ab" * 95, "--max-new-tokens", 100)

    assert code == 0
    assert err.startswith("yggdrasil: the text ends where the context of 200 tokens does; a larger --max-length")


def test_options_that_would_be_ignored_are_refused(run):
    code, _, err = run("--prompt", "a", "--logprobs", 2)
    assert code == 2
    assert "--logprobs is part of the JSON output alone; add --json" in err
    for wrong in (("--logit-bias", "5=nan"), ("--temperature", "1e-40"), ("--stop", "")):
        code, _, err = run("--prompt", "a", *wrong)
        assert code == 2
        assert wrong[0].strip("-").replace("-", "_") in err


def test_reused_tokens_are_reported(run, tmp_path):
    path = written(tmp_path, '{"prompt": "Then on and on"}', '{"prompt": "Then on and off"}')
    _, out, _ = run("--prompts", path, "--json", "--max-new-tokens", 5)
    first, second = map(json.loads, out.splitlines())

    assert first["metrics"]["reused_tokens"] == 0
    assert second["metrics"]["reused_tokens"] > 5


OWN_RULE = """
from yggdrasil.acceptance.rules import MatchRule

class Own(MatchRule):
    name, is_lossless = "my own", False
"""


def test_an_own_rule_is_named_in_messages_and_records(run, pair, tmp_path):
    (tmp_path / "rule_of_generate.py").write_text(OWN_RULE)
    code, out, err = run("--prompt", "Then on", "--max-new-tokens", 9, "--json", "--rule", "rule_of_generate:Own")

    assert (code, err) == (0, "yggdrasil: the rule my own is lossy: the output is not the target's own\n")
    record = json.loads(out)
    assert (record["rule"], record["lossless"]) == ("my own", False)
    assert record["text"] == reference(pair, "Then on", 9)
