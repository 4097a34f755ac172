"""``yggdrasil chat`` on a tiny pair: turns, commands, interruptions, pipes."""

import io
import sys

import pytest
from tiny_pair import byte_tokenizer, chat_tokenizer

from yggdrasil.acceptance.sampling import SamplingParams
from yggdrasil.cli import chat as command
from yggdrasil.cli.chat import Conversation
from yggdrasil.engine.recommended_sampling import RecommendedSampling
from yggdrasil.engine.request_options import RequestSettings
from yggdrasil.errors import Terminated, YggdrasilError
from yggdrasil.policy.fixed import FixedPolicy
from yggdrasil.tree.shape import TreeShape

TREE = FixedPolicy(TreeShape(2, 3, 8))
COUNT = 9


@pytest.fixture
def decoder(pair):
    decoder = pair.decoder(TREE)
    decoder.tokenizer = chat_tokenizer()
    return decoder


@pytest.fixture
def run(monkeypatch, program, decoder):
    """Chat with these lines on a pipe; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(command, "open_decoder", lambda *_, **__: decoder)

    def run(*lines, options=(), stdin=None, law=("--greedy",)):
        monkeypatch.setattr(sys, "stdin", stdin or io.StringIO("".join(f"{line}\n" for line in lines)))
        return program("chat", "tiny", "--max-new-tokens", COUNT, *law, *options)

    return run


def answer(pair, text):
    tokens = byte_tokenizer()(text)["input_ids"]
    return byte_tokenizer().decode(pair.reference(tokens, COUNT), skip_special_tokens=True)


def test_turns_build_on_each_other(run, pair):
    code, out, err = run("Then on", "and", options=["--stats"])
    first = answer(pair, "u-Then on<end>a-")
    second = answer(pair, f"u-Then on<end>a-{first}<end>u-and<end>a-")

    assert (code, out) == (0, f"{first}\n{second}\n")
    figures = [line for line in err.splitlines() if line.startswith("[")]
    assert figures[0].startswith(f"[{COUNT} tokens, ")
    assert " 0 of " in figures[0]
    reused, total = figures[1].split(", ")[-1].split(" prompt tokens")[0].split(" of ")
    assert int(total) / 2 < int(reused) < int(total)
    assert all(part in figures[1] for part in ("ms per token", "tokens/s", "AAL", "first after"))


def test_commands(run, pair):
    first = answer(pair, "u-Then<end>a-")
    with_system = answer(pair, "s-be<end>u-Then<end>a-")

    assert run("Then", "/reset", "Then")[1] == f"{first}\n{first}\n"
    assert run("Then", "/retry")[1] == f"{first}\n{first}\n"
    assert run("Then", "/undo", "Then")[1] == f"{first}\n{first}\n"
    assert run("on", "/system be", "Then")[1].endswith(f"\n{with_system}\n")
    assert run("Then", options=["--system", "be"])[1] == f"{with_system}\n"
    assert run("Then", "/exit", "on")[1] == f"{first}\n"
    assert run("", "  ", "Then")[1] == f"{first}\n"
    assert "/retry" in run("/help")[2]
    assert "there is no /nothing; /help shows what there is" in run("/nothing")[2]
    assert "nothing was asked yet" in run("/retry")[2]
    assert "system: be" in run("/system", options=["--system", "be"])[2]
    assert "AAL" in run("/stats", "Then")[2]


@pytest.fixture
def interrupt(decoder, monkeypatch):
    """Have something come in the middle of the first answer."""
    target, usual, calls = decoder.assembly.engine.target, decoder.assembly.engine.target.commit, []

    def set_up(error):
        def interrupted(rows):
            calls.append(rows)
            if len(calls) == 3:
                raise error
            usual(rows)

        monkeypatch.setattr(target, "commit", interrupted)

    return set_up


@pytest.fixture
def typing(run, monkeypatch):
    """Chat at a terminal."""

    def typing(*lines):
        typed = iter([*lines, EOFError])

        def requests(_):
            line = next(typed)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", requests)
        return run(stdin=Terminal())

    return typing


def test_ctrl_c_ends_the_answer_and_not_the_chat(typing, pair, interrupt):
    interrupt(KeyboardInterrupt)
    code, out, _ = typing("Then on", "and")
    part, second = out.splitlines()[:2]

    assert code == 0
    assert 0 < len(part) < len(answer(pair, "u-Then on<end>a-"))
    assert answer(pair, "u-Then on<end>a-").startswith(part)
    assert second == answer(pair, f"u-Then on<end>a-{part}<end>u-and<end>a-")


def test_on_a_pipe_ctrl_c_is_the_end(run, pair, interrupt):
    """Nobody is there who could mean one answer alone."""
    interrupt(KeyboardInterrupt)
    code, out, _ = run("Then on", "and")

    assert code == 130
    assert out.strip()
    assert answer(pair, "u-Then on<end>a-").startswith(out.strip())


@pytest.mark.parametrize("lines", [[Terminated], ["Then on", "and"]], ids=["at the prompt", "in an answer"])
def test_sigterm_ends_the_chat(typing, interrupt, lines):
    interrupt(Terminated)

    assert typing(*lines)[0] == 143


@pytest.mark.parametrize("error", [KeyboardInterrupt, YggdrasilError("no more")])
def test_an_answer_that_is_not_given_anew_stays_as_it_was(decoder, monkeypatch, error):
    settings = RequestSettings(max_new_tokens=COUNT)
    conversation = command.Conversation(decoder, settings)
    conversation.take("Then")
    before = conversation.messages("on")

    def interrupted(*_, **__):
        raise error

    monkeypatch.setattr(decoder, "start", interrupted)
    with pytest.raises((KeyboardInterrupt, YggdrasilError)):
        conversation.take("/retry")
    assert conversation.messages("on") == before


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_at_a_terminal_faults_and_ctrl_c_end_nothing(typing, pair):
    code, out, err = typing(KeyboardInterrupt, "ab" * 150, "Then")

    assert code == 0
    assert out.strip() == answer(pair, "u-Then<end>a-")  # the question that was too long left nothing behind
    assert "Ctrl-D or /exit leaves" in err
    assert "the context holds 200" in err


def test_ctrl_c_before_an_answer_begins(typing, pair, decoder, monkeypatch):
    usual, requests = decoder.start, []

    def interrupted(*arguments, **options):
        requests.append(arguments)
        if len(requests) == 1:
            raise KeyboardInterrupt
        return usual(*arguments, **options)

    monkeypatch.setattr(decoder, "start", interrupted)
    code, out, _ = typing("Then", "Then", "/exit")

    assert (code, out) == (0, "\n" + answer(pair, "u-Then<end>a-") + "\n")


def test_on_a_pipe_a_fault_is_the_end(run):
    code, _, err = run("ab" * 150, "Then")

    assert code == 2
    assert "the context holds 200" in err


def test_ends_of_answers_are_explained(run):
    assert f"the answer was cut at {COUNT} tokens" in run("Then")[2]
    long = run("ab" * 94)
    assert "the context of 200 tokens is full; /drop forgets the oldest turns" in long[2]


def test_a_model_without_a_template_is_refused_at_once(run, decoder):
    decoder.tokenizer = byte_tokenizer()
    code, out, err = run("Then")

    assert (code, out) == (2, "")
    assert "has no chat template, so it is no chat model" in err


def test_bytes_that_are_no_text(run):
    code, _, err = run(stdin=io.TextIOWrapper(io.BytesIO(b"Then \xff\n"), encoding="utf-8"))

    assert code == 2
    assert "standard input is not text in utf-8" in err


def test_a_chat_samples_as_the_model_says_and_shows_it(run, monkeypatch, pair):
    own = RecommendedSampling(SamplingParams(temperature=0.6, top_k=20), "the file's own")
    monkeypatch.setattr("yggdrasil.engine.recommended_sampling.recommended_sampling_of", lambda _: own)

    code, _, err = run("Then", law=())
    assert code == 0
    assert "sampling: temperature 0.6, top-k 20 (the file's own); --greedy takes the best token always" in err
    assert run("Then", law=("--temperature", 0))[1] == run("Then")[1] == f"{answer(pair, 'u-Then<end>a-')}\n"
    assert "sampling: greedy\n" in run("Then")[2]
    assert "sampling: temperature 0.9, top-k 20;" in run("Then", law=("--temperature", 0.9))[2]
    assert run("Then", law=("--seed", 5))[1] == run("Then", law=("--seed", 5))[1]
    assert (
        "--greedy takes the best token always; leave out --temperature"
        in run("Then", options=["--temperature", 0.5])[2]
    )


def test_a_lossy_rule_is_not_called_exact(run):
    _, _, err = run("Then", law=("--rule", "typical", "--temperature", 0.8))

    assert "is lossy" in err
    assert "exact" not in err


def test_a_full_context_offers_to_drop_the_oldest_turns(pair, monkeypatch, capsys):
    decoder = pair.decoder(TREE)
    decoder.tokenizer = chat_tokenizer()
    conversation = Conversation(decoder, RequestSettings(4))
    for _ in range(6):
        conversation.take("a" * 20)
    with pytest.raises(YggdrasilError, match=r"fills the context of 200 tokens; /drop forgets its oldest turns"):
        conversation.take("b" * 40)
    capsys.readouterr()

    conversation.take("/drop")
    out, err = capsys.readouterr()
    assert " of 6 questions are forgotten" in err
    assert out.strip(), "what had no room is answered"
    conversation.take("/drop")
    assert "yggdrasil: 0 of " in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/reset", "/system Be brief.", "c"])
def test_a_question_without_room_is_forgotten_with_the_next_or_a_new_conversation(pair, monkeypatch, capsys, line):
    decoder = pair.decoder(TREE)
    decoder.tokenizer = chat_tokenizer()
    conversation = Conversation(decoder, RequestSettings(4))
    for _ in range(6):
        conversation.take("a" * 20)
    with pytest.raises(YggdrasilError, match="fills the context"):
        conversation.take("b" * 40)
    conversation.take(line)
    capsys.readouterr()

    conversation.take("/drop")
    assert capsys.readouterr().out == ""
